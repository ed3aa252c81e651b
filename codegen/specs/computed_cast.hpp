// The cast to fp8 of a tensor that is computed as it is read: silu(gate) up, its gradients dgate and dup in
// one launch, or what an RMSNorm makes of x. Scales that need maxima have them from computed_amax.
//   computed_cast := source "_cast/" what follows "cast/" in a cast's key, with the options /pow2, /hold and
//                    /count
//   source        := "swiglu" | "swiglu_backward" | "rms_norm"
#pragma once

#include <algorithm>
#include <array>

#include "codegen/specs/cast.hpp"

namespace f8::codegen {

enum class Computed : uint8_t { kSwiglu, kSwigluBackward, kRmsNorm };
inline constexpr size_t kComputed = 3;
// The template of a source's kernel.
struct ComputedKernel {
  std::string_view file, args;
  size_t bytes;  // of args
};

struct ComputedCastSpec {
  CastSpec cast;
  Computed source = Computed::kSwiglu;

  static constexpr std::array<std::string_view, kComputed> kKinds = {
      "swiglu_cast", "swiglu_backward_cast", "rms_norm_cast"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<ComputedCastSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const ComputedCastSpec&) const = default;
};

// The source whose kind of kernel that is.
template <size_t kCount>
Computed computed_of(const std::array<std::string_view, kCount>& kinds, std::string_view kind) {
  return static_cast<Computed>(std::ranges::find(kinds, kind) - kinds.begin());
}

}  // namespace f8::codegen
