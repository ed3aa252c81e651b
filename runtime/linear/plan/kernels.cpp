// The way from a recipe to the kernels of a linear.
#include "runtime/linear/plan/kernels.hpp"

#include <algorithm>

#include "runtime/gemm/choose.hpp"
#include "runtime/quantize/quantize.hpp"

namespace f8::runtime {
namespace {

using codegen::CastSpec;

constexpr std::string_view kTensorNames[] = {"x", "w", "dy"};

bool one_cast(const CastSetting& q, const CastSetting& qt) {
  const bool tensor_twice =
      q.granularity == Granularity::kTensor && qt.granularity == Granularity::kTensor;
  return q.dtype == qt.dtype && q.pow2 == qt.pow2 && (!tensor_twice || q.scaling == qt.scaling);
}

class Planner {
 public:
  Planner(const LinearKernels& kernels, bool first) : kernels_(kernels), first_(first) {}

  [[nodiscard]] std::vector<KernelPass> passes(CopySet copies) const {
    std::vector<FusedCast> all;
    add(all, Tensor::kGradOutput, copies & kDyq, copies & kDyqt);
    add(all, Tensor::kInput, copies & kXq, copies & kXqt);
    add(all, Tensor::kWeight, copies & kWq, copies & kWqt);
    std::vector<KernelPass> passes = group(all);
    for (KernelPass& pass : passes) complete(pass, all);
    // The sums are of a launch's only matrix.
    const auto summing = std::ranges::find_if(passes, [](const KernelPass& pass) {
      return pass.casts.size() == 1 && pass.casts.front().tensor == Tensor::kGradOutput;
    });
    if (kernels_.bias_grad && summing != passes.end()) {
      summing->summing = summing->cast;
      summing->summing->sums = true;
    }
    return passes;
  }

 private:
  // Appends the casts that write these copies of a tensor.
  void add(std::vector<FusedCast>& all, Tensor tensor, bool want_q, bool want_qt) const {
    const Copies& copies = kernels_.of(tensor);
    const CastSetting* q = want_q && copies.q ? &*copies.q : nullptr;
    const CastSetting* qt = want_qt && copies.qt ? &*copies.qt : nullptr;
    if (q == nullptr && qt == nullptr) return;
    if (q != nullptr && qt != nullptr && !one_cast(*q, *qt)) {
      all.push_back(fused_cast(tensor, q, nullptr));
      all.push_back(fused_cast(tensor, nullptr, qt));
    } else {
      all.push_back(fused_cast(tensor, q, qt));
    }
    if (q == nullptr && kernels_.keeps_scale(tensor)) {
      all.back().kept_scale = true;
      all.back().cast.delayed = true;
    }
  }

  // Casts that two kernels would do alike, one does.
  static std::vector<KernelPass> group(const std::vector<FusedCast>& all) {
    std::vector<KernelPass> passes;
    for (const FusedCast& cast : all) {
      const auto same = std::ranges::find_if(passes, [&](const KernelPass& pass) {
        return key(codegen::KernelSpec(pass.cast)) == key(codegen::KernelSpec(cast.cast));
      });
      if (same != passes.end()) {
        same->casts.push_back(cast);
      } else {
        KernelPass& pass = passes.emplace_back();
        pass.cast = cast.cast;
        pass.casts = {cast};
      }
    }
    return passes;
  }

  // Names the operands: "x", or "x.q" where the tensor's copies are cast apart.
  void complete(KernelPass& pass, const std::vector<FusedCast>& all) const {
    for (FusedCast& cast : pass.casts) {
      cast.operand = kTensorNames[static_cast<size_t>(cast.tensor)];
      if (std::ranges::count(all, cast.tensor, &FusedCast::tensor) > 1) {
        cast.operand += cast.cast.q ? ".q" : ".qt";
      }
      pass.operands += (pass.operands.empty() ? "" : ",") + cast.operand;
    }
    pass.amax = amax_before(pass.cast);
    if (kernels_.keeps_column_amax && pass.casts.front().tensor == Tensor::kInput) {
      if (!pass.cast.q) {
        pass.amax.reset();
      } else {
        pass.amax->col = true;
      }
      return;
    }
    if (pass.amax && can_be_one_launch(pass.cast)) {
      pass.one_launch = pass.cast;
      pass.one_launch->one_launch = true;
    }
  }

  FusedCast fused_cast(Tensor tensor, const CastSetting* q, const CastSetting* qt) const {
    const CastSetting& any = q != nullptr ? *q : *qt;
    FusedCast out{.tensor = tensor,
                  .cast = {.in = kernels_.tensor_dtype,
                           .out = any.dtype,
                           .scale_q = any.granularity,
                           .scale_qt = (qt != nullptr ? *qt : any).granularity,
                           .q = q != nullptr,
                           .qt = qt != nullptr,
                           .pow2 = any.pow2,
                           .saturate = kernels_.hold,
                           .count = kernels_.count,
                           .noop_flag = kernels_.noop_flag,
                           .from_f32 = kernels_.from_f32}};
    for (const CastSetting* copy : {q, qt}) {
      if (copy == nullptr || copy->scaling != Scaling::kDelayed) continue;
      out.slot = slot_of(tensor, *copy);
      out.cast.delayed = !first_;
    }
    return out;
  }

  int slot_of(Tensor tensor, const CastSetting& setting) const {
    const size_t first = kernels_.first_slot[static_cast<size_t>(tensor)];
    return static_cast<int>(first) +
           (kernels_.slots[first] == DelayedSlot{setting.dtype, setting.pow2} ? 0 : 1);
  }

  const LinearKernels& kernels_;
  bool first_;
};

// The slots come tensor by tensor, q's before qt's.
void add_slots(LinearKernels& kernels) {
  for (size_t tensor = 0; tensor < kernels.copies.size(); ++tensor) {
    const size_t first = kernels.first_slot[tensor] = kernels.slots.size();
    for (const auto* copy : {&kernels.copies[tensor].q, &kernels.copies[tensor].qt}) {
      if (!*copy || (*copy)->scaling != Scaling::kDelayed) continue;
      const DelayedSlot slot{(*copy)->dtype, (*copy)->pow2};
      if (kernels.slots.size() == first || kernels.slots.back() != slot) {
        kernels.slots.push_back(slot);
      }
    }
  }
}

Result<GemmDesc> gemm_desc(const LinearDesc& desc, Gemm gemm) {
  const GemmSetting& setting = desc.recipe.at(gemm);
  GemmDesc out{.gemm = gemm,
               .shape = desc.shape,
               .a = setting.a.dtype,
               .b = setting.b.dtype,
               .d = gemm == Gemm::kGradWeight ? desc.grad_weight_dtype : desc.tensor_dtype,
               .sm_limit = desc.sm_limit};
  out.bias = gemm == Gemm::kOutput && desc.bias;
  if (!setting.is_fp8()) {
    if (setting.a.dtype != Dtype::kBf16 && setting.a.dtype != desc.tensor_dtype) {
      return fail(ErrorCode::kUnsupported,
                  "recipe {}, GEMM {}: high-precision operands of type {}, the tensors are {}; "
                  "write bf16, which stands for the tensors' type",
                  desc.recipe.name, to_string(gemm), to_string(setting.a.dtype),
                  to_string(desc.tensor_dtype));
    }
    out.a = out.b = desc.tensor_dtype;
    if (out.d != out.a && out.d != Dtype::kF32) {
      return fail(ErrorCode::kUnsupported,
                  "grad_weight_dtype {}: recipe {} multiplies {} tensors as they are, which gives "
                  "{} or f32",
                  to_string(out.d), desc.recipe.name, to_string(out.a), to_string(out.a));
    }
    return out;
  }
  out.fast = setting.fast;
  out.pow2 = setting.a.pow2 && setting.b.pow2;
  const GemmScales scales = gemm_scales(setting);
  out.scale = scales.mode;
  out.scalar_a = scales.scalar_a;
  out.scalar_b = scales.scalar_b;
  return out;
}

std::optional<CastSetting> copy_of(const GemmSetting& gemm, const CastSetting& operand) {
  return gemm.is_fp8() ? std::optional(operand) : std::nullopt;
}

}  // namespace

bool Copies::share_scale() const {
  return q && qt && one_cast(*q, *qt) && q->granularity == Granularity::kTensor &&
         qt->granularity == Granularity::kTensor;
}

bool Copies::share_dynamic_scale() const {
  return share_scale() && q->scaling == Scaling::kDynamic;
}

bool Copies::have_dynamic_axes() const {
  const auto is_one = [](const std::optional<CastSetting>& copy) {
    return copy && copy->granularity == Granularity::kAxis && copy->scaling == Scaling::kDynamic;
  };
  return is_one(q) && is_one(qt);
}

Result<LinearKernels> linear_kernels(const LinearDesc& desc) {
  const Recipe& recipe = desc.recipe;
  F8_TRY(recipe.validate());
  F8_TRY(validate_shape(desc.shape));
  for (const auto& [name, type] : {std::pair{"grad_weight_dtype", desc.grad_weight_dtype},
                                   std::pair{"tensor_dtype", desc.tensor_dtype},
                                   std::pair{"bias_grad_dtype", desc.bias_grad_dtype}}) {
    if (is_fp8(type)) {
      return fail(ErrorCode::kUnsupported, "{} {}: bf16, f16 and f32 are supported", name,
                  to_string(type));
    }
  }
  LinearKernels kernels;
  kernels.tensor_dtype = desc.tensor_dtype;
  kernels.recompute = desc.recompute;
  kernels.hold = desc.non_finite == NonFinite::kSaturate;
  kernels.count = desc.count;
  if (desc.bias_grad) kernels.bias_grad = codegen::BiasGradSpec{desc.bias_grad_dtype};
  const GemmSetting& output = recipe.at(Gemm::kOutput);
  const GemmSetting& grad_input = recipe.at(Gemm::kGradInput);
  const GemmSetting& grad_weight = recipe.at(Gemm::kGradWeight);
  kernels.copies[0].q = copy_of(output, output.a);
  kernels.copies[1].q = copy_of(output, output.b);
  if (desc.needs_grad_input) {
    kernels.copies[1].qt = copy_of(grad_input, grad_input.b);
    kernels.copies[2].q = copy_of(grad_input, grad_input.a);
  }
  if (desc.needs_grad_weight) {
    kernels.copies[0].qt = copy_of(grad_weight, grad_weight.b);
    kernels.copies[2].qt = copy_of(grad_weight, grad_weight.a);
  }
  add_slots(kernels);
  for (const size_t tensor : {0, 1}) {
    kernels.keeps[tensor] = desc.recompute && kernels.copies[tensor].share_dynamic_scale();
  }

  for (const Gemm gemm : kGemms) {
    if (!desc.needs(gemm)) continue;
    GemmDesc out = F8_TRY(gemm_desc(desc, gemm));
    out.shards = gemm == Gemm::kGradInput && desc.weight_shards && is_fp8(out.b);
    kernels.gemms[static_cast<size_t>(gemm)] = out;
    out.add = true;
    if (gemm == Gemm::kGradInput ? desc.accumulate_grad_input
                                 : gemm == Gemm::kGradWeight && desc.accumulate_grad_weight) {
      kernels.adding[static_cast<size_t>(gemm)] = out;
    }
  }
  return kernels;
}

CopySet LinearKernels::forward_copies(bool saved, CopySet given) const {
  CopySet made = 0;
  if ((given & kXq) == 0) made |= kXq | (saved ? kXqt : 0);
  if ((given & kWq) == 0) made |= kWq | (saved ? kWqt : 0);
  return made;
}

CopySet LinearKernels::backward_copies(bool dx, bool dw, CopySet given) const {
  CopySet made = (dx ? kDyq : 0) | (dw ? kDyqt : 0);
  if (!recompute) return made;
  if (dw && (given & kXq) == 0) made |= kXqt;
  if (dx && (given & kWq) == 0) made |= kWqt;
  return made;
}

std::vector<KernelPass> LinearKernels::passes(CopySet made, bool first_step) const {
  return Planner(*this, first_step).passes(made);
}

std::vector<CallPasses> all_passes(const LinearKernels& kernels) {
  std::vector<CallPasses> all;
  for (const bool first : {false, true}) {
    if (first && kernels.slots.empty()) continue;
    const auto add = [&](std::string_view when, CopySet copies) {
      all.push_back(
          {f8::format("{}{}", when, first ? " (first step)" : ""), kernels.passes(copies, first)});
    };
    const bool training = !kernels.recompute;  // else forward saves nothing
    for (const CopySet given : {CopySet{0}, kWq}) {
      if (training) add("", kernels.forward_copies(true, given));
      add(" (no backward)", kernels.forward_copies(false, given));
    }
    add("", kernels.backward_copies(true, true, 0));
    add(" (grad_input alone)", kernels.backward_copies(true, false, 0));
    add(" (grad_weight alone)", kernels.backward_copies(false, true, 0));
    if (!kernels.recompute) continue;
    add(" (weight in fp8)", kernels.backward_copies(true, true, kWq));
    add(" (grad_input alone, weight in fp8)", kernels.backward_copies(true, false, kWq));
  }
  return all;
}

std::vector<NamedSpec> quantize_kernels(const LinearKernels& kernels) {
  std::vector<NamedSpec> named;
  const auto add = [&](std::string name, const codegen::KernelSpec& spec) {
    const auto same = [&](const NamedSpec& other) { return key(other.spec) == key(spec); };
    if (std::ranges::none_of(named, same)) named.push_back({std::move(name), spec});
  };
  for (const auto& [when, passes] : all_passes(kernels)) {
    for (const KernelPass& pass : passes) {
      const std::string what = pass.operands + when;
      if (pass.amax) add("amax " + what, *pass.amax);
      add("cast " + what, pass.cast);
      if (pass.summing) add("cast " + pass.operands + ", summing" + when, *pass.summing);
      if (pass.one_launch) add("quantize " + what, *pass.one_launch);
    }
  }
  if (!kernels.slots.empty()) {
    add("first scales over ranks", codegen::ScaleUpdateSpec{});
    add("found inf", codegen::FoundInfSpec{});
  }
  if (kernels.bias_grad) {
    add("sum dy", codegen::ColumnSumsSpec{kernels.tensor_dtype});
    add("bias gradient", *kernels.bias_grad);
  }
  return named;
}

Result<ChosenKernels> choose_kernels(const LinearDesc& desc, const TuningTable* table,
                                     int sm_count) {
  ChosenKernels chosen{.kernels = F8_TRY(linear_kernels(desc)), .gemms = {}, .adding = {}};
  for (size_t i = 0; i < chosen.gemms.size(); ++i) {
    const auto choose = [&](const std::optional<GemmDesc>& gemm,
                            std::optional<GemmChoice>& out) -> Status {
      if (!gemm) return {};
      out = desc.choices[i];
      if (!out) out = F8_TRY(choose_gemm(table, *gemm, sm_count));
      return {};
    };
    F8_TRY(choose(chosen.kernels.gemms[i], chosen.gemms[i]));
    F8_TRY(choose(chosen.kernels.adding[i], chosen.adding[i]));
  }
  return chosen;
}

bool ChosenKernels::has_grouped_gradients() const {
  const auto& [output, dx, dw] = kernels.gemms;
  return dx && dw && GroupedGemm::fits(*dx, *gemms[1], *dw, *gemms[2]);
}

std::vector<codegen::KernelSpec> ChosenKernels::specs() const {
  std::vector<codegen::KernelSpec> specs;
  for (NamedSpec& named : quantize_kernels(kernels)) specs.push_back(std::move(named.spec));
  const auto add = [&](const codegen::KernelSpec& spec) {
    const auto same = [&](const auto& other) { return key(other) == key(spec); };
    if (std::ranges::none_of(specs, same)) specs.push_back(spec);
  };
  const auto add_gemms = [&](const auto& descs, const auto& choices) {
    for (size_t i = 0; i < descs.size(); ++i) {
      if (!descs[i] || choices[i]->provider != Provider::kGenerated) continue;
      add(gemm_spec(*descs[i], choices[i]->config));
    }
  };
  add_gemms(kernels.gemms, gemms);
  add_gemms(kernels.adding, adding);
  if (has_grouped_gradients()) add(GroupedGemm::spec(*kernels.gemms[1], *gemms[1]));
  return specs;
}

}  // namespace f8::runtime
