// Which kernels a linear runs: from a recipe's cast settings to kernel specs. No GPU is needed, so
// `prewarm` compiles exactly what a trainer's plan will load.
//
// Each tensor has two uses, and for each that is fp8 a copy: q in the tensor's own layout (input
// and weight for `output`, grad_output for `grad_input`), qt transposed (for the GEMM that reduces
// over its rows). A fused cast writes both copies where they share format, rounding of the scale
// and its source; else each copy has a cast of its own. Casts by the same kernel share its
// launches: they are one kernel pass.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "runtime/linear/plan/linear_desc.hpp"
#include "runtime/quantize/delayed_scales.hpp"

namespace f8::runtime {

enum class Tensor : uint8_t { kInput, kWeight, kGradOutput };

// The settings of a tensor's two copies; none where the GEMM does not read an fp8 copy.
struct Copies {
  std::optional<CastSetting> q;
  std::optional<CastSetting> qt;

  [[nodiscard]] bool empty() const { return !q && !qt; }
  // Both are written by one fused cast with one tensor scale.
  [[nodiscard]] bool share_scale() const;
  // That scale is found in each cast.
  [[nodiscard]] bool share_dynamic_scale() const;
  // q has a scale of each row and qt of each column, which are found in each cast.
  [[nodiscard]] bool have_dynamic_axes() const;
};

// The copies that a call makes, as a set of bits: q and qt of x, of w and of dy.
using CopySet = unsigned;
inline constexpr CopySet kXqt = 1, kWqt = 2, kXq = 4, kWq = 8, kDyq = 16, kDyqt = 32;

// One cast of a tensor, which writes one copy or both.
struct FusedCast {
  Tensor tensor = Tensor::kInput;
  codegen::CastSpec cast;
  int slot = -1;             // of the linear's delayed scales
  bool kept_scale = false;   // it takes the scale that the forward's cast found
  std::string operand = {};  // "x", or "x.q" where the tensor's copies are cast apart
};

// Fused casts by one kernel: a cast launch, after an amax launch where the cast needs it; or both
// in one launch, of all matrices or of each (quantize_launches).
struct KernelPass {
  std::string operands;  // "x,w"
  std::optional<codegen::CastSpec> one_launch;
  std::optional<codegen::CastSpec> summing;  // of dy alone: the cast that also leaves column sums
  std::optional<codegen::AmaxSpec> amax;
  codegen::CastSpec cast;
  std::vector<FusedCast> casts;
};

struct LinearKernels {
  Dtype tensor_dtype = Dtype::kBf16;
  bool recompute = false;
  std::array<bool, 3> keeps = {};  // see keeps_scale; indexed by Tensor
  // The launch before a cast of q finds the maxima of columns too, and a cast of qt takes them from there.
  bool keeps_column_amax = false;
  bool hold = false;
  bool count = false;
  bool noop_flag = false;  // casts do nothing where a flag of the call holds 1
  bool from_f32 = false;   // casts read fp32 and round it to tensor_dtype
  std::optional<codegen::BiasGradSpec> bias_grad;
  std::array<Copies, 3> copies;                   // indexed by Tensor
  std::vector<DelayedSlot> slots;                 // of delayed scaling; empty: the recipe has none
  std::array<size_t, 3> first_slot = {};          // of each tensor
  std::array<std::optional<GemmDesc>, 3> gemms;   // indexed by Gemm; none: not wanted
  std::array<std::optional<GemmDesc>, 3> adding;  // those that add to the gradient that is there

  [[nodiscard]] const Copies& of(Tensor tensor) const {
    return copies[static_cast<size_t>(tensor)];
  }
  // Backward casts the tensor again with the scale that forward found, which is kept in between.
  [[nodiscard]] bool keeps_scale(Tensor tensor) const { return keeps[static_cast<size_t>(tensor)]; }
  // The copies that a call makes; those that the recipe does not have count for nothing.
  // `given`: kXq for an x, kWq for a w that the call is given in fp8.
  [[nodiscard]] CopySet forward_copies(bool saved, CopySet given) const;
  [[nodiscard]] CopySet backward_copies(bool dx, bool dw, CopySet given) const;
  // The passes that make the copies `made`. `first_step`: delayed scales are taken from the tensors
  // themselves.
  [[nodiscard]] std::vector<KernelPass> passes(CopySet made, bool first_step) const;
};

// The passes of every kind of call, and of its first step, with the kind in words: "",
// " (no backward)", " (grad_input alone, first step)".
struct CallPasses {
  std::string when;
  std::vector<KernelPass> passes;
};
[[nodiscard]] std::vector<CallPasses> all_passes(const LinearKernels& kernels);

// kUnsupported names the recipe and what this version cannot do.
[[nodiscard]] Result<LinearKernels> linear_kernels(const LinearDesc& desc);

// Every amax and cast kernel with a name of what it does, each once.
struct NamedSpec {
  std::string name;  // "cast x,w", "cast dy (grad_input alone)"
  codegen::KernelSpec spec;
};
[[nodiscard]] std::vector<NamedSpec> quantize_kernels(const LinearKernels& kernels);

// A linear's kernels, with what computes each of its GEMMs. It is made once, and handed on to what
// compiles, plans and shows them.
struct ChosenKernels {
  LinearKernels kernels;
  std::array<std::optional<GemmChoice>, 3> gemms, adding;  // of kernels.gemms and kernels.adding

  // One launch computes both gradients.
  [[nodiscard]] bool has_grouped_gradients() const;
  // Each kernel once. GEMMs left to cuBLASLt are not among them.
  [[nodiscard]] std::vector<codegen::KernelSpec> specs() const;
};
// GEMMs are chosen as `desc` fixes them, else by this table (null: there is none) or the cost model,
// for a device of `sm_count` SMs (132: H100 SXM).
[[nodiscard]] Result<ChosenKernels> choose_kernels(const LinearDesc& desc, const TuningTable* table,
                                                   int sm_count);

}  // namespace f8::runtime
