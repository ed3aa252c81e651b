// The one figure that the CUDA driver does not know: a board's power limit, from the management
// library (libnvidia-ml, opened at first use). Optional: where it does not answer, the limit is 0.
#pragma once

#include <string>

namespace f8::runtime {

// `pci_bus_id` as cuDeviceGetPCIBusId gives it: "0000:3b:00.0". Watts.
[[nodiscard]] int nvml_power_limit_w(const std::string& pci_bus_id);

}  // namespace f8::runtime
