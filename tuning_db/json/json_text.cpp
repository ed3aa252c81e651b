// A listener to nlohmann's tokenizer that builds the value. The library's own callback would do,
// but it walks the whole enclosing container at the end of each object.
#include "tuning_db/json/json_text.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "base/text.hpp"

namespace f8::tuning_db {
namespace {

using Json = nlohmann::json;

class Builder {
 public:
  explicit Builder(const TakeMember* take = nullptr) : take_(take) {}
  [[nodiscard]] Json take() { return std::move(root_); }
  [[nodiscard]] Error error(std::string_view where) const {
    if (!taken_) return taken_.error();
    return fail(ErrorCode::kInvalidArgument, "{} {}", where, error_).error();
  }

  bool null() { return scalar(nullptr); }
  bool boolean(bool value) { return scalar(value); }
  bool number_integer(int64_t value) { return scalar(value); }
  bool number_unsigned(uint64_t value) { return scalar(value); }
  bool number_float(double value, const std::string&) { return scalar(value); }
  bool string(std::string& value) { return scalar(std::move(value)); }
  bool binary(Json::binary_t&) { return refuse("has binary data"); }
  bool start_object(size_t) { return open(Json::object()); }
  bool start_array(size_t) { return open(Json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    if (hands_out()) {
      hashes_.push_back(std::hash<std::string_view>()(name));
      name_ = name;
      member_ = &handed_;
      return true;
    }
    const auto [at, is_new] = open_.back()->get_ref<Json::object_t&>().emplace(name, nullptr);
    if (!is_new) return refuse(f8::format("has the key {} twice in one object", quote(name)));
    member_ = &at->second;
    return true;
  }
  // False where two members that were handed out may have one name: their hashes are equal.
  [[nodiscard]] bool names_are_unique() {
    std::ranges::sort(hashes_);
    return std::ranges::adjacent_find(hashes_) == hashes_.end();
  }
  bool parse_error(size_t, const std::string& token, const Json::exception& error) {
    // The message quotes the whole token, which may be as long as the text.
    std::string_view what = error.what();
    if (const size_t end = what.find("] "); end != std::string_view::npos)
      what.remove_prefix(end + 2);
    constexpr std::string_view kToken = "; last read: '";
    const size_t at = what.find(kToken);
    if (at == std::string_view::npos) {
      return refuse(f8::format("is not valid JSON: {}", printable(what.substr(0, kLongest))));
    }
    return refuse(f8::format("is not valid JSON: {}; last read: {}",
                             printable(what.substr(0, std::min(at, kLongest))), quote(token)));
  }

 private:
  static constexpr size_t kLongest = 200;

  bool refuse(std::string why) {
    if (error_.empty()) error_ = std::move(why);
    return false;
  }
  // The place where the value lies now; null if it was one too many.
  Json* put(Json value) {
    if (++values_ > kMaxJsonValues) {
      refuse(f8::format("has more than {} values", kMaxJsonValues));
      return nullptr;
    }
    if (open_.empty()) return &(root_ = std::move(value));
    if (open_.back()->is_array()) return &open_.back()->emplace_back(std::move(value));
    return &(*member_ = std::move(value));
  }
  bool scalar(Json value) {
    if (take_ != nullptr && open_.empty()) return refuse("is not a JSON object");
    return put(std::move(value)) != nullptr && hand_out();
  }
  bool open(Json container) {
    if (take_ != nullptr && open_.empty() && !container.is_object()) {
      return refuse("is not a JSON object");
    }
    if (open_.size() >= kMaxJsonDepth) {
      return refuse(f8::format("is nested deeper than {} levels", kMaxJsonDepth));
    }
    Json* const at = put(std::move(container));
    if (at != nullptr) open_.push_back(at);
    return at != nullptr;
  }
  bool close() {
    open_.pop_back();
    return open_.empty() || hand_out();
  }
  // True within the object whose members are handed out.
  [[nodiscard]] bool hands_out() const { return take_ != nullptr && open_.size() == 1; }
  // After each value: it may complete a member.
  bool hand_out() {
    if (!hands_out()) return true;
    taken_ = (*take_)(name_, handed_);
    handed_ = nullptr;
    return taken_.has_value();
  }

  const TakeMember* take_;  // null: the whole value is built
  Status taken_;
  Json handed_;       // the member that is being built
  std::string name_;  // its name
  std::vector<size_t>
      hashes_;  // of all names so far: a set of them would take longer than the rest
  Json root_;
  std::vector<Json*> open_;  // the containers around the next value, the innermost last
  Json* member_ = nullptr;   // the place of the next value in an object
  size_t values_ = 0;
  std::string error_;
};

}  // namespace

std::string without_controls(std::string json) {
  const auto byte_at = [&json](size_t i) {
    return i < json.size() ? static_cast<unsigned char>(json[i]) : 0xff;
  };
  const auto is_c1 = [&](size_t i) { return byte_at(i) == 0xc2 && byte_at(i + 1) < 0xa0; };
  std::string out;
  size_t kept = 0;
  for (size_t i = 0; i < json.size(); ++i) {
    if (byte_at(i) != 0x7f && !is_c1(i)) continue;
    out.append(json, kept, i - kept);
    if (is_c1(i)) ++i;
    out += f8::format("\\u00{:02x}", byte_at(i));
    kept = i + 1;
  }
  if (kept == 0) return json;
  return out.append(json, kept);
}

Result<Json> parse_json(std::string_view text, std::string_view where) {
  Builder builder;
  if (Json::sax_parse(text, &builder)) return builder.take();
  return std::unexpected(builder.error(where));
}

Status parse_json_members(std::string_view text, std::string_view where, const TakeMember& take) {
  Builder builder(&take);
  if (!Json::sax_parse(text, &builder)) return std::unexpected(builder.error(where));
  if (!builder.names_are_unique()) F8_TRY(parse_json(text, where));  // it compares the names
  return {};
}

}  // namespace f8::tuning_db
