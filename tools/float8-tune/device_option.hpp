// --device NAME: whose measurements are asked, and which other devices have some.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/float8-tune/command.hpp"
#include "tuning_db/estimate/estimator.hpp"

namespace f8::cli {

CLI::Option* add_device(CLI::App& command, std::string& device);
// The name of the one device among these whose name holds `part`, as H200, or is it; empty stays empty.
// A device that nobody measured is an error of --device, which names those that there are.
[[nodiscard]] Result<std::string> device_named(std::span<const DeviceClass> devices,
                                               std::string_view part);
// Answers of the device of this name by its own toolchain; without one, of this machine. The table
// must outlive it.
[[nodiscard]] tuning_db::Estimator estimator_of(const TuningTable& table, const Recipe& recipe,
                                                const std::string& name);
// The device that an answer is about: the one that is named, else this machine's GPU, else `first`.
[[nodiscard]] std::string asked_device(const std::string& name, std::string_view first);
// "measured on 'NVIDIA H200' and not on 'NVIDIA H100 80GB HBM3'".
[[nodiscard]] std::string elsewhere_text(const std::vector<std::string>& others,
                                         std::string_view asked);
// The same with "; --device 'NVIDIA H200' shows that", where it is not shown.
[[nodiscard]] std::string elsewhere_hint(const std::vector<std::string>& others,
                                         std::string_view asked);

}  // namespace f8::cli
