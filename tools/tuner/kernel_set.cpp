#include "tools/tuner/kernel_set.hpp"

#include <algorithm>
#include <array>

#include "runtime/cost_model.hpp"

namespace f8::tuner {
namespace {

using codegen::AmaxSpec;
using codegen::CastSpec;
using codegen::ScaleMode;

bool is_block(const CastSetting& setting) {
  return setting.granularity == Granularity::kBlock1x128 ||
         setting.granularity == Granularity::kBlock128x128;
}

Status check_supported(const Recipe& recipe) {
  for (const Gemm gemm : kGemms) {
    const GemmSetting& setting = recipe.at(gemm);
    if (is_block(setting.a) || is_block(setting.b)) {
      return fail(ErrorCode::kUnsupported,
                  "recipe {} scales by blocks in {}; the generator has tensor and axis scales: use "
                  "tensorwise, rowwise, rowwise_with_gw_hp or delayed",
                  recipe.name, to_string(gemm));
    }
  }
  return {};
}

ScaleMode scale_mode(const CastSetting& setting) {
  return setting.granularity == Granularity::kAxis ? ScaleMode::kAxis : ScaleMode::kTensor;
}

CastSpec cast_spec(const CastSetting& setting, bool q, bool qt) {
  return {.in = Dtype::kBf16,
          .out = setting.dtype,
          .scale = scale_mode(setting),
          .q = q,
          .qt = qt,
          .pow2 = setting.pow2};
}

// The kernels that quantise one tensor: `q` is how its row-major reader wants it, `qt` its
// transposed one.
void add_casts(std::string_view tensor, const CastSetting& q, const CastSetting& qt,
               std::vector<NamedKernel>& out) {
  const bool want_q = q.scaling != Scaling::kDisabled;
  const bool want_qt = qt.scaling != Scaling::kDisabled;
  AmaxSpec axis{.in = Dtype::kBf16, .tensor = false, .row = false, .col = false};
  axis.row = want_q && scale_mode(q) == ScaleMode::kAxis;
  axis.col = want_qt && scale_mode(qt) == ScaleMode::kAxis;
  const bool whole = (want_q && scale_mode(q) == ScaleMode::kTensor) ||
                     (want_qt && scale_mode(qt) == ScaleMode::kTensor);
  const std::string amax = fmt::format("amax {}", tensor);
  const std::string cast = fmt::format("cast {}", tensor);
  if (whole) out.push_back({amax, AmaxSpec{.in = Dtype::kBf16}});
  if (axis.row || axis.col) out.push_back({amax, axis});
  if (want_q && want_qt && q == qt) {
    out.push_back({cast, cast_spec(q, true, true)});
    return;
  }
  if (want_q) out.push_back({cast, cast_spec(q, true, false)});
  if (want_qt) out.push_back({cast, cast_spec(qt, false, true)});
}

}  // namespace

std::string_view to_string(ChosenBy by) {
  constexpr std::array<std::string_view, 3> kNames = {"measured", "neighbour", "model"};
  return kNames[static_cast<size_t>(by)];
}

Result<std::vector<NamedKernel>> cast_kernels(const Recipe& recipe) {
  F8_TRY(recipe.validate());
  F8_TRY(check_supported(recipe));
  std::vector<NamedKernel> kernels;
  const GemmSetting& output = recipe.at(Gemm::kOutput);
  const GemmSetting& grad_input = recipe.at(Gemm::kGradInput);
  const GemmSetting& grad_weight = recipe.at(Gemm::kGradWeight);
  add_casts("x", output.a, grad_weight.b, kernels);
  add_casts("w", output.b, grad_input.b, kernels);
  add_casts("dy", grad_input.a, grad_weight.a, kernels);
  return kernels;
}

codegen::GemmSpec ChosenGemm::spec() const {
  return {.a = desc.a,
          .b = desc.b,
          .d = desc.d,
          .scale = desc.scale,
          .fast = desc.fast,
          .config = choice.config};
}

Result<std::optional<ChosenGemm>> choose_gemm(const Recipe& recipe, Gemm gemm, Shape linear,
                                              const TuningTable* table) {
  F8_TRY(recipe.validate());
  F8_TRY(check_supported(recipe));
  const GemmSetting& setting = recipe.at(gemm);
  if (!setting.is_fp8()) return std::nullopt;
  ChosenGemm chosen;
  chosen.desc.gemm = gemm;
  chosen.desc.shape = linear;
  chosen.desc.a = setting.a.dtype;
  chosen.desc.b = setting.b.dtype;
  chosen.desc.scale = scale_mode(setting.a);
  chosen.desc.fast = setting.fast;
  chosen.choice = F8_TRY(runtime::choose_gemm(table, chosen.desc, kH100SmCount));
  if (table == nullptr) return chosen;
  Problem problem = F8_TRY(Problem::make(to_op(gemm), recipe, linear));
  // Rows are kept by the recipe that measured them; a GEMM's scales say which one speaks of it.
  problem.recipe = chosen.desc.scale == ScaleMode::kAxis ? "rowwise" : "tensorwise";
  if (const KernelChoice* found = table->find(problem)) {
    chosen.by = found->problem.shape == linear ? ChosenBy::kMeasured : ChosenBy::kNeighbour;
  }
  return chosen;
}

}  // namespace f8::tuner
