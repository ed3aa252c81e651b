#include "tools/tuner/backend/backend.hpp"

#include <utility>

namespace f8::tuner {

std::string describe_events(uint64_t mask) {
  constexpr std::array kNames = {
      std::pair{kEventSwPowerCap, "power cap"}, std::pair{kEventHwSlowdown, "hardware slowdown"},
      std::pair{kEventSwThermal, "thermal (software)"},
      std::pair{kEventHwThermal, "thermal (hardware)"}, std::pair{kEventPowerBrake, "power brake"}};
  std::string text;
  for (const auto& [bit, name] : kNames) {
    if ((mask & bit) != 0) text += f8::format("{}{}", text.empty() ? "" : ", ", name);
  }
  return text.empty() ? "none" : text;
}

Result<AttentionResults<float>> Backend::attention_results(AttentionRecipe /*recipe*/,
                                                           const AttentionShape& /*shape*/,
                                                           const AttentionData& /*data*/) {
  return fail(ErrorCode::kUnsupported, "this device computes no attention");
}

}  // namespace f8::tuner
