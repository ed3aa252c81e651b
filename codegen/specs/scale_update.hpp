// Delayed scaling: the scales of the next step, and whether the amaxes of this one are finite.
//   "scale_update"
//   "found_inf"
#pragma once

#include "codegen/specs/kind.hpp"

namespace f8::codegen {

// Rolls histories and computes scales.
struct ScaleUpdateSpec {
  static constexpr std::string_view kKinds[] = {"scale_update"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<ScaleUpdateSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const ScaleUpdateSpec&) const = default;
};

struct FoundInfSpec {
  static constexpr std::string_view kKinds[] = {"found_inf"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<FoundInfSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const FoundInfSpec&) const = default;
};

}  // namespace f8::codegen
