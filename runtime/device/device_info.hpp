// The properties of a CUDA device: the fields that tell measurements apart.
#pragma once

#include <cstddef>
#include <string>

#include "base/error.hpp"

namespace f8::runtime {

struct Driver;

struct DeviceInfo {
  int ordinal = 0;
  std::string name;
  std::string uuid;  // hex
  int cc = 0;        // 90
  int sm_count = 0;
  size_t l2_bytes = 0;
  size_t mem_bytes = 0;
  int mem_clock_mhz = 0;
  int sm_clock_max_mhz = 0;
  int power_limit_w = 0;  // 0 where NVML does not say
  bool mig = false;
  bool emulated = false;   // host memory, no GPU: see ContextOptions::emulate
  int driver_version = 0;  // as cuDriverGetVersion gives it: 13000
};

// How many CUDA devices the driver shows; an error (kEnvironment) where there is no driver.
[[nodiscard]] Result<int> device_count();
[[nodiscard]] Result<DeviceInfo> device_info(int ordinal);
[[nodiscard]] Result<DeviceInfo> device_info(const Driver& driver, int ordinal);

}  // namespace f8::runtime
