// The kernels that a linear layer's training step launches under a recipe, found without a GPU:
// what `emit` prints and `prewarm` compiles.
//
// x, w and dy are each read by two of the three GEMMs, row-major by one and transposed by the
// other; where both casts agree one kernel writes both copies. A disabled cast leaves the tensor in
// bf16 and its GEMM to cuBLASLt.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "codegen/kernel_spec.hpp"
#include "recipes/tuning_table.hpp"
#include "runtime/gemm.hpp"

namespace f8::tuner {

// As many SMs as the device that choices are made for without one: an H100 SXM.
inline constexpr int kH100SmCount = 132;

struct NamedKernel {
  std::string role;  // "amax x", "cast dy", "gemm output"
  codegen::KernelSpec spec;
};

// The amax and cast kernels; kUnsupported for a granularity that the generator lacks (blocks).
[[nodiscard]] Result<std::vector<NamedKernel>> cast_kernels(const Recipe& recipe);

enum class ChosenBy { kMeasured, kNeighbour, kModel };
[[nodiscard]] std::string_view to_string(ChosenBy by);

struct ChosenGemm {
  runtime::GemmDesc desc;
  runtime::GemmChoice choice;
  ChosenBy by = ChosenBy::kModel;

  [[nodiscard]] codegen::GemmSpec spec() const;  // of a generated choice
};

// By `table` (null: none), else by the cost model. Empty where the recipe leaves this GEMM in bf16.
[[nodiscard]] Result<std::optional<ChosenGemm>> choose_gemm(const Recipe& recipe, Gemm gemm,
                                                            Shape linear, const TuningTable* table);

}  // namespace f8::tuner
