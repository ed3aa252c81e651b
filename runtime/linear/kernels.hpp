// Which kernels a linear runs: from a recipe's cast settings to kernel specs. No GPU is needed, so
// `prewarm` compiles exactly what a trainer's plan will load.
//
// Each tensor has two uses, and for each that is fp8 a copy: q as it lies (input and weight for
// `output`, grad_output for `grad_input`), qt transposed (for the GEMM that contracts its rows). A
// visit of the cast kernel writes both copies where they share format, rounding of the scale and
// its source; else there is a visit for each. Visits of input and weight by one kernel are one
// launch.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "runtime/linear/linear.hpp"

namespace f8::runtime {

enum class Tensor : uint8_t { kInput, kWeight, kGradOutput };

// The settings of a tensor's two copies; none where the GEMM does not read an fp8 copy.
struct Copies {
  std::optional<CastSetting> q;
  std::optional<CastSetting> qt;

  // Both are written by one visit with one tensor scale.
  [[nodiscard]] bool share_scale() const;
};

// One visit of a tensor.
struct Visit {
  Tensor tensor = Tensor::kInput;
  codegen::CastSpec cast;
  int slot = -1;                   // of the linear's delayed scales
  std::string quantize_name = {};  // of its launch alone: "quantize x"
};

// Visits by one kernel: a cast launch, after an amax launch where the cast needs it, or both in one
// launch, of all matrices or of each (quantize_launches).
struct QuantizePass {
  std::string amax_name;      // "amax x,w"
  std::string cast_name;      // "cast x,w"
  std::string quantize_name;  // "quantize x,w"
  std::optional<codegen::CastSpec> one_launch;
  std::optional<codegen::CastSpec> summing;  // of dy alone: the cast, leaving column sums too
  std::optional<codegen::AmaxSpec> amax;
  codegen::CastSpec cast;
  std::vector<Visit> visits;
};
using Quantization = std::vector<QuantizePass>;

// What there is to quantize, by call.
enum class Work : uint8_t {
  kForward,         // input and weight, both copies
  kForwardUnsaved,  // of a forward without backward: q alone
  kInput,           // the same where the weight's copies are kept from before
  kInputUnsaved,
  kWeight,               // the weight's copies to keep
  kGradOutput,           // for both gradients
  kGradOutputForInput,   // q alone
  kGradOutputForWeight,  // qt alone
  // Recomputing: the works above are also of the copies of input and weight that forward would have
  // saved, these of the input's alone; empty otherwise.
  kGradOutputCached,
  kGradOutputForInputCached,
};
inline constexpr size_t kWorks = 10;

struct LinearKernels {
  Dtype tensor_dtype = Dtype::kBf16;
  Dtype master_dtype = Dtype::kBf16;
  bool recompute = false;
  bool hold = false;
  bool count = false;
  bool weight_flag = false;
  std::optional<codegen::BiasGradSpec> bias_grad;
  std::array<Copies, 3> copies;    // indexed by Tensor
  std::vector<DelayedSlot> slots;  // of delayed scaling; empty: the recipe has none
  std::array<Quantization, kWorks> works;
  // With delayed scales taken from the tensors themselves, to begin with; empty without slots.
  std::array<Quantization, kWorks> first_works;
  std::array<std::optional<GemmDesc>, 3> gemms;  // indexed by Gemm; none: not wanted
  std::optional<GemmDesc> add_grad_weight;       // adds to the gradient that is there

  [[nodiscard]] const Copies& of(Tensor tensor) const {
    return copies[static_cast<size_t>(tensor)];
  }
};

[[nodiscard]] codegen::ScaleMode scale_mode(Granularity granularity);

// kUnsupported names the recipe and what this version cannot do.
[[nodiscard]] Result<LinearKernels> linear_kernels(const LinearDesc& desc);

// Every amax and cast kernel with a name of what it does, each once.
struct NamedSpec {
  std::string name;  // "cast x,w", "cast dy (grad_input alone)"
  codegen::KernelSpec spec;
};
[[nodiscard]] std::vector<NamedSpec> quantize_kernels(const LinearKernels& kernels);

// What computes a product of the linear: as `desc` fixes it, else by the table or the model.
[[nodiscard]] Result<GemmChoice> linear_choice(const LinearDesc& desc, const GemmDesc& gemm,
                                               const TuningTable* table, int sm_count);

// Every kernel of the linear, with the matmuls chosen as a plan would on a device of `sm_count` SMs
// (132: H100 SXM) with this table (null: none). Matmuls left to cuBLASLt are not among them.
[[nodiscard]] Result<std::vector<codegen::KernelSpec>> linear_kernel_specs(const LinearDesc& desc,
                                                                           const TuningTable* table,
                                                                           int sm_count);

}  // namespace f8::runtime
