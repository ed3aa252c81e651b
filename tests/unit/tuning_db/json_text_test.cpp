// JSON from outside: limits, messages, and text that can be shown.
#include "tuning_db/json/json_text.hpp"

#include <gtest/gtest.h>

#include "base/text.hpp"

namespace f8::tuning_db {
namespace {

std::string error_of(std::string_view text) {
  const auto json = parse_json(text, "f.json");
  EXPECT_FALSE(json) << text.substr(0, 80);
  if (json) return {};
  EXPECT_LE(json.error().message.size(), 700U);
  EXPECT_FALSE(has_control(json.error().message)) << json.error().message;
  return json.error().message;
}

TEST(JsonText, BuildsTheLibrarysValues) {
  for (const char* text :
       {"null", "[]", "{}", "[1, -2, 18446744073709551615, 1.5e-7, true, false, \"a\\u00e9\\n\"]",
        R"({"a": {"b": [{"c": []}, null]}, "d": 1, "": ""})"}) {
    EXPECT_EQ(parse_json(text, "f").value(), nlohmann::json::parse(text)) << text;
  }
}

TEST(JsonText, DepthIsBounded) {
  const auto nested = [](size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_TRUE(parse_json(nested(kMaxJsonDepth), "f"));
  EXPECT_NE(error_of(nested(kMaxJsonDepth + 1)).find("deeper than 64"), std::string::npos);
  EXPECT_NE(error_of(std::string(80'000, '[')).find("f.json is nested"), std::string::npos);
  std::string objects;
  for (int i = 0; i < 80'000; ++i) objects += "{\"a\":";
  EXPECT_NE(error_of(objects).find("deeper than 64"), std::string::npos);
}

TEST(JsonText, TheNumberOfValuesIsBounded) {
  std::string many = "[";
  for (size_t i = 0; i < kMaxJsonValues; ++i) many += "0,";
  EXPECT_NE(error_of(many + "0]").find("more than 16777216 values"), std::string::npos);
}

TEST(JsonText, RepeatedKeysAreRefused) {
  EXPECT_NE(error_of(R"({"a": 1, "b": {"a": 2}, "a": 3})").find("the key 'a' twice"),
            std::string::npos);
  EXPECT_TRUE(parse_json(R"([{"a": 1}, {"a": 1}])", "f"));
}

TEST(JsonText, MessagesAreShortAndPlain) {
  EXPECT_NE(error_of("").find("not valid JSON"), std::string::npos);
  EXPECT_NE(error_of("[1e999]").find("not valid JSON"), std::string::npos);
  EXPECT_NE(error_of("[1] 2").find("not valid JSON"), std::string::npos);
  EXPECT_NE(error_of("{\"a\":\x1b]0;title\x07}").find("not valid JSON"), std::string::npos);
  const std::string long_token = error_of("[\"" + std::string(1 << 20, 'x'));
  EXPECT_NE(long_token.find("'..."), std::string::npos) << long_token;
  const std::string long_key(1 << 20, 'k');
  EXPECT_NE(error_of("{\"" + long_key + "\":1,\"" + long_key + "\":1}").find("twice"),
            std::string::npos);
}

TEST(JsonText, WrittenJsonHasNoControlCharacters) {
  const nlohmann::json json = {"\x7f\xc2\x9b[31m\x1b", "\xc2\xa9 \xe2\x82\xac"};
  const std::string text = without_controls(json.dump());
  EXPECT_FALSE(has_control(text)) << text;
  EXPECT_NE(text.find("\\u007f\\u009b"), std::string::npos) << text;
  EXPECT_EQ(parse_json(text, "f").value(), json);
}

}  // namespace
}  // namespace f8::tuning_db
