#include "tools/tuner/backend/backend.hpp"

#include <algorithm>
#include <utility>

namespace f8::tuner {

namespace {

struct Part {
  std::string_view name;
  bool Epilogue::*flag;
};
constexpr std::array kParts = {Part{"bias", &Epilogue::bias}, Part{"amax", &Epilogue::amax},
                               Part{"add", &Epilogue::add}};
constexpr std::string_view kGeneratedWith = "generated+";

}  // namespace

std::string to_string(const Epilogue& epilogue) {
  std::string text;
  for (const Part& part : kParts) {
    if (epilogue.*part.flag) text += fmt::format("{}{}", text.empty() ? "" : "+", part.name);
  }
  return text.empty() ? "plain" : text;
}

Result<Epilogue> parse_epilogue(std::string_view text) {
  Epilogue epilogue;
  for (std::string_view rest = text;;) {
    const size_t plus = rest.find('+');
    const auto part = std::ranges::find(kParts, rest.substr(0, plus), &Part::name);
    if (part == kParts.end() || epilogue.*part->flag) {
      return fail(ErrorCode::kInvalidArgument,
                  "epilogue \"{}\": want bias, amax or add, each at most once, joined by +", text);
    }
    epilogue.*part->flag = true;
    if (plus == std::string_view::npos) return epilogue;
    rest.remove_prefix(plus + 1);
  }
}

std::string generated_impl(const Epilogue& epilogue) {
  return epilogue == Epilogue{} ? "generated"
                                : fmt::format("{}{}", kGeneratedWith, to_string(epilogue));
}

std::optional<Epilogue> epilogue_of(std::string_view impl) {
  if (impl == "generated") return Epilogue{};
  if (!impl.starts_with(kGeneratedWith)) return std::nullopt;
  const Result<Epilogue> epilogue = parse_epilogue(impl.substr(kGeneratedWith.size()));
  return epilogue ? std::optional(*epilogue) : std::nullopt;
}

std::string choices_text(const LinearChoices& choices) {
  std::string text;
  for (const runtime::GemmChoice& choice : choices) {
    if (!text.empty()) text += ",";
    text += fmt::format("{}:{}", to_string(choice.provider), runtime::config_text(choice));
  }
  return text;
}

Result<LinearChoices> parse_choices(std::string_view text) {
  LinearChoices choices;
  std::string_view rest = text;
  for (size_t i = 0; i < choices.size(); ++i) {
    const size_t comma = rest.find(',');
    const std::string_view one = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    const size_t colon = one.find(':');
    const std::string_view provider = one.substr(0, colon);
    const bool known =
        provider == to_string(Provider::kGenerated) || provider == to_string(Provider::kCublasLt);
    if (!known || colon == std::string_view::npos) {
      return fail(ErrorCode::kInvalidArgument,
                  "kernel choices \"{}\": want three of generated:CONFIG or cublaslt:hN, separated "
                  "by commas (output, grad_input, grad_weight)",
                  text);
    }
    choices[i] = F8_TRY(runtime::parse_choice(
        provider == to_string(Provider::kGenerated) ? Provider::kGenerated : Provider::kCublasLt,
        one.substr(colon + 1)));
  }
  if (!rest.empty()) {
    return fail(ErrorCode::kInvalidArgument, "kernel choices \"{}\": more than three", text);
  }
  return choices;
}

std::string describe_events(uint64_t mask) {
  constexpr std::array kNames = {
      std::pair{kEventSwPowerCap, "power cap"}, std::pair{kEventHwSlowdown, "hardware slowdown"},
      std::pair{kEventSwThermal, "thermal (software)"},
      std::pair{kEventHwThermal, "thermal (hardware)"}, std::pair{kEventPowerBrake, "power brake"}};
  std::string text;
  for (const auto& [bit, name] : kNames) {
    if ((mask & bit) != 0) text += fmt::format("{}{}", text.empty() ? "" : ", ", name);
  }
  return text.empty() ? "none" : text;
}

}  // namespace f8::tuner
