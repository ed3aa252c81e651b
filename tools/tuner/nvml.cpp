// NVML's header is in no CUDA wheel, so the few declarations needed are written out here.
#include "tools/tuner/nvml.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "base/dynlib.hpp"

namespace f8::tuner {
namespace {

using namespace std::chrono_literals;

constexpr int kSuccess = 0;
constexpr int kClockSm = 1;
constexpr int kClockMem = 2;
constexpr int kTemperatureGpu = 0;
constexpr auto kPeriod = 20ms;  // reading more often disturbs what is read

struct ProcessInfo {  // nvmlProcessInfo_t of the _v3 call
  unsigned pid;
  unsigned long long used_memory;
  unsigned gpu_instance;
  unsigned compute_instance;
};

struct Library {
  int (*init)() = nullptr;
  int (*by_uuid)(const char* uuid, void** out) = nullptr;
  int (*clock)(void* device, int which, unsigned* mhz) = nullptr;
  int (*power)(void* device, unsigned* mw) = nullptr;
  int (*limit)(void* device, unsigned* mw) = nullptr;
  int (*temperature)(void* device, int sensor, unsigned* celsius) = nullptr;
  int (*reasons)(void* device, unsigned long long* mask) = nullptr;
  int (*processes)(void* device, unsigned* count, ProcessInfo* out) = nullptr;
  int (*driver)(char* text, unsigned length) = nullptr;
};

Result<Library> load() {
  const DynamicLibrary library =
      F8_TRY(DynamicLibrary::open("libnvidia-ml.so.1", "it comes with the NVIDIA driver"));
  Library nvml;
  F8_TRY(library.resolve("nvmlInit_v2", nvml.init));
  F8_TRY(library.resolve("nvmlDeviceGetHandleByUUID", nvml.by_uuid));
  F8_TRY(library.resolve("nvmlDeviceGetClockInfo", nvml.clock));
  F8_TRY(library.resolve("nvmlDeviceGetPowerUsage", nvml.power));
  F8_TRY(library.resolve("nvmlDeviceGetEnforcedPowerLimit", nvml.limit));
  F8_TRY(library.resolve("nvmlDeviceGetTemperature", nvml.temperature));
  F8_TRY(library.resolve("nvmlDeviceGetCurrentClocksThrottleReasons", nvml.reasons));
  F8_TRY(library.resolve("nvmlDeviceGetComputeRunningProcesses_v3", nvml.processes));
  F8_TRY(library.resolve("nvmlSystemGetDriverVersion", nvml.driver));
  if (const int status = nvml.init(); status != kSuccess) {
    return fail(ErrorCode::kEnvironment, "nvmlInit: error {}", status);
  }
  return nvml;
}

Result<const Library*> library() {
  static const Result<Library> loaded = load();
  if (!loaded) return std::unexpected(loaded.error());
  return &*loaded;
}

// A NvmlDevice exists only where the library does.
const Library& nvml() {
  return **library();
}

}  // namespace

Result<NvmlDevice> NvmlDevice::open(const std::string& uuid) {
  const Library* known = F8_TRY(library());
  if (uuid.size() != 32) {
    return fail(ErrorCode::kInvalidArgument, "device uuid \"{}\" is not 32 hex digits", uuid);
  }
  const std::string text = fmt::format("GPU-{}-{}-{}-{}-{}", uuid.substr(0, 8), uuid.substr(8, 4),
                                       uuid.substr(12, 4), uuid.substr(16, 4), uuid.substr(20));
  void* handle = nullptr;
  if (const int status = known->by_uuid(text.c_str(), &handle); status != kSuccess) {
    return fail(ErrorCode::kEnvironment, "nvmlDeviceGetHandleByUUID({}): error {}", text, status);
  }
  return NvmlDevice(handle);
}

NvmlReading NvmlDevice::read() const {
  NvmlReading reading;
  unsigned value = 0;
  if (nvml().clock(handle_, kClockSm, &value) == kSuccess) reading.sm_mhz = value;
  if (nvml().clock(handle_, kClockMem, &value) == kSuccess) reading.mem_mhz = value;
  if (nvml().power(handle_, &value) == kSuccess) reading.power_w = value / 1e3;
  if (nvml().temperature(handle_, kTemperatureGpu, &value) == kSuccess) reading.temp_c = value;
  unsigned long long mask = 0;
  if (nvml().reasons(handle_, &mask) == kSuccess) reading.events = mask;
  return reading;
}

double NvmlDevice::power_limit_w() const {
  unsigned mw = 0;
  return nvml().limit(handle_, &mw) == kSuccess ? mw / 1e3 : 0;
}

std::string NvmlDevice::driver_version() const {
  std::array<char, 96> text{};
  return nvml().driver(text.data(), text.size()) == kSuccess ? text.data() : "";
}

int NvmlDevice::other_compute_processes() const {
  std::array<ProcessInfo, 64> infos{};
  unsigned count = infos.size();
  if (nvml().processes(handle_, &count, infos.data()) != kSuccess) return -1;
  int others = 0;
  for (unsigned i = 0; i < count; ++i) {
    const auto pid = static_cast<pid_t>(infos[i].pid);
    if (pid != ::getpid() && pid != ::getppid()) ++others;
  }
  return others;
}

DeviceSampler::DeviceSampler(NvmlDevice device) : device_(device) {
  thread_ = std::thread([this] { run(); });
}

DeviceSampler::~DeviceSampler() {
  stop_ = true;
  thread_.join();
}

void DeviceSampler::run() {
  while (!stop_) {
    const NvmlReading reading = device_.read();
    {
      const std::lock_guard lock(mutex_);
      state_.sm_mhz_min =
          state_.samples == 0 ? reading.sm_mhz : std::min(state_.sm_mhz_min, reading.sm_mhz);
      ++state_.samples;
      state_.sm_mhz_mean += reading.sm_mhz;
      state_.power_w += reading.power_w;
      state_.temp_c = std::max(state_.temp_c, reading.temp_c);
      state_.events |= reading.events;
    }
    std::this_thread::sleep_for(kPeriod);
  }
}

DeviceState DeviceSampler::take() {
  const std::lock_guard lock(mutex_);
  DeviceState state = state_;
  state_ = {};
  if (state.samples > 0) {
    state.sm_mhz_mean /= state.samples;
    state.power_w /= state.samples;
  }
  return state;
}

}  // namespace f8::tuner
