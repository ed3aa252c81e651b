// RMSNorms and their gradients, for rows of up to so many columns, a power of two.
//   rms_norm := ("rms_norm" | "rms_norm_backward") "/" in "/" weight "/" out "/" cols ["/normalized"]
// They have the types of x, of the weight and of y; with /normalized x rstd is rounded before it is multiplied.
#pragma once

#include "codegen/specs/kind.hpp"

namespace f8::codegen {

struct RmsNormSpec {
  Dtype in = Dtype::kBf16;
  Dtype weight = Dtype::kBf16;
  Dtype out = Dtype::kBf16;
  int cols = 0;
  bool normalized = false;
  bool backward = false;

  static constexpr std::string_view kKinds[] = {"rms_norm", "rms_norm_backward"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<RmsNormSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const RmsNormSpec&) const = default;
};

}  // namespace f8::codegen
