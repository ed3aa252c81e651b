#include "runtime/device/device_info.hpp"

#include <array>

#include "runtime/device/driver.hpp"
#include "runtime/device/nvml.hpp"

namespace f8::runtime {
namespace {

std::string hex(const char* bytes, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += f8::format("{:02x}", static_cast<unsigned char>(bytes[i]));
  }
  return text;
}

Result<int> device_count(const Driver& cuda) {
  int count = 0;
  const CUresult result = cuda.device_get_count(&count);
  if (result == CUDA_ERROR_NO_DEVICE || result == CUDA_ERROR_NOT_INITIALIZED) return 0;
  F8_TRY(cuda.check(result, "cuDeviceGetCount"));
  return count;
}

}  // namespace

Result<int> device_count() {
  return device_count(*F8_TRY(driver()));
}

Result<DeviceInfo> device_info(int ordinal) {
  return device_info(*F8_TRY(driver()), ordinal);
}

Result<DeviceInfo> device_info(const Driver& driver, int ordinal) {
  const Driver* const cuda = &driver;
  const int count = F8_TRY(device_count(driver));
  if (count == 0) {
    return fail(ErrorCode::kEnvironment,
                "the NVIDIA driver shows no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES");
  }
  if (ordinal < 0 || ordinal >= count) {
    return fail(ErrorCode::kInvalidArgument, "no CUDA device {}: there are {}, numbered from 0",
                ordinal, count);
  }
  DeviceInfo info;
  info.ordinal = ordinal;
  CUdevice device = 0;
  F8_TRY(cuda->check(cuda->device_get(&device, ordinal), "cuDeviceGet"));

  std::array<char, 256> name{};
  F8_TRY(cuda->check(cuda->device_get_name(name.data(), static_cast<int>(name.size()), device),
                     "cuDeviceGetName"));
  info.name = name.data();
  info.mig = info.name.find(" MIG ") != std::string::npos;
  CUuuid uuid{};
  F8_TRY(cuda->check(cuda->device_get_uuid(&uuid, device), "cuDeviceGetUuid"));
  info.uuid = hex(uuid.bytes, sizeof uuid.bytes);
  size_t mem_bytes = 0;
  F8_TRY(cuda->check(cuda->device_total_mem(&mem_bytes, device), "cuDeviceTotalMem"));
  info.mem_bytes = static_cast<int64_t>(mem_bytes);
  F8_TRY(cuda->check(cuda->driver_get_version(&info.driver_version), "cuDriverGetVersion"));

  const auto attribute = [&](CUdevice_attribute which) -> Result<int> {
    int value = 0;
    F8_TRY(cuda->check(cuda->device_get_attribute(&value, which, device), "cuDeviceGetAttribute"));
    return value;
  };
  info.cc = 10 * F8_TRY(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)) +
            F8_TRY(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
  info.sm_count = F8_TRY(attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
  info.l2_bytes = F8_TRY(attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE));
  info.mem_clock_mhz = F8_TRY(attribute(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)) / 1000;
  info.sm_clock_max_mhz = F8_TRY(attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE)) / 1000;

  std::array<char, 32> bus{};
  if (cuda->device_get_pci_bus_id(bus.data(), static_cast<int>(bus.size()), device) ==
      CUDA_SUCCESS) {
    info.power_limit_w = nvml_power_limit_w(bus.data());
  }
  return info;
}

}  // namespace f8::runtime
