// NVML's header is in no CUDA wheel, so the few declarations needed are written out here.
#include "runtime/nvml.hpp"

#include "base/dynlib.hpp"

namespace f8::runtime {
namespace {

using NvmlDevice = void*;
constexpr int kNvmlSuccess = 0;

struct Nvml {
  int (*init)() = nullptr;
  int (*device_by_pci_bus_id)(const char* pci_bus_id, NvmlDevice* out) = nullptr;
  int (*enforced_power_limit_mw)(NvmlDevice device, unsigned* out) = nullptr;
};

Result<Nvml> load_nvml() {
  const DynamicLibrary library =
      F8_TRY(DynamicLibrary::open("libnvidia-ml.so.1", "it comes with the NVIDIA driver"));
  Nvml nvml;
  F8_TRY(library.resolve("nvmlInit_v2", nvml.init));
  F8_TRY(library.resolve("nvmlDeviceGetHandleByPciBusId_v2", nvml.device_by_pci_bus_id));
  F8_TRY(library.resolve("nvmlDeviceGetEnforcedPowerLimit", nvml.enforced_power_limit_mw));
  if (nvml.init() != kNvmlSuccess) {
    return fail(ErrorCode::kEnvironment, "nvmlInit failed");
  }
  return nvml;
}

}  // namespace

int nvml_power_limit_w(const std::string& pci_bus_id) {
  static const Result<Nvml> nvml = load_nvml();
  NvmlDevice device = nullptr;
  unsigned limit_mw = 0;
  if (!nvml || nvml->device_by_pci_bus_id(pci_bus_id.c_str(), &device) != kNvmlSuccess ||
      nvml->enforced_power_limit_mw(device, &limit_mw) != kNvmlSuccess) {
    return 0;
  }
  return static_cast<int>((limit_mw + 500) / 1000);
}

}  // namespace f8::runtime
