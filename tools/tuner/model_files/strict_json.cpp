#include "tools/tuner/model_files/strict_json.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>
#include <vector>

#include "base/text.hpp"

namespace f8::tuner {
namespace {

using nlohmann::json;

// The parser's messages quote the text that they stopped at, whatever bytes it has.
std::string one_line(std::string message) {
  for (char& c : message) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return message;
}

}  // namespace

Result<std::string> read_bounded(const std::filesystem::path& path, size_t max_bytes) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) {
    return fail(ErrorCode::kNotFound, "no such file: {}", path.string());
  }
  if (std::filesystem::is_directory(status)) {
    return fail(ErrorCode::kInvalidArgument, "{} is a directory; name the file in it",
                path.string());
  }
  if (!std::filesystem::is_regular_file(status) && !std::filesystem::is_fifo(status)) {
    return fail(ErrorCode::kInvalidArgument, "{} is not a regular file", path.string());
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return fail(ErrorCode::kIo, "cannot open {}: {}; check its permissions", path.string(),
                std::strerror(errno));
  }
  std::string bytes;
  std::vector<char> buffer(size_t{1} << 16);
  while (file) {
    file.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    bytes.append(buffer.data(), static_cast<size_t>(file.gcount()));
    if (bytes.size() > max_bytes) {
      return fail(ErrorCode::kInvalidArgument, "{} is larger than {} MiB; is it the right file?",
                  path.string(), max_bytes >> 20);
    }
  }
  if (file.bad()) {
    return fail(ErrorCode::kIo, "cannot read {}: {}", path.string(), std::strerror(errno));
  }
  return bytes;
}

Result<json> parse_json(std::string_view text, std::string_view where) {
  constexpr int kMaxDepth = 64;
  std::vector<std::set<std::string>> keys;
  std::string refused;
  const json::parser_callback_t callback = [&](int depth, json::parse_event_t event, json& parsed) {
    if (!refused.empty()) return false;
    if (depth > kMaxDepth) {
      refused = f8::format("is nested deeper than {} levels", kMaxDepth);
      return false;
    }
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key &&
        !keys.back().insert(parsed.get_ref<const std::string&>()).second) {
      refused = f8::format("has the key {} twice in one object",
                           quote(parsed.get_ref<const std::string&>()));
      return false;
    }
    return true;
  };
  json value;
  try {  // the library's way to say where the text is malformed
    value = json::parse(text, callback);
  } catch (const json::exception& error) {
    std::string message = error.what();
    if (const size_t end = message.find("] "); end != std::string::npos) message.erase(0, end + 2);
    return fail(ErrorCode::kInvalidArgument, "{} is not valid JSON: {}", where, one_line(message));
  }
  if (!refused.empty()) return fail(ErrorCode::kInvalidArgument, "{} {}", where, refused);
  return value;
}

Result<int64_t> integer_field(const json& object, std::string_view field, std::string_view where,
                              int64_t min, int64_t max) {
  const auto found = object.find(field);
  if (found == object.end()) {
    return fail(ErrorCode::kInvalidArgument, "{} has no field \"{}\"", where, field);
  }
  const bool fits = found->is_number_integer() &&
                    (!found->is_number_unsigned() ||
                     found->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX)) &&
                    found->get<int64_t>() >= min && found->get<int64_t>() <= max;
  if (!fits) {
    std::string shown = found->is_structured()
                            ? found->type_name()
                            : found->dump(-1, ' ', true, json::error_handler_t::replace);
    if (shown.size() > 40) shown = shown.substr(0, 37) + "...";
    return fail(ErrorCode::kInvalidArgument,
                "{}: \"{}\" is {}; it must be an integer from {} to {}", where, field, shown, min,
                max);
  }
  return found->get<int64_t>();
}

Result<int64_t> integer_field_or(const json& object, std::string_view field, std::string_view where,
                                 int64_t min, int64_t max, int64_t missing) {
  const auto found = object.find(field);
  if (found == object.end() || found->is_null()) return missing;
  return integer_field(object, field, where, min, max);
}

}  // namespace f8::tuner
