#include "tools/tuner/backend/nvml.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>

namespace f8::tuner {
namespace {

using namespace std::chrono_literals;
using runtime::kNvmlSuccess;

constexpr int kClockSm = 1;
constexpr int kClockMem = 2;
constexpr int kTemperatureGpu = 0;
constexpr auto kPeriod = 20ms;  // reading more often disturbs what is read

}  // namespace

Result<NvmlDevice> NvmlDevice::open(const std::string& uuid) {
  const runtime::Nvml* nvml = F8_TRY(runtime::nvml());
  if (uuid.size() != 32) {
    return fail(ErrorCode::kInvalidArgument, "device uuid \"{}\" is not 32 hex digits", uuid);
  }
  const std::string text = f8::format("GPU-{}-{}-{}-{}-{}", uuid.substr(0, 8), uuid.substr(8, 4),
                                      uuid.substr(12, 4), uuid.substr(16, 4), uuid.substr(20));
  runtime::NvmlHandle handle = nullptr;
  if (const int status = nvml->by_uuid(text.c_str(), &handle); status != kNvmlSuccess) {
    return fail(ErrorCode::kEnvironment,
                "nvmlDeviceGetHandleByUUID({}): error {}; see whether nvidia-smi -L lists it", text,
                status);
  }
  return NvmlDevice(*nvml, handle);
}

NvmlReading NvmlDevice::read() const {
  NvmlReading reading;
  unsigned value = 0;
  if (nvml_->clock(handle_, kClockSm, &value) == kNvmlSuccess) reading.sm_mhz = value;
  if (nvml_->clock(handle_, kClockMem, &value) == kNvmlSuccess) reading.mem_mhz = value;
  if (nvml_->power(handle_, &value) == kNvmlSuccess) reading.power_w = value / 1e3;
  if (nvml_->temperature(handle_, kTemperatureGpu, &value) == kNvmlSuccess) reading.temp_c = value;
  unsigned long long mask = 0;
  if (nvml_->clock_event_reasons(handle_, &mask) == kNvmlSuccess) reading.events = mask;
  return reading;
}

double NvmlDevice::power_limit_w() const {
  unsigned mw = 0;
  return nvml_->enforced_power_limit(handle_, &mw) == kNvmlSuccess ? mw / 1e3 : 0;
}

std::string NvmlDevice::driver_version() const {
  std::array<char, 96> text{};
  return nvml_->driver_version(text.data(), text.size()) == kNvmlSuccess ? text.data() : "";
}

int NvmlDevice::other_compute_processes() const {
  std::array<runtime::NvmlProcess, 64> infos{};
  unsigned count = infos.size();
  if (nvml_->compute_processes(handle_, &count, infos.data()) != kNvmlSuccess) return -1;
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
