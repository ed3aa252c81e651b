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

TEST(JsonText, MembersComeOneByOne) {
  const char* const text =
      R"({"z": 1, "a": {"b": [{"c": []}, null], "d": {}}, "": "s", "l": [1, [2]], "n": null})";
  nlohmann::json joined = nlohmann::json::object();
  std::string order;
  const auto take = [&](const std::string& name, const nlohmann::json& value) -> Status {
    joined[name] = value;
    order += name + ",";
    return {};
  };
  ASSERT_TRUE(parse_json_members(text, "f", take));
  EXPECT_EQ(joined, nlohmann::json::parse(text));
  EXPECT_EQ(order, "z,a,,l,n,");
  EXPECT_TRUE(parse_json_members("{}", "f", take));
}

TEST(JsonText, MembersHaveTheLimitsOfAWholeText) {
  const auto error_of_members = [](std::string_view text) -> std::string {
    const Status parsed = parse_json_members(
        text, "f.json", [](const std::string& name, const nlohmann::json&) -> Status {
          if (name == "bad") return fail(ErrorCode::kCorrupt, "no such thing");
          return {};
        });
    EXPECT_FALSE(parsed) << text.substr(0, 80);
    return parsed ? "" : parsed.error().message;
  };
  for (const char* text : {"[]", "1", "null", "\"a\"", "[{\"a\": 1}]"}) {
    EXPECT_EQ(error_of_members(text), "f.json is not a JSON object") << text;
  }
  EXPECT_NE(error_of_members("").find("f.json is not valid JSON"), std::string::npos);
  EXPECT_NE(error_of_members("{\"a\": 1").find("not valid JSON"), std::string::npos);
  EXPECT_NE(error_of_members(R"({"a": 1, "b": 2, "a": 3})").find("the key 'a' twice"),
            std::string::npos);
  EXPECT_NE(error_of_members(R"({"a": {"b": 1, "b": 2}})").find("the key 'b' twice"),
            std::string::npos);
  EXPECT_NE(error_of_members("{\"a\": " + std::string(80'000, '[')).find("deeper than 64"),
            std::string::npos);
  EXPECT_EQ(error_of_members(R"({"good": {"bad": 1}, "bad": [], "more": )"), "no such thing");
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
