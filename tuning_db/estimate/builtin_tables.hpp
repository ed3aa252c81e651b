// The tables that ship with float8, one for each device that was measured (tuning_db/data), as data
// of the library.
#pragma once

#include <memory>
#include <span>

#include "tuning_db/estimate/tuning_table.hpp"

namespace f8::tuning_db {

// Read once, at the first call; thread-safe.
[[nodiscard]] std::span<const TuningTable> builtin_tables();
// The nearest_table of them, and behind it the others of its compute capability; null where there
// is none.
[[nodiscard]] std::shared_ptr<const TuningTable> builtin_table(const DeviceClass& device);
[[nodiscard]] bool is_builtin(const TuningTable& table);

}  // namespace f8::tuning_db
