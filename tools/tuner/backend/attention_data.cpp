#include "tools/tuner/backend/attention_data.hpp"

#include <numbers>

#include "recipes/dtype.hpp"
#include "tools/tuner/statistics.hpp"

namespace f8::tuner {
namespace {

constexpr double kOutlierShare = 1e-3;
constexpr float kOutlier = 10, kSharp = 0.75F;

// By Box and Muller.
std::vector<float> normal_numbers(int64_t count, Random& random) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    const double radius = std::sqrt(-2 * std::log(1 - random.uniform()));
    value = static_cast<float>(radius * std::cos(2 * std::numbers::pi * random.uniform()));
  }
  return values;
}

void add_outliers(std::vector<float>& values, Random& random) {
  for (float& value : values) value *= random.uniform() < kOutlierShare ? kOutlier : 1;
}

std::vector<uint16_t> rounded(const std::vector<float>& values) {
  std::vector<uint16_t> bits;
  for (const float value : values) bits.push_back(encode_bf16(value));
  return bits;
}

std::vector<float> decoded(const std::vector<uint16_t>& bits) {
  std::vector<float> values;
  for (const uint16_t each : bits) values.push_back(decode_bf16(each));
  return values;
}

}  // namespace

AttentionData attention_data(std::string_view kind, const AttentionShape& shape, uint64_t seed) {
  Random random(seed);
  const int64_t d = shape.head_dim;
  const int64_t head = shape.tokens * d;
  std::vector<float> q = normal_numbers(shape.batch * shape.heads_q * head, random);
  std::vector<float> k = normal_numbers(shape.batch * shape.heads_kv * head, random);
  std::vector<float> v = normal_numbers(shape.batch * shape.heads_kv * head, random);
  if (kind == "outlier") {
    for (std::vector<float>* each : {&q, &k, &v}) add_outliers(*each, random);
  } else if (kind == "bias") {
    for (int64_t h = 0; h < shape.batch * shape.heads_kv; ++h) {
      for (int64_t c = 0; c < d; ++c) {
        const auto mean = static_cast<float>(8 + 7 * random.uniform());
        for (int64_t t = 0; t < shape.tokens; ++t) {
          k[static_cast<size_t>(h * head + t * d + c)] += mean;
        }
      }
    }
  } else if (kind == "sharp") {
    const int64_t group = shape.heads_q / shape.heads_kv;
    for (int64_t i = 0; i < std::ssize(q); ++i) {
      const int64_t h = i / head;
      q[static_cast<size_t>(i)] += kSharp * k[static_cast<size_t>(h / group * head + i % head)];
    }
  }
  std::vector<float> dout = normal_numbers(std::ssize(q), random);
  if (kind == "outlier") add_outliers(dout, random);
  return {rounded(q), rounded(k), rounded(v), rounded(dout)};
}

AttentionResults<double> exact_attention(const AttentionShape& shape, const AttentionData& data,
                                         bool backward) {
  const std::vector<float> q = decoded(data.q), k = decoded(data.k), v = decoded(data.v);
  const std::vector<float> dout = decoded(data.dout);
  const int64_t d = shape.head_dim;
  const int64_t head = shape.tokens * d;
  const int64_t group = shape.heads_q / shape.heads_kv;
  AttentionResults<double> exact;
  exact.o.resize(q.size());
  if (backward) {
    exact.dq.resize(q.size());
    exact.dk.resize(k.size());
    exact.dv.resize(v.size());
  }
  for (int64_t h = 0; h < shape.batch * shape.heads_q; ++h) {
    const auto of_keys = [&](const std::vector<float>& x) {
      return
          [d, rows = x.data() + h / group * head](int64_t j, int64_t c) { return rows[j * d + c]; };
    };
    for (int64_t t = 0; t < shape.tokens; ++t) {
      const int64_t row = h * head + t * d;
      const auto of_query = [&](const std::vector<float>& x) {
        return [values = x.data() + row](int64_t c) { return values[c]; };
      };
      const std::vector<double> p =
          exact_softmax(shape.causal ? t + 1 : shape.tokens, d, of_query(q), of_keys(k));
      const int64_t sequence = h / shape.heads_q;
      const int64_t at = (sequence * shape.tokens + t) * shape.heads_q + h % shape.heads_q;
      std::ranges::copy(weighted_sum(p, d, of_keys(v)), exact.o.begin() + at * d);
      if (!backward) continue;
      const std::vector<double> ds = exact_score_gradients(p, d, of_keys(v), of_query(dout));
      std::ranges::copy(weighted_sum(ds, d, of_keys(k)), exact.dq.begin() + row);
      double* const dk = exact.dk.data() + h / group * head;
      double* const dv = exact.dv.data() + h / group * head;
      for (int64_t j = 0; j < std::ssize(p); ++j) {
        for (int64_t c = 0; c < d; ++c) {
          dk[j * d + c] += ds[static_cast<size_t>(j)] * of_query(q)(c);
          dv[j * d + c] += p[static_cast<size_t>(j)] * of_query(dout)(c);
        }
      }
    }
  }
  return exact;
}

tuning_db::Accuracy accuracy_of(std::string_view data, std::string_view tensor,
                                std::span<const float> actual, std::span<const double> exact) {
  double signal = 0, noise = 0, own = 0, both = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double value = actual[i];
    signal += exact[i] * exact[i];
    own += value * value;
    both += value * exact[i];
    noise += (value - exact[i]) * (value - exact[i]);
  }
  constexpr double kLeast = 1e-300;
  return {.data = std::string(data),
          .tensor = std::string(tensor),
          .sqnr_db = 10 * std::log10(std::max(signal, kLeast) / std::max(noise, kLeast)),
          .cosine = both / std::max(std::sqrt(signal * own), kLeast),
          .rmse = std::sqrt(noise / static_cast<double>(std::max<size_t>(exact.size(), 1)))};
}

}  // namespace f8::tuner
