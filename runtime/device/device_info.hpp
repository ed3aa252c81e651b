// The properties of a CUDA device: its class, which tells measurements apart, and the device itself.
#pragma once

#include <string>

#include "base/error.hpp"
#include "tuning_db/estimate/tuning_table.hpp"

namespace f8::runtime {

struct Driver;

// `cc` is 90 on Hopper; the power limit is 0 where NVML does not say.
struct DeviceInfo : DeviceClass {
  int ordinal = 0;
  std::string uuid;        // hex
  bool emulated = false;   // host memory, no GPU: see ContextOptions::emulate
  int driver_version = 0;  // as cuDriverGetVersion gives it: 13000
};

// How many CUDA devices the driver shows; an error (kEnvironment) where there is no driver.
[[nodiscard]] Result<int> device_count();
[[nodiscard]] Result<DeviceInfo> device_info(int ordinal);
[[nodiscard]] Result<DeviceInfo> device_info(const Driver& driver, int ordinal);

}  // namespace f8::runtime
