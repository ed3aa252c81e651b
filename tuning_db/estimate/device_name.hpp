// The devices of a table by their names.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tuning_db/estimate/tuning_table.hpp"

namespace f8 {

// The name of the one device among these whose name holds `part`, as H200, or is it, in any case of letters; empty stays
// empty. The error of a device that nobody measured names those that there are.
[[nodiscard]] Result<std::string> device_named(std::span<const DeviceClass> devices,
                                               std::string_view part);
// "'NVIDIA H100 80GB HBM3', 'NVIDIA H200'"
[[nodiscard]] std::string quoted(const std::vector<std::string>& names);

}  // namespace f8
