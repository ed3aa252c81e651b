// The routings that tests of expert linears go through: the ends of the experts' rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace f8::runtime::gpu {

struct Routing {
  std::string name;
  std::vector<int32_t> ends;  // of each expert
  int32_t m;                  // rows of x; those behind the last end are of no expert
};

inline Routing routing_of(std::string name, const std::vector<int32_t>& lengths, int32_t tail = 0) {
  Routing out{std::move(name), {}, tail};
  int32_t end = 0;
  for (const int32_t length : lengths) out.ends.push_back(end += length);
  out.m += end;
  return out;
}

// `rows` rows, each for one expert by the weights' odds.
inline Routing random_routing(std::string name, const std::vector<double>& odds, int32_t rows,
                              uint64_t seed, int32_t tail = 0) {
  std::mt19937_64 random(seed);
  std::discrete_distribution<size_t> expert(odds.begin(), odds.end());
  std::vector<int32_t> lengths(odds.size());
  for (int32_t row = 0; row < rows; ++row) ++lengths[expert(random)];
  return routing_of(std::move(name), lengths, tail);
}

inline std::vector<double> zipf(size_t experts) {
  std::vector<double> odds(experts);
  for (size_t e = 0; e < experts; ++e) odds[e] = 1 / static_cast<double>(e + 1);
  return odds;
}

// Good offsets: `unit` scales the rows, so that a small one suits what is slow.
inline std::vector<Routing> routings(int32_t unit) {
  std::vector<Routing> all;
  all.push_back(routing_of("even", std::vector<int32_t>(8, unit)));
  all.push_back(random_routing("multinomial", std::vector<double>(8, 1.0), 8 * unit, 1, 5));
  all.push_back(random_routing("zipf", zipf(16), 8 * unit, 2));
  std::vector<int32_t> one(8);
  one[3] = 4 * unit + 1;
  all.push_back(routing_of("one expert has all", one, 7));
  all.push_back(routing_of("all empty", std::vector<int32_t>(4), unit));
  all.push_back(routing_of("one expert", {unit + 13}));
  all.push_back(
      routing_of("sizes about tiles", {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 0}, 3));
  std::vector<int32_t> odd;  // starts of many residues
  for (int32_t e = 0; e < 24; ++e) odd.push_back(e * 37 % 61);
  all.push_back(routing_of("odd starts", odd));
  all.push_back(random_routing("1024 experts", zipf(1024), 2 * unit, 3));
  all.push_back(routing_of("no rows", std::vector<int32_t>(3)));
  return all;
}

// Offsets of which some fall, are negative or lie beyond m.
inline Routing bad_routing(uint64_t seed) {
  std::mt19937_64 random(seed);
  Routing out{"bad", {}, static_cast<int32_t>(random() % 700)};
  const size_t experts = 1 + random() % 40;
  int32_t end = 0;
  for (size_t e = 0; e < experts; ++e) {
    constexpr int32_t kExtremes[] = {std::numeric_limits<int32_t>::min(), -1, 0,
                                     std::numeric_limits<int32_t>::max()};
    end += static_cast<int32_t>(random() % 60);
    switch (random() % 8) {
      case 0:
        out.ends.push_back(kExtremes[random() % 4]);
        break;
      case 1:
        out.ends.push_back(static_cast<int32_t>(random() % 1400) - 350);
        break;
      default:
        out.ends.push_back(end);
    }
  }
  return out;
}

}  // namespace f8::runtime::gpu
