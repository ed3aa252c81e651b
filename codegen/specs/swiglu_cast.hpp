// The cast of silu(gate) up to fp8, and the casts of its gradients dgate and dup in one launch. Scales that
// need maxima have them from swiglu_amax.
//   swiglu_cast := kind "/" what follows "cast/" in a cast's key, with the options /pow2, /hold and
//                  /count
//   kind        := "swiglu_cast" | "swiglu_backward_cast"
#pragma once

#include "codegen/specs/cast.hpp"

namespace f8::codegen {

struct SwigluCastSpec {
  CastSpec cast;
  bool backward = false;  // dgate and dup are cast

  static constexpr std::string_view kKinds[] = {"swiglu_cast", "swiglu_backward_cast"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<SwigluCastSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const SwigluCastSpec&) const = default;
};

}  // namespace f8::codegen
