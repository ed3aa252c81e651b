// The management library (libnvidia-ml, opened at first use): what the CUDA driver does not know,
// and what the tuner watches while it measures. It is optional: where it does not answer, its
// figures are unknown. Calls return kNvmlSuccess or the number of an error.
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

// The table is initialised and lives as long as the process.
[[nodiscard]] Result<const Nvml*> nvml();

// The power limit in watts, 0 where it is unknown. `pci_bus_id` is cuDeviceGetPCIBusId's, such as
// "0000:3b:00.0".
[[nodiscard]] int nvml_power_limit_w(const std::string& pci_bus_id);

}  // namespace f8::runtime
