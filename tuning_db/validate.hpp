// What a row may hold, checked alike when it is written, imported and read: signs, ranges and
// finiteness of numbers, the form of keys and dates, text without control bytes where it is printed
// or becomes a line of a table. The message names the field. Internal to tuning_db.
#pragma once

#include "tuning_db/snapshot.hpp"

namespace f8::tuning_db {

[[nodiscard]] Status validate(const DeviceClass& device);
[[nodiscard]] Status validate(const Toolchain& toolchain);
[[nodiscard]] Status validate(const Method& method);
[[nodiscard]] Status validate(const Candidate& candidate);
[[nodiscard]] Status validate(const TrialResult& result);
// All parts of the operation in their order, or none.
// Each tensor and kind of data once, and of attention alone.
[[nodiscard]] Status validate_accuracy(Op op, const std::vector<Accuracy>& accuracy);
[[nodiscard]] Status validate_kernels(Op op, const std::vector<PartKernel>& kernels);
[[nodiscard]] Status validate(const RunRecord& run);
[[nodiscard]] Status validate(const TrialRecord& trial);

[[nodiscard]] Status validate_uuid(std::string_view uuid);
[[nodiscard]] Status validate_timestamp(std::string_view at);

}  // namespace f8::tuning_db
