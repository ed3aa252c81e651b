// JSON from outside, and the ways to show text from outside.
#include "tuning_db/json/json_text.hpp"

#include "base/text.hpp"
#include "tests/fuzz/fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace f8;
  const std::string_view text = fuzz::text_of(data, size);
  FUZZ_CHECK(!has_control(printable(text)));
  FUZZ_CHECK(has_control(text) == (printable(text) != text));
  FUZZ_CHECK(quote(text).size() <= 4 * 80 + 5);
  const auto json = tuning_db::parse_json(text, "file");
  // An object's members, taken one by one, are the same value.
  nlohmann::json joined = nlohmann::json::object();
  const Status taken = tuning_db::parse_json_members(
      text, "file", [&joined](const std::string& name, const nlohmann::json& value) -> Status {
        joined[name] = value;
        return {};
      });
  FUZZ_CHECK(taken.has_value() == (json && json->is_object()));
  FUZZ_CHECK(!taken || joined == *json);
  if (!json) {
    fuzz::check_readable(json.error().message);
    return 0;
  }
  fuzz::count_accepted();
  const auto write = [](const nlohmann::json& value) {
    return tuning_db::without_controls(
        value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  };
  const std::string written = write(*json);
  FUZZ_CHECK(!has_control(written));
  const auto again = tuning_db::parse_json(written, "again");
  FUZZ_CHECK(again && write(*again) == written);
  return 0;
}
