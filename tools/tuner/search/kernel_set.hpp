// The kernels of a linear layer's training step, with their roles and who chose them: `emit` prints
// them, `prewarm` compiles them and `explain` names them. No GPU is needed.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "runtime/linear/plan/kernels.hpp"

namespace f8::tuner {

// The SMs of an H100 SXM, the device that choices are made for where there is none.
inline constexpr int kH100SmCount = 132;

struct NamedKernel {
  std::string role;  // "amax x,w", "cast dy", "cast dy (grad_input alone)"
  codegen::KernelSpec spec;
};

// The amax and cast kernels of a recipe. kUnsupported, with the recipe's name, where the runtime
// has none.
[[nodiscard]] Result<std::vector<NamedKernel>> cast_kernels(const Recipe& recipe);

enum class ChosenBy { kMeasured, kNeighbour, kModel };
[[nodiscard]] std::string_view to_string(ChosenBy by);

struct ChosenGemm {
  runtime::GemmDesc desc;
  runtime::GemmChoice choice;
  ChosenBy by = ChosenBy::kModel;

  [[nodiscard]] codegen::GemmSpec spec() const { return runtime::gemm_spec(desc, choice.config); }
};

// The choice that a plan would make: by `table` (null: none), else by the cost model.
[[nodiscard]] Result<ChosenGemm> choose_gemm(const Recipe& recipe, Gemm gemm, Shape linear,
                                             const TuningTable* table);

}  // namespace f8::tuner
