// The messages between a sweep and its worker process: one JSON object a line.
//
//   parent -> worker
//     {"do":"suggestions","problem":KEY,"bf16":BOOL}
//     {"do":"group","problem":KEY,"candidates":[{"impl":..,"config":..}],...}
//         The other fields are InterleavedGroup's. "reference" asks for ratios and "drop_above"
//         for a screening; there is at most one of them.
//     {"do":"accuracy","problem":KEY,"data":TEXT,"seed":INT}     of attention of this shape, on data of one kind
//   worker -> parent: every line is a sign of life
//     {"is":"hello","device":{..}}            once, at the start
//     {"is":"begin","candidate":INT}          what follows may take the process down
//     {"is":"suggestions","count":INT,"unmeasured":INT}
//     {"is":"outcomes","results":[..]}        answers "group"
//     {"is":"accuracy","of":[..]}             of each tensor
//     {"is":"error","code":TEXT,"message":TEXT,"fatal":BOOL}   fatal: the worker ends after it
#pragma once

#include <nlohmann/json.hpp>

#include "tools/tuner/measure/interleaved_group.hpp"

namespace f8::tuner {

using Json = nlohmann::json;

[[nodiscard]] Json to_json(const InterleavedGroup& group);
[[nodiscard]] Json to_json(const tuning_db::TrialResult& result);
[[nodiscard]] Json to_json(const runtime::DeviceInfo& device);
[[nodiscard]] Json to_json(const tuning_db::Accuracy& accuracy);

[[nodiscard]] Result<Json> parse_message(std::string_view line, std::string_view what);
[[nodiscard]] Result<InterleavedGroup> parse_group(const Json& json);
[[nodiscard]] Result<tuning_db::TrialResult> parse_result(const Json& json);
[[nodiscard]] Result<runtime::DeviceInfo> parse_device(const Json& json);
[[nodiscard]] Result<std::vector<tuning_db::Accuracy>> parse_accuracy(const Json& json);

[[nodiscard]] std::string_view to_string(ErrorCode code);
[[nodiscard]] ErrorCode parse_error_code(std::string_view text);

}  // namespace f8::tuner
