// Rotary positions of queries and keys.
//   rotary := "rotary/" in "/" cos "/" out ["/inverse"]     the types of the heads, of cosines and of the result
#pragma once

#include "codegen/specs/kind.hpp"

namespace f8::codegen {

struct RotarySpec {
  Dtype in = Dtype::kBf16;
  Dtype cos = Dtype::kBf16;
  Dtype out = Dtype::kBf16;
  bool inverse = false;  // the gradient

  static constexpr std::string_view kKinds[] = {"rotary"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<RotarySpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const RotarySpec&) const = default;
};

}  // namespace f8::codegen
