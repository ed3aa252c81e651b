// NVML's header is in no CUDA wheel, so the few declarations needed are written out in nvml.hpp.
#include "runtime/device/nvml.hpp"

#include "base/dynlib.hpp"

namespace f8::runtime {
namespace {

Result<Nvml> load() {
  const DynamicLibrary library =
      F8_TRY(DynamicLibrary::open("libnvidia-ml.so.1", "that of an NVIDIA driver of branch 580",
                                  "it comes with the NVIDIA driver"));
  Nvml nvml;
  F8_TRY(library.resolve("nvmlInit_v2", nvml.init));
  F8_TRY(library.resolve("nvmlDeviceGetHandleByPciBusId_v2", nvml.by_pci_bus_id));
  F8_TRY(library.resolve("nvmlDeviceGetHandleByUUID", nvml.by_uuid));
  F8_TRY(library.resolve("nvmlDeviceGetClockInfo", nvml.clock));
  F8_TRY(library.resolve("nvmlDeviceGetPowerUsage", nvml.power));
  F8_TRY(library.resolve("nvmlDeviceGetEnforcedPowerLimit", nvml.enforced_power_limit));
  F8_TRY(library.resolve("nvmlDeviceGetTemperature", nvml.temperature));
  F8_TRY(library.resolve("nvmlDeviceGetCurrentClocksThrottleReasons", nvml.clock_event_reasons));
  F8_TRY(library.resolve("nvmlDeviceGetComputeRunningProcesses_v3", nvml.compute_processes));
  F8_TRY(library.resolve("nvmlSystemGetDriverVersion", nvml.driver_version));
  if (const int status = nvml.init(); status != kNvmlSuccess) {
    return fail(ErrorCode::kEnvironment, "nvmlInit: error {}", status);
  }
  return nvml;
}

}  // namespace

Result<const Nvml*> nvml() {
  static const Result<Nvml> loaded = load();
  if (!loaded) return std::unexpected(loaded.error());
  return &*loaded;
}

int nvml_power_limit_w(const std::string& pci_bus_id) {
  const Result<const Nvml*> known = nvml();
  NvmlHandle device = nullptr;
  unsigned limit_mw = 0;
  if (!known || (*known)->by_pci_bus_id(pci_bus_id.c_str(), &device) != kNvmlSuccess ||
      (*known)->enforced_power_limit(device, &limit_mw) != kNvmlSuccess) {
    return 0;
  }
  return static_cast<int>((limit_mw + 500) / 1000);
}

}  // namespace f8::runtime
