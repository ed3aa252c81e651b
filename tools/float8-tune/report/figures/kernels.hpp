// What single kernels do: the roofline, a linear's time by parts, and generated kernels against
// cuBLASLt's.
#pragma once

#include <optional>
#include <vector>

#include "tools/float8-tune/report/figures/figure.hpp"
#include "tools/float8-tune/report/figures/measurements.hpp"

namespace f8::report {

inline constexpr size_t kMaxLinears = 30;  // of a figure: the largest

// The rates that a device cannot exceed at a clock. Nothing for a device that is not known.
struct Roofs {
  double fp8_flops = 0, bf16_flops = 0;  // a second
  double bytes = 0;                      // a second, from memory
};
[[nodiscard]] std::optional<Roofs> roofs_of(const DeviceClass& device, double sm_mhz);
// The bytes that a GEMM must move at least: its operands and its result once.
[[nodiscard]] double bytes_of(const Problem& gemm, bool bf16);
// The median SM clock while the fastest fp8 kernels of a recipe ran; nothing without a row of one.
[[nodiscard]] std::optional<double> settled_mhz(const Measurements& measurements, size_t device,
                                                const std::string& recipe);

// Each returns nothing where the rows do not allow it.
[[nodiscard]] std::optional<Figure> roofline(const Measurements& measurements, size_t device,
                                             const std::string& recipe);
[[nodiscard]] std::optional<Figure> time_by_part(const Measurements& measurements, size_t device,
                                                 const std::string& recipe, int64_t m);
[[nodiscard]] std::optional<Figure> generated_against_library(const Measurements& measurements,
                                                              size_t device,
                                                              const std::string& recipe, int64_t m);

}  // namespace f8::report
