// Written by `float8-tune profile fit`; see docs/method.md.
#include "tools/tuner/search/device_profile.hpp"

namespace f8::tuner {

std::span<const DeviceProfile> device_profiles() {
  static const std::vector<DeviceProfile> kProfiles = {
      {.name = "NVIDIA H100 80GB HBM3",
       .settled = 0.719,
       .fp8_tflops = 1465,
       .bf16_tflops = 843,
       .cast_gb_per_s = 2116,
       .memory_gb_per_s = 3562,
       .launch_us = 1.26,
       .bf16_launch_us = 2.98,
       .error_median = 0.068,
       .error_p95 = 0.202,
       .rows = 1278,
       .measured = "2026-11-24"},
      {.name = "NVIDIA H200",
       .settled = 0.726,
       .fp8_tflops = 1375,
       .bf16_tflops = 782,
       .cast_gb_per_s = 2770,
       .memory_gb_per_s = 5194,
       .launch_us = 1.28,
       .bf16_launch_us = 2.95,
       .error_median = 0.060,
       .error_p95 = 0.194,
       .rows = 2558,
       .measured = "2026-11-24"},
  };
  return kProfiles;
}

}  // namespace f8::tuner
