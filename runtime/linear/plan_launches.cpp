// Listing the launches of each kind of call: its casts, then the sums and GEMMs that read them.
#include "runtime/linear/plan_launches.hpp"

#include "runtime/linear/plan_casts.hpp"

namespace f8::runtime {
namespace {

using Kind = Launch::Kind;

// The tensors that a kind of call is given in fp8, as LinearKernels knows them.
CopySet given_copies(CallKind kind) {
  return ((kind & kGivenX) != 0 ? kXq : 0) | ((kind & kGivenW) != 0 ? kWq : 0);
}

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
    for (CallKind kind = 0; kind < kEmptyKinds; ++kind) all.empty_backward[kind] = empty(kind);
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
  [[nodiscard]] Fp8Refs refs(Tensor tensor, const TensorBuffers& at, bool with_qt) const {
    return fp8_refs(kernels_.of(tensor), at, with_qt);
  }

  Result<LaunchList> forward(CallKind kind) {
    const bool saved = (kind & kForwardSaved) != 0;
    const auto& [x, w, none] = layout_.forward;
    const Ref first = (kind & kGivenW) != 0 ? x.col_amax : w.row_amax;
    LaunchList list;
    CastSection section{
        .list = list, .tensors = layout_.forward, .clear = clear_amax(first, x.row_amax, 0)};
    F8_TRY(casts_.add(section, kernels_.forward_copies(saved, given_copies(kind)), kind));

    GemmOperands operands{.a = Slot::kX, .b = Slot::kW, .d = Slot::kY, .bias = Slot::kBias};
    if (is_fp8(Gemm::kOutput)) {
      const Fp8Refs a = (kind & kGivenX) != 0 ? kGivenXRefs : refs(Tensor::kInput, x, saved);
      const Fp8Refs b = (kind & kGivenW) != 0 ? kGivenWRefs : refs(Tensor::kWeight, w, saved);
      operands.a = a.q;
      operands.b = b.q;
      operands.inv_scale_a = a.q_inverse;
      operands.inv_scale_b = b.q_inverse;
    }
    list.push_back({.kind = Kind::kGemm,
                    .name = "gemm output",
                    .workspace = layout_.forward_gemm,
                    .gemms = {operands},
                    .gemm = gemm(Gemm::kOutput)});
    return list;
  }

  Result<LaunchList> backward(CallKind kind) {
    const bool dx = (kind & kBackwardDx) != 0;
    const bool dw = (kind & kBackwardDw) != 0;
    const bool db = (kind & kBackwardDb) != 0;
    // A gradient in high precision reads dy itself.
    const bool q = dx && is_fp8(Gemm::kGradInput);
    const bool qt = dw && is_fp8(Gemm::kGradWeight);
    LaunchList list;
    CastSection section{.list = list,
                        .tensors = layout_.backward,
                        .clear = clear_amax(layout_.amax, layout_.backward.dy.row_amax, 0),
                        .sums = db,
                        .summed_above_m = desc_.shape.m};
    if (q || qt) {
      F8_TRY(casts_.add(section, kernels_.backward_copies(q, qt, given_copies(kind)), kind));
    }
    if (db) F8_TRY(add_bias_gradient(list, section.summed_above_m));
    add_gradients(list, kind);
    return list;
  }

  // `summed_above_m`: for larger m a cast has left the column sums.
  Status add_bias_gradient(LaunchList& list, int64_t summed_above_m) {
    list.push_back(
        {.kind = Kind::kColumnSums,
         .name = "sum dy",
         .kernel = F8_TRY(context_.kernel(codegen::ColumnSumsSpec{kernels_.tensor_dtype})),
         .bytes_per_element = static_cast<double>(size_bytes(kernels_.tensor_dtype)),
         .up_to_m = summed_above_m,
         .operands = {{.x = Slot::kDy, .cols = desc_.shape.n}},
         .sums = layout_.sums});
    list.push_back({.kind = Kind::kBiasGrad,
                    .name = "bias gradient",
                    .kernel = F8_TRY(context_.kernel(*kernels_.bias_grad)),
                    .out = Slot::kDb,
                    .sums = layout_.sums,
                    .count = desc_.shape.n});
    return {};
  }

  // What is read of x and w is bound by the call: its tensors, a cache, `saved`, or the copies that
  // are made again.
  void add_gradients(LaunchList& list, CallKind kind) const {
    const bool dx = (kind & kBackwardDx) != 0;
    const bool dw = (kind & kBackwardDw) != 0;
    const bool add_dx = (kind & kBackwardAddDx) != 0;
    const bool add_dw = (kind & kBackwardAddDw) != 0;
    const bool with_qt = dw && is_fp8(Gemm::kGradWeight);
    const Fp8Refs dy = refs(Tensor::kGradOutput, layout_.backward.dy, with_qt);
    GemmOperands input{.a = Slot::kDy, .b = Slot::kW, .d = Slot::kDx};
    if (is_fp8(Gemm::kGradInput)) {
      input.a = dy.q;
      input.b = kGivenWRefs.qt;
      input.inv_scale_a = dy.q_inverse;
      input.inv_scale_b = kGivenWRefs.qt_inverse;
    }
    GemmOperands weight{.a = Slot::kDy, .b = Slot::kX, .d = Slot::kDw};
    if (is_fp8(Gemm::kGradWeight)) {
      weight.a = dy.qt;
      weight.b = kGivenXRefs.qt;
      weight.inv_scale_a = dy.qt_inverse;
      weight.inv_scale_b = kGivenXRefs.qt_inverse;
    }
    if (dx && dw && !add_dx && !add_dw && gemms_.gradients != nullptr) {
      list.push_back({.kind = Kind::kGroupedGemm,
                      .name = "gemm gradients",
                      .gemms = {input, weight},
                      .grouped = gemms_.gradients.get()});
      return;
    }
    if (dx) {
      list.push_back({.kind = Kind::kGemm,
                      .name = "gemm grad_input",
                      .workspace = layout_.backward_gemm,
                      .gemms = {input},
                      .gemm = add_dx ? gemms_.add_grad_input.get() : gemm(Gemm::kGradInput)});
    }
    if (dw) {
      list.push_back({.kind = Kind::kGemm,
                      .name = "gemm grad_weight",
                      .workspace = layout_.backward_gemm,
                      .gemms = {weight},
                      .gemm = add_dw ? gemms_.add_grad_weight.get() : gemm(Gemm::kGradWeight)});
    }
  }

  // The gradients of the parameters of an empty batch are zero.
  [[nodiscard]] LaunchList empty(CallKind kind) const {
    const auto zero = [](const char* name, Slot out, int64_t rows, int64_t cols, Dtype type) {
      return Launch{.kind = Kind::kZeroRows,
                    .name = name,
                    .above_m = -1,
                    .out = out,
                    .count = rows,
                    .row_bytes = static_cast<size_t>(cols) * size_bytes(type),
                    .element_bytes = size_bytes(type)};
    };
    const auto [m, n, k] = desc_.shape;
    LaunchList list;
    if ((kind & kEmptyDw) != 0) {
      list.push_back(zero("clear dw", Slot::kDw, n, k, desc_.grad_weight_dtype));
    }
    if ((kind & kEmptyDb) != 0) {
      list.push_back(zero("clear db", Slot::kDb, 1, n, desc_.bias_grad_dtype));
    }
    return list;
  }

  Result<LaunchList> cast_weight(CallKind kind) {
    const CallTensors tensors{.w = layout_.cache};
    LaunchList list;
    CastSection section{
        .list = list,
        .tensors = tensors,
        .clear = clear_amax(layout_.cache.row_amax, layout_.forward.x.col_amax, std::nullopt)};
    F8_TRY(casts_.add(section, kernels_.cache_copies(), kind));
    if ((kind & kWeightFlag) != 0) {
      list.push_back({.kind = Kind::kSetWords,
                      .name = "set valid",
                      .out = Slot::kNoopFlag,
                      .count = 1,
                      .value = 1});
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
