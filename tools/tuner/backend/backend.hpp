// The part of a machine that measuring needs, and no more, so that the measuring loop, the worker
// and the sweep run in tests on a fake machine with a fake clock.
//
// A backend has at most one problem open, and its candidates are added to it. An error with code
// kCuda means that the process cannot go on with the device; any other error is about the one
// candidate.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/tuner/backend/attention_data.hpp"
#include "tools/tuner/backend/candidate.hpp"

namespace f8::tuner {

// A candidate that is planned and loaded.
struct Built {
  int id = 0;
  std::optional<double> compile_ms{};  // {}: so that designated initialisers may leave members out
  std::optional<int64_t> registers{}, smem_bytes{}, spill_bytes{};
};

// How many suggestions cuBLASLt has for a GEMM, and which of them a plan takes where none was measured.
struct Suggested {
  int count = 0;
  int unmeasured = 0;
};

// cuBLASLt has no grouped GEMM in fp8; in bf16 it has a call for each group, which a plan chooses.
[[nodiscard]] constexpr Suggested suggested_of_groups(bool bf16) {
  return {.count = bf16 ? 1 : 0};
}

struct Check {
  bool right = true;
  double rel_err = 0;
  double sqnr_db = 0;
  std::string what;  // the worst element, where the result is wrong
};

// NVML's clock event reasons.
inline constexpr uint64_t kEventIdle = 0x1;
inline constexpr uint64_t kEventSwPowerCap = 0x4;
inline constexpr uint64_t kEventHwSlowdown = 0x8;
inline constexpr uint64_t kEventSwThermal = 0x20;
inline constexpr uint64_t kEventHwThermal = 0x40;
inline constexpr uint64_t kEventPowerBrake = 0x80;
// These say that the machine is unfit. A power cap is training's normal state: it is kept and
// recorded.
inline constexpr uint64_t kDropEvents =
    kEventHwSlowdown | kEventSwThermal | kEventHwThermal | kEventPowerBrake;
[[nodiscard]] std::string describe_events(uint64_t mask);

// The device's state since the last call of sample(); samples == 0 if nothing is known.
struct DeviceState {
  int samples = 0;
  double sm_mhz_mean = 0, sm_mhz_min = 0, power_w = 0, temp_c = 0;
  uint64_t events = 0;
};

// What a launch finds in the L2 cache. Cold is training's state: many operand sets take turns, so
// that none of them stays in L2. Hot repeats one set, which stays in L2 as far as it fits.
enum class L2State { kCold, kHot };

class Backend {
 public:
  virtual ~Backend() = default;

  [[nodiscard]] virtual const runtime::DeviceInfo& device() const = 0;
  // cuBLASLt's suggestions for the problem's fp8 types or for bf16.
  [[nodiscard]] virtual Result<Suggested> suggestions(const Problem& gemm, bool bf16) = 0;

  // Lays out operand sets for a GEMM or a linear, and forgets the candidates of the problem before.
  [[nodiscard]] virtual Status open(const Problem& problem, L2State l2) = 0;
  // Plans and loads a candidate; nothing of it has run when this returns.
  [[nodiscard]] virtual Result<Built> add(const Candidate& candidate) = 0;
  // Runs a candidate once and compares sampled results with fp64.
  [[nodiscard]] virtual Result<Check> verify(int candidate) = 0;
  // A rough time of one launch, for sizing batches.
  [[nodiscard]] virtual Result<double> estimate_ns(int candidate) = 0;
  // Fixes the candidate's timed batch at `launches` launches, rounded up so that every operand set
  // takes part equally.
  [[nodiscard]] virtual Status set_batch(int candidate, int launches) = 0;
  // Times one batch of each candidate in this order, back to back; nanoseconds of one launch.
  [[nodiscard]] virtual Result<std::vector<double>> time(std::span<const int> order) = 0;

  // Runs attention's forward, and its backward where there is one, on these operands, in memory of its own. The backward
  // of kFp8Forward is a library's. A backend that only times has none of both.
  [[nodiscard]] virtual Result<AttentionResults<float>> attention_results(
      AttentionRecipe recipe, const AttentionShape& shape, const AttentionData& data);

  [[nodiscard]] virtual DeviceState sample() = 0;
  [[nodiscard]] virtual double now_s() const = 0;
  virtual void sleep_s(double seconds) = 0;
};

}  // namespace f8::tuner
