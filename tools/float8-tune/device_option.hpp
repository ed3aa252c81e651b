// --device NAME: whose measurements are asked, and which other devices have some.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tuning_db/estimate/device_name.hpp"
#include "tuning_db/estimate/estimator.hpp"

namespace f8::cli {

CLI::Option* add_device(CLI::App& command, std::string& device);
// Answers of the device of this name by its own toolchain; without one, of this machine, or of the
// table's first device where there is no GPU. The table must outlive it.
[[nodiscard]] tuning_db::Estimator estimator_of(const TuningTable& table, const Recipe& recipe,
                                                const std::string& name);
// The device that an answer is about. One rule chooses it for all commands.
struct AskedDevice {
  std::string named;                // by --device: only its rows count; empty: those of all devices
  std::string name;                 // that one, else this machine's GPU, else the first with rows
  std::vector<std::string> others;  // the other devices with rows
  [[nodiscard]] bool is_assumed() const { return named.empty() && this_gpu() == nullptr; }
};
[[nodiscard]] Result<AskedDevice> asked_device(std::span<const DeviceClass> devices,
                                               std::string_view part);
// Its name and, where it is assumed, why, and the others with the option that shows them.
[[nodiscard]] std::string device_text(const AskedDevice& asked);
void add_asked_device(Json& json, const AskedDevice& asked);  // "device" and "other_devices"
// The devices of the rows that are wanted, each once.
[[nodiscard]] std::vector<std::string> devices_with(
    const TuningTable& table, std::span<const LinearSpeedup> rows,
    const std::function<bool(const LinearSpeedup&)>& is_wanted);
// "measured on 'NVIDIA H200' and not on 'NVIDIA H100 80GB HBM3'".
[[nodiscard]] std::string elsewhere_text(const std::vector<std::string>& others,
                                         std::string_view asked);
// The same with "; --device 'NVIDIA H200' shows that", where it is not shown.
[[nodiscard]] std::string elsewhere_hint(const std::vector<std::string>& others,
                                         std::string_view asked);

}  // namespace f8::cli
