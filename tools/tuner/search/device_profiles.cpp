// Written by `float8-tune profile fit`; see docs/method.md.
#include "tools/tuner/search/device_profile.hpp"

namespace f8::tuner {

std::span<const DeviceProfile> device_profiles() {
  static const std::vector<DeviceProfile> kProfiles = {
      {.name = "NVIDIA H100 80GB HBM3",
       .settled = 0.680,
       .fp8_tflops = 1266,
       .bf16_tflops = 686,
       .cast_gb_per_s = 2810,
       .memory_gb_per_s = 208510,
       .launch_us = 0.96,
       .bf16_launch_us = 2.81,
       .error_median = 0.033,
       .error_p95 = 0.137,
       .rows = 298,
       .measured = "2026-11-22"},
      {.name = "NVIDIA H200",
       .settled = 0.726,
       .fp8_tflops = 1408,
       .bf16_tflops = 807,
       .cast_gb_per_s = 2616,
       .memory_gb_per_s = 4625,
       .launch_us = 1.26,
       .bf16_launch_us = 2.87,
       .error_median = 0.058,
       .error_p95 = 0.194,
       .rows = 2271,
       .measured = "2026-11-23"},
  };
  return kProfiles;
}

}  // namespace f8::tuner
