#include "tools/tuner/search/kernel_set.hpp"

#include <array>

#include "runtime/gemm/choose.hpp"

namespace f8::tuner {
namespace {

constexpr Shape kAnyShape = {128, 128, 128};  // the casts are the same for every shape

Result<runtime::LinearKernels> kernels_of(const Recipe& recipe, Shape shape) {
  runtime::LinearDesc desc;
  desc.shape = shape;
  desc.recipe = recipe;
  return runtime::linear_kernels(desc);
}

}  // namespace

std::string_view to_string(ChosenBy by) {
  constexpr std::array<std::string_view, 3> kNames = {"measured", "neighbour", "model"};
  return kNames[static_cast<size_t>(by)];
}

Result<std::vector<NamedKernel>> cast_kernels(const Recipe& recipe) {
  const runtime::LinearKernels kernels = F8_TRY(kernels_of(recipe, kAnyShape));
  std::vector<NamedKernel> named;
  for (runtime::NamedSpec& kernel : runtime::quantize_kernels(kernels)) {
    named.push_back({std::move(kernel.name), std::move(kernel.spec)});
  }
  return named;
}

Result<ChosenGemm> choose_gemm(const Recipe& recipe, Gemm gemm, Shape linear,
                               const TuningTable* table) {
  const runtime::LinearKernels kernels = F8_TRY(kernels_of(recipe, linear));
  ChosenGemm chosen;
  chosen.desc = *kernels.gemms[static_cast<size_t>(gemm)];
  chosen.choice = F8_TRY(runtime::choose_gemm(table, chosen.desc, kH100SmCount));
  if (table == nullptr) return chosen;
  const Problem problem = F8_TRY(Problem::make(to_op(gemm), recipe, linear));
  if (table->find(problem) != nullptr) {
    chosen.by = ChosenBy::kMeasured;
  } else if (chosen.choice.neighbours > 0) {
    chosen.by = ChosenBy::kNeighbour;
  }
  return chosen;
}

}  // namespace f8::tuner
