#include "parameters.hpp"

#include <algorithm>
#include <cmath>

#include "error.hpp"

namespace train {
namespace {

constexpr double kEmbeddingDeviation = 0.5;

// Fills in uniform numbers, each a function of the seed and its place alone.
void fill_uniform(std::span<float> values, double deviation, uint64_t seed, uint64_t first) {
  const double range = deviation * std::sqrt(12.0);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t random = mix((~seed << 40) + first + i);
    values[i] = static_cast<float>((random * 0x1p-32 - 0.5) * range);
  }
}

}  // namespace

Parameters::Parameters(const TrainConfig& config, int fsdp, int tp) {
  const auto add = [&](std::string name, Split split, int64_t n, int64_t k, double factor) {
    const double deviation = factor / std::sqrt(static_cast<double>(k));
    if (split == Split::kRows) n /= tp;
    if (split == Split::kColumns) k /= tp;
    linears.push_back({.name = std::move(name),
                       .split = split,
                       .n = n,
                       .k = k,
                       .rows = n / fsdp,
                       .offset = count,
                       .deviation = deviation});
    count += n / fsdp * k;
  };
  // The blocks together add as much to the residual stream, however many there are.
  const double residual_gain = 1 / std::sqrt(2.0 * static_cast<double>(config.layers));
  for (int64_t i = 0; i < config.layers; ++i) {
    add(format("block.%ld.up", i), Split::kRows, config.ffn, config.hidden, 1);
    add(format("block.%ld.down", i), Split::kColumns, config.hidden, config.ffn, residual_gain);
  }
  add("head", Split::kNone, kBytes, config.hidden, 0.5);
  decayed = count;
  embedding = count;
  count += kBytes * config.hidden;
  gain = count;
  count += (config.layers + 1) * config.hidden;
}

std::vector<float> Parameters::initial(const TrainConfig& config) const {
  std::vector<float> values(static_cast<size_t>(count), 1.0F);
  const auto fill = [&](int64_t first, int64_t size, double deviation) {
    fill_uniform(std::span(values).subspan(static_cast<size_t>(first), static_cast<size_t>(size)),
                 deviation, config.seed, static_cast<uint64_t>(first));
  };
  for (const LinearShape& linear : linears) {
    fill(linear.offset, linear.rows * linear.k, linear.deviation);
  }
  fill(embedding, gain - embedding, kEmbeddingDeviation);
  return values;
}

}  // namespace train
