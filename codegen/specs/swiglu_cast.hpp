// The cast of silu(gate) up to fp8, whose scales need no amax before.
//   swiglu_cast := "swiglu_cast/" what follows "cast/" in a cast's key, with the options /pow2, /hold
//                  and /count
#pragma once

#include "codegen/specs/cast.hpp"

namespace f8::codegen {

struct SwigluCastSpec {
  CastSpec cast;

  static constexpr std::string_view kKinds[] = {"swiglu_cast"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<SwigluCastSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const SwigluCastSpec&) const = default;
};

}  // namespace f8::codegen
