// The statistics of a measurement. No CUDA, no clock: numbers in, numbers out, and the same seed
// gives the same answer.
//
// Samples come in blocks: the batches that were timed together. Batches of one block share a clock,
// a temperature and a power state, so they are not independent samples, and the bootstrap draws
// whole blocks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace f8::tuner {

// All four need at least one sample.
[[nodiscard]] double mean(std::span<const double> samples);
[[nodiscard]] double median(std::span<const double> samples);
[[nodiscard]] double median_absolute_deviation(std::span<const double> samples);
[[nodiscard]] double percentile(std::span<const double> samples, double p);  // p in [0, 1], linear

struct Interval {
  double lo = 0;
  double hi = 0;
  // Half the width over the centre's value; 0.005 is "0.5 %".
  [[nodiscard]] double relative_half_width(double centre) const {
    return centre > 0 ? (hi - lo) / 2 / centre : 1e9;
  }
};

using Blocks = std::vector<std::vector<double>>;

inline constexpr int kResamples = 1000;
inline constexpr double kConfidence = 0.95;

// The interval of the median over all samples; blocks are drawn with replacement. It holds the
// samples' own median.
[[nodiscard]] Interval bootstrap_median(const Blocks& blocks, uint64_t seed,
                                        int resamples = kResamples,
                                        double confidence = kConfidence);

struct Summary {
  int64_t n = 0;
  double median = 0, mad = 0, p05 = 0, p95 = 0;
  Interval ci;
  void scale(double factor);  // the summary of samples that are all multiplied by it
};
[[nodiscard]] Summary summarize(const Blocks& blocks, uint64_t seed, int resamples = kResamples);

// How many times faster `candidate` is than `reference`: the median over the blocks of
// mean(reference) / mean(candidate), with a bootstrap interval over the blocks. Both are timed in
// every block, in mirrored order (ABBA), so that a linear drift cancels inside each block. They
// have equally many blocks, at least one.
struct PairedRatio {
  double ratio = 0;
  Interval ci;
};
[[nodiscard]] PairedRatio paired_ratio(const Blocks& candidate, const Blocks& reference,
                                       uint64_t seed, int resamples = kResamples);

// A small, portable generator (splitmix64): the same stream on every standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  // Uniform in [0, bound).
  size_t below(size_t bound) { return static_cast<size_t>(next() % bound); }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }  // [0, 1)
  template <class T>
  void shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(i)]);
  }

 private:
  uint64_t state_;
};

}  // namespace f8::tuner
