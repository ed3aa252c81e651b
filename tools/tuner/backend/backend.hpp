// What a measurement needs of a machine, and no more, so that the measuring loop, the worker and
// the sweep run in tests on a fake machine with a fake clock.
//
// A backend has at most one problem open. Subjects are the things timed on it: one kernel choice of
// a GEMM, or a whole linear under a set of choices. An error with code kCuda means that the process
// cannot go on with the device; any other error is about the one subject.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "recipes/problem.hpp"
#include "runtime/device/context.hpp"
#include "runtime/gemm/gemm.hpp"

namespace f8::tuner {

// impl   := "generated" | "cublaslt" | "bf16_cublaslt"     of a GEMM
//         | "generated+" epilogue                          its epilogue does more than write it
//         | "cublaslt_tensorwise"                          its types, one scale for each operand
//         | "float8" | "bf16"                              of a linear
//         | "float8_reused"                                with the weight's copies from before
//         | "cast_list" | "cast_each" | "copy"             of weights: all in few launches, one
//                                                          after the other; a copy on the device
// config := GEMM config | "h" INT                          of a GEMM
//         | choice "," choice "," choice                   of a linear: output, grad_input,
//                                                          grad_weight
// choice := "generated:" config | "cublaslt:" config
// epilogue as Epilogue's text
struct Subject {
  std::string impl;
  std::string config;
  bool operator==(const Subject&) const = default;
};

// What a matmul's epilogue does beside scaling and writing: text := part ("+" part)*, part :=
// "bias" | "amax" | "add" (to what the result held), each once.
struct Epilogue {
  bool bias = false, amax = false, add = false;
  bool operator==(const Epilogue&) const = default;
};
[[nodiscard]] std::string to_string(const Epilogue& epilogue);  // "plain" where it does nothing
[[nodiscard]] Result<Epilogue> parse_epilogue(std::string_view text);
// As an impl, "generated" or "generated+bias", and back; nothing where it is of another kind.
[[nodiscard]] std::string generated_impl(const Epilogue& epilogue);
[[nodiscard]] std::optional<Epilogue> epilogue_of(std::string_view impl);

using LinearChoices = std::array<runtime::GemmChoice, 3>;
[[nodiscard]] std::string choices_text(const LinearChoices& choices);
[[nodiscard]] Result<LinearChoices> parse_choices(std::string_view text);

struct Built {
  int id = 0;
  std::optional<double> compile_ms;
  std::optional<int64_t> registers, smem_bytes, spill_bytes;
};

struct Check {
  bool right = true;
  double rel_err = 0;
  double sqnr_db = 0;
  std::string what;  // the worst element, where it is wrong
};

// NVML's clock event reasons.
inline constexpr uint64_t kEventIdle = 0x1;
inline constexpr uint64_t kEventSwPowerCap = 0x4;
inline constexpr uint64_t kEventHwSlowdown = 0x8;
inline constexpr uint64_t kEventSwThermal = 0x20;
inline constexpr uint64_t kEventHwThermal = 0x40;
inline constexpr uint64_t kEventPowerBrake = 0x80;
// A power cap is training's normal state: kept and recorded. These say that the machine is unfit.
inline constexpr uint64_t kDropEvents =
    kEventHwSlowdown | kEventSwThermal | kEventHwThermal | kEventPowerBrake;
[[nodiscard]] std::string describe_events(uint64_t mask);

// Seen since the last call of sample(); samples == 0 where nothing is known.
struct DeviceState {
  int samples = 0;
  double sm_mhz_mean = 0, sm_mhz_min = 0, power_w = 0, temp_c = 0;
  uint64_t events = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  [[nodiscard]] virtual const runtime::DeviceInfo& device() const = 0;
  // How many of cuBLASLt's suggestions there are, in the problem's fp8 types or in bf16.
  [[nodiscard]] virtual Result<int> heuristics(const Problem& gemm, bool bf16) = 0;

  // Lays out operand sets for a GEMM or a linear, and forgets the subjects of the problem before.
  [[nodiscard]] virtual Status open(const Problem& problem) = 0;
  // Plans and loads; nothing of the subject has run when this returns.
  [[nodiscard]] virtual Result<Built> add(const Subject& subject) = 0;
  // Runs once and compares sampled results with fp64.
  [[nodiscard]] virtual Result<Check> verify(int subject) = 0;
  // A rough time of one launch, for sizing batches.
  [[nodiscard]] virtual Result<double> estimate_ns(int subject) = 0;
  // Fixes the subject's timed batch at `launches` launches or more: so many that every operand set
  // takes part equally.
  [[nodiscard]] virtual Status set_batch(int subject, int launches) = 0;
  // Times one batch of each subject in this order, back to back; nanoseconds a launch.
  [[nodiscard]] virtual Result<std::vector<double>> time(std::span<const int> order) = 0;

  [[nodiscard]] virtual DeviceState sample() = 0;
  [[nodiscard]] virtual double now_s() const = 0;
  virtual void sleep_s(double seconds) = 0;
};

}  // namespace f8::tuner
