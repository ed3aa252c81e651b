// Listing the launches of each kind of call: its casts, then the sums and GEMMs that read them.
#include "runtime/linear/plan_launches.hpp"

#include "runtime/linear/plan_casts.hpp"

namespace f8::runtime {
namespace {

using Kind = Launch::Kind;

// The inverse scales of a copy, for its GEMM.
Ref inverse_of(const CastSetting& setting, Ref scale) {
  return setting.granularity == Granularity::kTensor ? word_at(scale, kernels::kInverse) : scale;
}

class LaunchPlanner {
 public:
  LaunchPlanner(Context& context, const LinearDesc& desc, const LinearKernels& kernels,
                const LinearGemms& gemms, const LinearLayout& layout)
      : context_(context),
        desc_(desc),
        kernels_(kernels),
        gemms_(gemms),
        layout_(layout),
        casts_(context, desc, kernels, layout) {}

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
    const bool dw = (kind & kBackwardDw) != 0;
    return ((kind & kBackwardDx) == 0 || desc_.needs_grad_input) &&
           ((kind & kBackwardDb) == 0 || desc_.bias_grad) &&
           ((kind & kBackwardAccumulate) == 0 || (dw && gemms_.add_grad_weight != nullptr)) &&
           ((kind & kBackwardCached) == 0 || desc_.recompute);
  }
  [[nodiscard]] const GemmPlan* gemm(Gemm which) const {
    return gemms_.all[static_cast<size_t>(which)].get();
  }
  [[nodiscard]] bool is_fp8(Gemm which) const { return desc_.recipe.at(which).is_fp8(); }

  // The words of the amax buffer from `begin` to `end`, and one more for each row where `count_m`.
  [[nodiscard]] static Launch clear_amax(Ref begin, Ref end, bool count_m) {
    return {.kind = Kind::kSetWords,
            .name = "clear amax",
            .out = begin,
            .count = static_cast<int64_t>((end.offset() - begin.offset()) / sizeof(uint32_t)),
            .count_m = count_m};
  }

  // The inverse scales of q, which a cast that also wrote qt may have left with it.
  [[nodiscard]] Ref inverse_q(Tensor tensor, const TensorBuffers& at, bool with_qt) const {
    const Copies& copies = kernels_.of(tensor);
    return inverse_of(*copies.q, with_qt && copies.share_scale() ? at.qt_scale : at.q_scale);
  }

  Result<LaunchList> forward(CallKind kind) {
    const bool cached = (kind & kForwardCached) != 0;
    const bool saved = (kind & kForwardSaved) != 0;
    CallTensors tensors = layout_.forward;
    const auto& [x, w, none] = tensors;
    const Ref first = cached ? x.col_amax : w.row_amax;
    if (cached) tensors.w = layout_.cache;
    LaunchList list;
    CastSection section{
        .list = list, .tensors = tensors, .clear = clear_amax(first, x.row_amax, true)};
    F8_TRY(casts_.add(section, kernels_.forward_copies(saved, cached), kind));

    GemmOperands operands{.a = Slot::kX, .b = Slot::kW, .d = Slot::kY, .bias = Slot::kBias};
    if (is_fp8(Gemm::kOutput)) {
      operands.a = x.q;
      operands.b = w.q;
      operands.inv_scale_a = inverse_q(Tensor::kInput, x, saved);
      operands.inv_scale_b = inverse_q(Tensor::kWeight, w, saved || cached);
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
                        .clear = clear_amax(layout_.amax, layout_.backward.dy.row_amax, true),
                        .sums = db,
                        .summed_above_m = desc_.shape.m};
    if (q || qt) {
      const bool cached = (kind & kBackwardCached) != 0;
      F8_TRY(casts_.add(section, kernels_.backward_copies(q, qt, cached), kind));
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

  void add_gradients(LaunchList& list, CallKind kind) const {
    const auto& [x, w, dy] = layout_.backward;
    const bool dx = (kind & kBackwardDx) != 0;
    const bool dw = (kind & kBackwardDw) != 0;
    const bool accumulate = (kind & kBackwardAccumulate) != 0;
    GemmOperands input{.a = Slot::kDy, .b = Slot::kW, .d = Slot::kDx};
    if (dx && is_fp8(Gemm::kGradInput)) {
      const bool with_qt = dw && is_fp8(Gemm::kGradWeight);
      input.a = dy.q;
      input.b = Slot::kWeightQt;
      input.inv_scale_a = inverse_q(Tensor::kGradOutput, dy, with_qt);
      input.inv_scale_b = inverse_of(*kernels_.of(Tensor::kWeight).qt, Slot::kWeightQtScale);
    }
    GemmOperands weight{.a = Slot::kDy, .b = Slot::kX, .d = Slot::kDw};
    if (is_fp8(Gemm::kGradWeight)) {
      weight.a = dy.qt;
      weight.b = x.qt;
      weight.inv_scale_a = inverse_of(*kernels_.of(Tensor::kGradOutput).qt, dy.qt_scale);
      weight.inv_scale_b = inverse_of(*kernels_.of(Tensor::kInput).qt, x.qt_scale);
    }
    if (dx && dw && !accumulate && gemms_.gradients != nullptr) {
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
                      .gemm = gemm(Gemm::kGradInput)});
    }
    if (dw) {
      list.push_back({.kind = Kind::kGemm,
                      .name = "gemm grad_weight",
                      .workspace = layout_.backward_gemm,
                      .gemms = {weight},
                      .gemm = accumulate ? gemms_.add_grad_weight.get() : gemm(Gemm::kGradWeight)});
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
        .clear = clear_amax(layout_.cache.row_amax, layout_.forward.x.col_amax, false)};
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
