// NVML's view of a device while it works: clocks, power, temperature, the reasons why the clock is
// below its maximum, and who else computes on it. It is optional: where it does not answer,
// measurements go on without it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "runtime/device/nvml.hpp"
#include "tools/tuner/backend/backend.hpp"

namespace f8::tuner {

struct NvmlReading {
  double sm_mhz = 0, mem_mhz = 0, power_w = 0, temp_c = 0;
  uint64_t events = 0;
};

class NvmlDevice {
 public:
  // `uuid` has the form of runtime::DeviceInfo's: 32 hex digits.
  [[nodiscard]] static Result<NvmlDevice> open(const std::string& uuid);

  [[nodiscard]] NvmlReading read() const;
  [[nodiscard]] double power_limit_w() const;        // 0: unknown
  [[nodiscard]] std::string driver_version() const;  // "580.82.07"; empty: unknown
  // How many processes compute on the device, without this one and its parent; -1: unknown.
  [[nodiscard]] int other_compute_processes() const;

 private:
  NvmlDevice(const runtime::Nvml& nvml, runtime::NvmlHandle handle)
      : nvml_(&nvml), handle_(handle) {}
  const runtime::Nvml* nvml_;
  runtime::NvmlHandle handle_;
};

// Samples the device in a thread of its own, because an answer may take milliseconds.
class DeviceSampler {
 public:
  explicit DeviceSampler(NvmlDevice device);
  ~DeviceSampler();
  DeviceSampler(const DeviceSampler&) = delete;
  DeviceSampler& operator=(const DeviceSampler&) = delete;

  [[nodiscard]] DeviceState take();  // since the last take()

 private:
  void run();

  NvmlDevice device_;
  std::mutex mutex_;
  DeviceState state_;  // sums, until taken
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace f8::tuner
