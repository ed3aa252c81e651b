// The management library (libnvidia-ml, opened at first use): what the CUDA driver does not know,
// and what the tuner watches while it measures. Optional: where it does not answer, its figures are
// unknown. Calls return kNvmlSuccess or an error's number.
#pragma once

#include <string>

#include "base/error.hpp"

namespace f8::runtime {

using NvmlHandle = void*;
inline constexpr int kNvmlSuccess = 0;

struct NvmlProcess {  // nvmlProcessInfo_t of the _v3 call
  unsigned pid;
  unsigned long long used_memory;
  unsigned gpu_instance;
  unsigned compute_instance;
};

struct Nvml {
  int (*init)() = nullptr;
  int (*by_pci_bus_id)(const char* pci_bus_id, NvmlHandle* out) = nullptr;
  int (*by_uuid)(const char* uuid, NvmlHandle* out) = nullptr;
  int (*clock)(NvmlHandle device, int which, unsigned* mhz) = nullptr;
  int (*power)(NvmlHandle device, unsigned* mw) = nullptr;
  int (*enforced_power_limit)(NvmlHandle device, unsigned* mw) = nullptr;
  int (*temperature)(NvmlHandle device, int sensor, unsigned* celsius) = nullptr;
  int (*clock_event_reasons)(NvmlHandle device, unsigned long long* mask) = nullptr;
  int (*compute_processes)(NvmlHandle device, unsigned* count, NvmlProcess* out) = nullptr;
  int (*driver_version)(char* text, unsigned length) = nullptr;
};

// Initialised; lives as long as the process.
[[nodiscard]] Result<const Nvml*> nvml();

// `pci_bus_id` as cuDeviceGetPCIBusId gives it: "0000:3b:00.0". Watts; 0: unknown.
[[nodiscard]] int nvml_power_limit_w(const std::string& pci_bus_id);

}  // namespace f8::runtime
