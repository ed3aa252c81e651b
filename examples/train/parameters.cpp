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

// The rows whose squares one sum has: a part of n that no number of ranks cuts, 256 parts at most where
// n is a power of two.
int64_t rows_of_chunk(int64_t n) {
  int64_t rows = 16;
  while (n / rows > 256 && n % (2 * rows) == 0) rows *= 2;
  return rows;
}

// The rows of each shard but the last ones: whole chunks, and whole blocks that have a scale.
int64_t rows_of_shard(const TrainConfig& config, int64_t n, int64_t ranks) {
  if (ranks == 1) return n;
  const int64_t unit = std::max<int64_t>(rows_of_chunk(n), config.recipe == "blockwise" ? 128 : 16);
  const int64_t units = (n + unit - 1) / unit;
  return (units + ranks - 1) / ranks * unit;
}

}  // namespace

Parameters::Parameters(const TrainConfig& config, const Rank& fsdp, int tp) {
  const auto add = [&](std::string name, Split split, int64_t n, int64_t k, double factor) {
    const double deviation = factor / std::sqrt(static_cast<double>(k));
    if (split == Split::kRows) n /= tp;
    if (split == Split::kColumns) k /= tp;
    const int64_t each = rows_of_shard(config, n, fsdp.count);
    linears.push_back({.name = std::move(name),
                       .split = split,
                       .n = n,
                       .k = k,
                       .shard_rows = each,
                       .rows = std::clamp<int64_t>(n - fsdp.index * each, 0, each),
                       .offset = count,
                       .chunk_rows = rows_of_chunk(n),
                       .first_chunk = chunks,
                       .deviation = deviation});
    count += each * k;
    chunks += n / rows_of_chunk(n);
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
