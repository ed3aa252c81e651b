// AdamW of a list of weights, with the maxima of what it leaves, or its casts where these need none.
//   adamw      := "adamw/" in "/" over ["/from_f32"]    as in an amax's key, but for "block"
//   adamw_cast := "adamw_cast/" what follows "cast/" in a cast's key, with delayed scales or those of
//                 blocks, and the options /from_f32, /pow2 and /hold
#pragma once

#include "codegen/specs/cast.hpp"

namespace f8::codegen {

struct AdamwSpec {
  AmaxSpec
      amax;  // of the updated weights; its memory_type() is the type of all tensors of a weight

  static constexpr std::string_view kKinds[] = {"adamw"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<AdamwSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const AdamwSpec&) const = default;
};

struct AdamwCastSpec {
  CastSpec cast;  // of the updated weights

  static constexpr std::string_view kKinds[] = {"adamw_cast"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<AdamwCastSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const AdamwCastSpec&) const = default;
};

}  // namespace f8::codegen
