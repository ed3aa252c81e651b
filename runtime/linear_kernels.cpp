// From a recipe to the kernels of a linear.
#include "runtime/linear_kernels.hpp"

#include <algorithm>

#include "runtime/cost_model.hpp"

namespace f8::runtime {
namespace {

using codegen::ScaleMode;

constexpr const char* kSupported =
    "this version runs tensorwise and rowwise: every operand fp8, scaled dynamically, all by "
    "tensor "
    "or all by axis";

// A tensor's two uses, of which one visit of the cast kernel writes the copies.
struct Uses {
  const char* tensor;
  const CastSetting& by_row;     // the copy as it is
  const CastSetting& by_column;  // the transposed copy
};

Status check(const Recipe& recipe, const Uses& uses, Granularity granularity) {
  const auto refuse = [&](const char* reason) {
    return fail(ErrorCode::kUnsupported, "recipe {}: {} {}; {}", recipe.name, uses.tensor, reason,
                kSupported);
  };
  for (const CastSetting* use : {&uses.by_row, &uses.by_column}) {
    if (use->scaling == Scaling::kDisabled) return refuse("stays in high precision in a GEMM");
    if (use->scaling == Scaling::kDelayed) return refuse("is scaled by earlier steps (delayed)");
    if (use->granularity == Granularity::kBlock1x128 ||
        use->granularity == Granularity::kBlock128x128) {
      return refuse("is scaled by blocks");
    }
    if (use->granularity != granularity) return refuse("is scaled by tensor here, by axis there");
  }
  if (uses.by_row.dtype != uses.by_column.dtype || uses.by_row.pow2 != uses.by_column.pow2) {
    return refuse("is cast to two formats");
  }
  return {};
}

}  // namespace

Result<LinearKernels> linear_kernels(const LinearDesc& desc) {
  const Recipe& recipe = desc.recipe;
  F8_TRY(recipe.validate());
  F8_TRY(validate_shape(desc.shape));
  if (desc.grad_weight_dtype != Dtype::kBf16 && desc.grad_weight_dtype != Dtype::kF32) {
    return fail(ErrorCode::kUnsupported, "grad_weight_dtype {}: bf16 and f32 are supported",
                to_string(desc.grad_weight_dtype));
  }
  const GemmSetting& output = recipe.at(Gemm::kOutput);
  const GemmSetting& grad_input = recipe.at(Gemm::kGradInput);
  const GemmSetting& grad_weight = recipe.at(Gemm::kGradWeight);
  const Granularity granularity = output.a.granularity;
  const Uses x{"input", output.a, grad_weight.b};
  const Uses w{"weight", output.b, grad_input.b};
  const Uses dy{"grad_output", grad_input.a, grad_weight.a};
  for (const Uses& uses : {x, w, dy}) F8_TRY(check(recipe, uses, granularity));
  if (x.by_row.dtype != w.by_row.dtype || x.by_row.pow2 != w.by_row.pow2) {
    return fail(ErrorCode::kUnsupported, "recipe {}: input and weight are cast to two formats; {}",
                recipe.name, kSupported);
  }

  LinearKernels kernels;
  const bool axis = granularity == Granularity::kAxis;
  kernels.scale = axis ? ScaleMode::kAxis : ScaleMode::kTensor;
  const auto amax = [&](bool q, bool qt) {
    return codegen::AmaxSpec{
        .in = Dtype::kBf16, .tensor = !axis, .row = axis && q, .col = axis && qt};
  };
  const auto cast = [&](const CastSetting& setting, bool q, bool qt) {
    return codegen::CastSpec{.in = Dtype::kBf16,
                             .out = setting.dtype,
                             .scale = kernels.scale,
                             .q = q,
                             .qt = qt,
                             .pow2 = setting.pow2};
  };
  kernels.amax = amax(true, true);
  kernels.cast = cast(x.by_row, true, true);
  kernels.amax_unsaved = amax(true, false);
  kernels.cast_unsaved = cast(x.by_row, true, false);
  kernels.amax_dy = {amax(true, true), amax(true, false), amax(false, true)};
  kernels.cast_dy = {cast(dy.by_row, true, true), cast(dy.by_row, true, false),
                     cast(dy.by_row, false, true)};
  for (const Gemm gemm : kGemms) {
    const GemmSetting& setting = recipe.at(gemm);
    kernels.gemms[static_cast<size_t>(gemm)] = {
        .gemm = gemm,
        .shape = desc.shape,
        .a = setting.a.dtype,
        .b = setting.b.dtype,
        .d = gemm == Gemm::kGradWeight ? desc.grad_weight_dtype : Dtype::kBf16,
        .scale = kernels.scale,
        .fast = setting.fast};
  }
  return kernels;
}

Result<std::vector<codegen::KernelSpec>> linear_kernel_specs(const LinearDesc& desc,
                                                             const TuningTable* table,
                                                             int sm_count) {
  const LinearKernels kernels = F8_TRY(linear_kernels(desc));
  std::vector<codegen::KernelSpec> specs{kernels.amax, kernels.cast};
  const auto add = [&](const codegen::KernelSpec& spec) {
    const auto same = [&](const auto& other) { return codegen::key(other) == codegen::key(spec); };
    if (std::none_of(specs.begin(), specs.end(), same)) specs.push_back(spec);
  };
  add(kernels.amax_unsaved);
  add(kernels.cast_unsaved);
  for (const auto& spec : kernels.amax_dy) add(spec);
  for (const auto& spec : kernels.cast_dy) add(spec);
  for (const Gemm gemm : kGemms) {
    const GemmDesc& g = kernels.gemms[static_cast<size_t>(gemm)];
    const auto& fixed = desc.choices[static_cast<size_t>(gemm)];
    const GemmChoice choice = fixed ? *fixed : F8_TRY(choose_gemm(table, g, sm_count));
    if (choice.provider != Provider::kGenerated) continue;
    add(gemm_spec(g, choice.config));
  }
  return specs;
}

}  // namespace f8::runtime
