// The options that decide the bits of a run, and how its ranks share the weights out.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "device.hpp"

namespace train {

struct Config {
  std::string recipe = "bf16";
  i64 hidden = 2048;  // width of the residual stream
  i64 ffn = 8192;     // width inside a block
  i64 layers = 4;
  i64 context = 16;       // bytes that a prediction sees
  i64 tokens = 8192;      // predictions of a step, of all ranks
  i64 micro_batches = 1;  // parts of a rank's predictions, whose gradients are added up
  i64 fsdp = 1;           // ranks, which share out the weights and the predictions
  i64 steps = 2000;
  u32 seed = 1;
  double lr = 3e-4;  // the highest rate

  // Throws where sizes do not fit each other; the message names all options.
  void validate() const {
    const bool fits = tokens % (16 * fsdp * micro_batches) == 0 && hidden % 16 == 0 &&
                      ffn % 16 == 0 && hidden % context == 0;
    constexpr const char* kRule =
        "--tokens (%lld) is a multiple of 16 times --fsdp (%lld) times --micro-batches (%lld); "
        "--hidden "
        "(%lld) and --ffn (%lld) are multiples of 16, and --context (%lld) divides --hidden";
    if (!fits)
      fail(FLOAT8_INVALID_ARGUMENT,
           format(kRule, tokens, fsdp, micro_batches, hidden, ffn, context));
  }
  // The rate rises in a hundred steps, and falls in a cosine to a tenth.
  [[nodiscard]] float lr_at(i64 step) const {
    const auto warm_up = static_cast<double>(std::min<i64>(100, steps / 10)),
               t = static_cast<double>(step);
    const double done = (t - warm_up) / (static_cast<double>(steps) - warm_up);
    const double factor =
        t < warm_up ? (t + 1) / (warm_up + 1) : 0.55 + 0.45 * std::cos(std::numbers::pi * done);
    return static_cast<float>(lr * factor);
  }
  // Predictions of one forward.
  [[nodiscard]] i64 batch_tokens() const { return tokens / (fsdp * micro_batches); }
};

// A linear's weight [n][k]. Rank r has the rows from r * shard_rows on; the last ranks may have fewer, or
// none.
struct Weight {
  bool follows_recipe;
  i64 n, k;
  double deviation;  // of its initial values
  i64 shard_rows, first_row, rows;
  i64 offset;     // of the shard among the rank's parameters
  i64 row_index;  // of row 0 among the rows of all weights

  [[nodiscard]] i64 shard_size() const { return shard_rows * k; }
};

// A rank's parameters lie end to end in one array, so that one kernel updates them all. Masters, gradients,
// moments and the bf16 copy have this layout:
//
//   parameters := (up[ffn][hidden] down[hidden][ffn])[layers] head[256][hidden]    shards, which decay
//                 embedding[context][256][hidden / context] gain[layers + 1][hidden]    on all ranks
struct Layout {
  std::vector<Weight> weights;
  i64 embedding = 0, gain = 0, count = 0;  // offsets, and the end
  i64 rows = 0;                            // of all weights
  i64 largest = 0;                         // the shards of a weight, of all ranks together

  explicit Layout(const Config& config, int rank = 0, int ranks = 1) : rank_(rank), ranks_(ranks) {
    for (i64 i = 0; i < config.layers; ++i) {
      add(true, config.ffn, config.hidden, 1);
      // The blocks together add as much to the residual stream, however many there are.
      add(true, config.hidden, config.ffn, std::sqrt(0.5 / static_cast<double>(config.layers)));
    }
    // The head is a hundredth of the work, and its output decides the loss.
    add(false, kBytes, config.hidden, 0.5);
    embedding = count;
    gain = embedding + kBytes * config.hidden;
    count = gain + (config.layers + 1) * config.hidden;
  }

 private:
  void add(bool follows_recipe, i64 n, i64 k, double factor) {
    const i64 each = (n / 16 + ranks_ - 1) / ranks_ * 16, first = std::min(rank_ * each, n);
    weights.push_back({follows_recipe, n, k, factor / std::sqrt(static_cast<double>(k)), each,
                       first, std::min(each, n - first), count, rows});
    count += each * k;
    rows += n;
    largest = std::max(largest, each * k * ranks_);
  }
  int rank_, ranks_;
};

// The parameters of all ranks, as one rank lays them out.
[[nodiscard]] inline std::vector<float> initial_parameters(const Config& config) {
  const Layout layout(config);
  std::vector<float> values(static_cast<size_t>(layout.count), 1.0F);  // the gains'
  // Uniform numbers, each a function of the seed and its place alone.
  const auto fill = [&](i64 first, i64 last, double deviation) {
    for (i64 i = first; i < last; ++i) {
      const u32 random = mix((~u64{config.seed} << 40) + static_cast<u64>(i));
      values[static_cast<size_t>(i)] =
          static_cast<float>((random * 0x1p-32 - 0.5) * deviation * std::sqrt(12.0));
    }
  };
  for (const Weight& weight : layout.weights) {
    fill(weight.offset, weight.offset + weight.shard_size(), weight.deviation);
  }
  fill(layout.embedding, layout.gain, 0.5);
  return values;
}

}  // namespace train
