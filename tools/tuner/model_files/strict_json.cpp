#include "tools/tuner/model_files/strict_json.hpp"

#include <string>

namespace f8::tuner {

using Json = nlohmann::json;

Result<int64_t> integer_field(const Json& object, std::string_view field, std::string_view where,
                              int64_t min, int64_t max) {
  const auto found = object.find(field);
  if (found == object.end()) {
    return fail(ErrorCode::kInvalidArgument, "{} has no field \"{}\"; add it", where, field);
  }
  const bool fits = found->is_number_integer() &&
                    (!found->is_number_unsigned() ||
                     found->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX)) &&
                    found->get<int64_t>() >= min && found->get<int64_t>() <= max;
  if (!fits) {
    std::string shown = found->is_structured()
                            ? found->type_name()
                            : found->dump(-1, ' ', true, Json::error_handler_t::replace);
    if (shown.size() > 40) shown = shown.substr(0, 37) + "...";
    return fail(ErrorCode::kInvalidArgument,
                "{}: \"{}\" is {}; it must be an integer from {} to {}", where, field, shown, min,
                max);
  }
  return found->get<int64_t>();
}

Result<int64_t> integer_field_or(const Json& object, std::string_view field, std::string_view where,
                                 int64_t min, int64_t max, int64_t missing) {
  const auto found = object.find(field);
  if (found == object.end() || found->is_null()) return missing;
  return integer_field(object, field, where, min, max);
}

}  // namespace f8::tuner
