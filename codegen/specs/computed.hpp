// The cast to fp8, or the maxima, of a tensor that is computed as it is read: an activation, the product of one
// with up, their gradients, or what a norm makes of x. Both gradients of a GLU are cast in one launch,
// as two tensors or, merged, as the halves of one.
// Scales that need maxima have them from a kernel of the same source.
//   computed   := source ("_cast/" | "_amax/") [activation "/"] rest
//   source     := "glu" | "glu_backward" | "rms_norm" | "activation" | "activation_backward" | "layer_norm"
//                 | "merged_glu_backward" | "merged_glu_backward_up_first"
//   activation := "silu" | "gelu" | "gelu_tanh" | "relu2"       but for norms
//   rest       := what follows "cast/" in a cast's key, with the options /pow2, /hold and /count, and /sums for
//                 gradients; or "amax/" in an amax's, but for "block"
#pragma once

#include <array>

#include "codegen/specs/amax.hpp"
#include "codegen/specs/cast.hpp"

namespace f8::codegen {

using kernels::Activation;

enum class Computed : uint8_t {
  kGlu,
  kGluBackward,
  kRmsNorm,
  kActivation,
  kActivationBackward,
  kLayerNorm,
  kMergedGluBackward,
  kMergedGluBackwardUpFirst
};
inline constexpr size_t kComputed = 8;
[[nodiscard]] constexpr bool is_norm(Computed source) {
  return source == Computed::kRmsNorm || source == Computed::kLayerNorm;
}
// Tells whether each block of a launch has two tiles, of gate and of up, of a tensor that has both side by side.
[[nodiscard]] constexpr bool is_merged(Computed source) {
  return source == Computed::kMergedGluBackward || source == Computed::kMergedGluBackwardUpFirst;
}
[[nodiscard]] constexpr bool has_activation(Computed source) {
  return !is_norm(source);
}
// Tells whether it is the gradient of an activation or of a gated one, of which a launch may leave the sums of columns too.
[[nodiscard]] constexpr bool is_gradient(Computed source) {
  return source == Computed::kGluBackward || source == Computed::kActivationBackward ||
         is_merged(source);
}
// The tensors of a launch.
[[nodiscard]] constexpr size_t tensors_of(Computed source) {
  return source == Computed::kGluBackward ? 2 : 1;
}
// Tells whether the kernel of maxima also writes what it computes, for the cast to read. Norms are cheap to
// compute again, and a block that has both gradients of a GLU in its registers has few others beside it.
[[nodiscard]] constexpr bool writes_results(Computed source, const AmaxSpec& amax) {
  return has_activation(source) && !is_merged(source) &&
         (source != Computed::kGluBackward || !(amax.row || amax.col));
}
// Blocks an SM of a launch that finds the maxima of tensors. With more, one that writes what it computes spills.
[[nodiscard]] constexpr int tensor_blocks_per_sm(Computed source) {
  return is_norm(source) ? 6 : 3;
}

[[nodiscard]] std::string_view to_string(Computed source);  // as in keys
[[nodiscard]] std::string_view to_string(Activation activation);
[[nodiscard]] Result<Activation> parse_activation(std::string_view text);

template <class Of>
struct ComputedSpec {
  Of of;
  Computed source = Computed::kGlu;
  Activation activation = Activation::kSilu;

  static const std::array<std::string_view, kComputed> kKinds;
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<ComputedSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const { return of.launch(); }
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const ComputedSpec&) const = default;
};
using ComputedAmaxSpec = ComputedSpec<AmaxSpec>;
using ComputedCastSpec = ComputedSpec<CastSpec>;

template <>
inline constexpr std::array<std::string_view, kComputed> ComputedAmaxSpec::kKinds = {
    "glu_amax",
    "glu_backward_amax",
    "rms_norm_amax",
    "activation_amax",
    "activation_backward_amax",
    "layer_norm_amax",
    "merged_glu_backward_amax",
    "merged_glu_backward_up_first_amax"};
template <>
inline constexpr std::array<std::string_view, kComputed> ComputedCastSpec::kKinds = {
    "glu_cast",
    "glu_backward_cast",
    "rms_norm_cast",
    "activation_cast",
    "activation_backward_cast",
    "layer_norm_cast",
    "merged_glu_backward_cast",
    "merged_glu_backward_up_first_cast"};

}  // namespace f8::codegen
