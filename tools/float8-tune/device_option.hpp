// --device NAME: whose measurements are asked, and which other devices have some.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tools/float8-tune/command.hpp"
#include "tuning_db/estimate/estimator.hpp"

namespace f8::cli {

CLI::Option* add_device(CLI::App& command, std::string& device);
// A device that nobody measured is an error, which names those that there are. Empty: all of them.
[[nodiscard]] Status check_device(const TuningTable& table, std::string_view name);
// Answers of the device of this name by its own toolchain; without one, of this machine. The table
// must outlive it.
[[nodiscard]] Result<tuning_db::Estimator> estimator_of(const TuningTable& table,
                                                        std::string_view recipe,
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
