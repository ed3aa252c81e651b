// The maxima of the absolute values of a tensor that is computed as it is read (computed_cast.hpp); those of
// dgate and dup in one launch.
//   computed_amax := source "_amax/" in "/" over          as in an amax's key, but for "block"
#pragma once

#include "codegen/specs/amax.hpp"
#include "codegen/specs/computed_cast.hpp"

namespace f8::codegen {

struct ComputedAmaxSpec {
  AmaxSpec amax;
  Computed source = Computed::kSwiglu;

  static constexpr std::array<std::string_view, kComputed> kKinds = {
      "swiglu_amax", "swiglu_backward_amax", "rms_norm_amax"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<ComputedAmaxSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const ComputedAmaxSpec&) const = default;
};

}  // namespace f8::codegen
