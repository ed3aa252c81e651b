// What databases hold of a sweep already.
#pragma once

#include <set>
#include <span>
#include <string>

#include "tools/tuner/search/plan/sweep_plan.hpp"

namespace f8::tuner {

// The request's linears, by problem key, that a database has an `ok` fp8 row of, by this method, code
// generator, NVRTC and cuBLASLt on this class of device: Database::is_comparable().
[[nodiscard]] Result<std::set<std::string>> measured_linears(
    std::span<const tuning_db::Database* const> databases, const SweepRequest& request,
    const DeviceClass& device, const tuning_db::Toolchain& toolchain);

}  // namespace f8::tuner
