// Two sets of measurements, problem by problem: is B faster than A? Plain rows in, verdicts out; no
// SQLite. Rows are compared only where one method measured both.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tuning_db/database.hpp"

namespace f8::tuning_db {

// What is compared: the time of a problem's fastest kernel, or the speedup of a linear against its
// bf16 baseline, which was measured interleaved and so bears another clock.
enum class Quantity : uint8_t { kTime, kSpeedup };

// Which rows of a database take part. An empty text admits all.
struct Selection {
  std::string run;        // how the run's uuid begins
  std::string toolchain;  // a part of the toolchain's description
  std::string device;     // a part of the device's name
  [[nodiscard]] bool admits(const TrialRow& row) const;
  bool operator==(const Selection&) const = default;
};

struct CompareOptions {
  Quantity quantity = Quantity::kTime;
  double threshold = 0.02;      // times that differ by less are the same
  bool across_devices = false;  // devices of unlike names are compared too
};

enum class Outcome : uint8_t { kFaster, kSlower, kSame, kAmbiguous };
inline constexpr Outcome kOutcomes[] = {Outcome::kFaster, Outcome::kSlower, Outcome::kSame,
                                        Outcome::kAmbiguous};
[[nodiscard]] std::string_view to_string(Outcome outcome);  // "FASTER"

// B against A on one problem. The ratio is above 1 where B is faster.
struct Comparison {
  TrialRow a, b;
  Outcome outcome = Outcome::kAmbiguous;
  std::string reason;  // why it is ambiguous
  double ratio = 0, lo = 0, hi = 0;
};

// A problem that both have on one device, and by no method in common.
struct UnlikeMethods {
  TrialRow a, b;
};

struct CompareResult {
  std::vector<Comparison> compared;
  std::vector<UnlikeMethods> unlike;
  std::vector<TrialRow> only_a, only_b;  // a row for each problem and device
  double geometric_mean = 1;             // of the ratios
  [[nodiscard]] size_t count(Outcome outcome) const;
};

inline constexpr int64_t kFewSamples = 10;   // a bootstrap of fewer says little of the spread
inline constexpr double kOtherClock = 0.05;  // mean SM clocks further apart are other conditions

// The rows are of final methods and have a time, as Database::timed() returns them. The order of
// the result is that of the rows.
[[nodiscard]] CompareResult compare(const std::vector<TrialRow>& a, const std::vector<TrialRow>& b,
                                    const CompareOptions& options);

// The fields in which two specs of a method differ, as "gemm.ms is 60 and 30".
[[nodiscard]] Result<std::vector<std::string>> differing_fields(std::string_view spec_a,
                                                                std::string_view spec_b);

}  // namespace f8::tuning_db
