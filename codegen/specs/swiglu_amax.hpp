// The maxima of the absolute values of silu(gate) up, and of its gradients dgate and dup in one launch.
//   swiglu_amax := kind "/" in "/" over          as in an amax's key, but for "block"
//   kind        := "swiglu_amax" | "swiglu_backward_amax"
#pragma once

#include "codegen/specs/amax.hpp"

namespace f8::codegen {

struct SwigluAmaxSpec {
  AmaxSpec amax;
  bool backward = false;  // of dgate and dup

  static constexpr std::string_view kKinds[] = {"swiglu_amax", "swiglu_backward_amax"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<SwigluAmaxSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const SwigluAmaxSpec&) const = default;
};

}  // namespace f8::codegen
