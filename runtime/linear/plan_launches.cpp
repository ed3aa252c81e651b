// Listing the launches of each kind of call: its casts, then the sums and GEMMs that read them.
#include "runtime/linear/plan_launches.hpp"

#include "runtime/linear/plan_casts.hpp"

namespace f8::runtime {
namespace {

constexpr Fp8Refs kGivenXRefs{Slot::kInputQ, Slot::kInputQInverse, Slot::kInputQt,
                              Slot::kInputQtInverse};
constexpr Fp8Refs kGivenWRefs{Slot::kWeightQ, Slot::kWeightQInverse, Slot::kWeightQt,
                              Slot::kWeightQtInverse};

class LaunchPlanner {
 public:
  LaunchPlanner(Context& context, const LinearDesc& desc, const LinearKernels& kernels,
                const LinearGemms& gemms, const LinearLayout& layout)
      : context_(context),
        desc_(desc),
        kernels_(kernels),
        gemms_(gemms),
        layout_(layout),
        casts_(context, desc.shape.m, kernels, {layout.sync, layout.first, layout.sums}) {}

  Result<LinearLaunches> plan() {
    LinearLaunches all;
    for (CallKind kind = 0; kind < kForwardKinds; ++kind) {
      if (is_step(kind)) all.forward[kind] = F8_TRY(forward(kind));
    }
    for (CallKind kind = 0; kind < kBackwardKinds; ++kind) {
      if (is_step(kind) && is_backward(kind)) all.backward[kind] = F8_TRY(backward(kind));
    }
    for (CallKind kind = 0; kind < kWeightKinds; ++kind) {
      if (is_step(kind)) all.cast_weight[kind] = F8_TRY(cast_weight(kind));
    }
    return all;
  }

 private:
  [[nodiscard]] bool is_step(CallKind kind) const {
    if ((kind & kOverRanks) != 0 && (kind & kFirstStep) == 0) return false;
    return (kind & kFirstStep) == 0 || !kernels_.slots.empty();
  }
  [[nodiscard]] bool is_backward(CallKind kind) const {
    const bool dx = (kind & kBackwardDx) != 0;
    const bool dw = (kind & kBackwardDw) != 0;
    return (!dx || desc_.needs_grad_input) && ((kind & kBackwardDb) == 0 || desc_.bias_grad) &&
           ((kind & kBackwardAddDx) == 0 || (dx && gemms_.add_grad_input != nullptr)) &&
           ((kind & kBackwardAddDw) == 0 || (dw && gemms_.add_grad_weight != nullptr)) &&
           ((kind & (kGivenX | kGivenW)) == 0 || desc_.recompute);
  }
  [[nodiscard]] const GemmPlan* gemm(Gemm which) const {
    return gemms_.all[static_cast<size_t>(which)].get();
  }
  [[nodiscard]] bool is_fp8(Gemm which) const { return desc_.recipe.at(which).is_fp8(); }

  Result<LaunchList> forward(CallKind kind) {
    const bool saved = (kind & kForwardSaved) != 0;
    const auto& [x, w, none] = layout_.forward;
    const Ref first = (kind & kGivenW) != 0 ? x.col_amax : w.row_amax;
    LaunchList list =
        F8_TRY(casts_.plan({.tensors = layout_.forward, .clear = clear_amax(first, x.row_amax, 0)},
                           kernels_.forward_copies(saved, kind & (kGivenX | kGivenW)), kind));
    GemmOperands operands{.a = Slot::kX, .b = Slot::kW, .d = Slot::kY};
    if (is_fp8(Gemm::kOutput)) {
      const Fp8Refs a =
          (kind & kGivenX) != 0 ? kGivenXRefs : fp8_refs(kernels_.of(Tensor::kInput), x, saved);
      const Fp8Refs b =
          (kind & kGivenW) != 0 ? kGivenWRefs : fp8_refs(kernels_.of(Tensor::kWeight), w, saved);
      operands.a = a.q;
      operands.b = b.q;
      operands.inv_scale_a = a.q_inverse;
      operands.inv_scale_b = b.q_inverse;
    }
    for (LaunchRange& range : list) {
      range.add(GemmLaunch{gemm(Gemm::kOutput), layout_.forward_gemm, operands}, "gemm output");
    }
    return list;
  }

  Result<LaunchList> backward(CallKind kind) {
    const bool db = (kind & kBackwardDb) != 0;
    // A gradient in high precision reads dy itself.
    const bool q = (kind & kBackwardDx) != 0 && is_fp8(Gemm::kGradInput);
    const bool qt = (kind & kBackwardDw) != 0 && is_fp8(Gemm::kGradWeight);
    const TensorBuffers& dy = layout_.backward.dy;
    LaunchList list = F8_TRY(casts_.plan(
        {.tensors = layout_.backward,
         .clear = clear_amax(layout_.amax, dy.row_amax, 0),
         .sums = db},
        kernels_.backward_copies(q, qt, kind & (kGivenX | kGivenW)), q || qt ? kind : 0));
    for (LaunchRange& range : list) {
      if (db) F8_TRY(add_bias_gradient(range));
      add_gradients(range, kind, fp8_refs(kernels_.of(Tensor::kGradOutput), dy, qt));
    }
    return list;
  }

  Status add_bias_gradient(LaunchRange& range) {
    const int64_t n = desc_.shape.n;
    if (range.up_to_m > 0 && !range.has_sums) {
      const Kernel* sums = F8_TRY(context_.kernel(codegen::ColumnSumsSpec{kernels_.tensor_dtype}));
      const auto bytes =
          static_cast<double>(n) * static_cast<double>(size_bytes(kernels_.tensor_dtype));
      range.add(ColumnSums{sums, layout_.sums, n}, "sum dy", {.of_step = bytes});
    }
    const Kernel* kernel = F8_TRY(context_.kernel(*kernels_.bias_grad));
    range.add(BiasGrad{kernel, layout_.sums, n}, "bias gradient");
    return {};
  }

  // What is read of x and w is bound by the call: its tensors, a cache, `saved`, or the copies that
  // are made again.
  void add_gradients(LaunchRange& range, CallKind kind, const Fp8Refs& dy) const {
    const bool add_dx = (kind & kBackwardAddDx) != 0;
    const bool add_dw = (kind & kBackwardAddDw) != 0;
    GemmOperands input{.a = Slot::kDy, .b = Slot::kW, .d = Slot::kDx};
    if (is_fp8(Gemm::kGradInput)) {
      input = {.a = dy.q,
               .b = kGivenWRefs.qt,
               .d = Slot::kDx,
               .inv_scale_a = dy.q_inverse,
               .inv_scale_b = kGivenWRefs.qt_inverse};
    }
    GemmOperands weight{.a = Slot::kDy, .b = Slot::kX, .d = Slot::kDw};
    if (is_fp8(Gemm::kGradWeight)) {
      weight = {.a = dy.qt,
                .b = kGivenXRefs.qt,
                .d = Slot::kDw,
                .inv_scale_a = dy.qt_inverse,
                .inv_scale_b = kGivenXRefs.qt_inverse};
    }
    constexpr CallKind kBoth = kBackwardDx | kBackwardDw;
    if ((kind & kBoth) == kBoth && !add_dx && !add_dw && gemms_.gradients != nullptr &&
        range.up_to_m > 0) {
      range.add(GroupedGemmLaunch{gemms_.gradients.get(), input, weight}, "gemm gradients");
      return;
    }
    const Ref workspace = layout_.backward_gemm;
    if ((kind & kBackwardDx) != 0) {
      const GemmPlan* plan = add_dx ? gemms_.add_grad_input.get() : gemm(Gemm::kGradInput);
      range.add(GemmLaunch{plan, workspace, input}, "gemm grad_input");
    }
    if ((kind & kBackwardDw) != 0) {
      const GemmPlan* plan = add_dw ? gemms_.add_grad_weight.get() : gemm(Gemm::kGradWeight);
      range.add(GemmLaunch{plan, workspace, weight}, "gemm grad_weight");
    }
  }

  Result<LaunchList> cast_weight(CallKind kind) {
    const CallTensors tensors{.w = layout_.cache};
    const Ref end = layout_.forward.x.col_amax;
    LaunchList list = F8_TRY(casts_.plan(
        {.tensors = tensors, .clear = clear_amax(layout_.cache.row_amax, end, std::nullopt)},
        kernels_.cache_copies(), kind));
    if ((kind & kWeightFlag) != 0) {
      for (LaunchRange& range : list) {
        range.add(SetWords{Slot::kNoopFlag, 1, 1}, "set valid");
      }
    }
    return list;
  }

  Context& context_;
  const LinearDesc& desc_;
  const LinearKernels& kernels_;
  const LinearGemms& gemms_;
  const LinearLayout& layout_;
  CastPlanner casts_;
};

}  // namespace

Result<LinearLaunches> plan_launches(const std::shared_ptr<Context>& context,
                                     const LinearDesc& desc, const LinearKernels& kernels,
                                     const LinearGemms& gemms, const LinearLayout& layout) {
  return LaunchPlanner(*context, desc, kernels, gemms, layout).plan();
}

}  // namespace f8::runtime
