// Listing the launches of each set of casts, and the sums and GEMMs that read them.
#include "runtime/linear/plan/plan_launches.hpp"

#include <tuple>

#include "runtime/linear/plan/plan_casts.hpp"
#include "runtime/quantize/bias_grad.hpp"

namespace f8::runtime {
namespace {

constexpr Fp8Refs kInputRefs{Slot::kInputQ, Slot::kInputQInverse, Slot::kInputQt,
                             Slot::kInputQtInverse};
constexpr Fp8Refs kWeightRefs{Slot::kWeightQ, Slot::kWeightQInverse, Slot::kWeightQt,
                              Slot::kWeightQtInverse};

constexpr Fp8Refs kGradOutputRefs{Slot::kGradOutputQ, Slot::kGradOutputQInverse,
                                  Slot::kGradOutputQt, Slot::kGradOutputQtInverse};

constexpr CallKind kGiven = kGivenX | kGivenW;

struct GemmOperands {
  Ref a = {}, b = {}, d = {}, inv_scale_a = {}, inv_scale_b = {};
  bool shards = false;  // b is the weight's qt, in as many shards as the call has

  // Operands in fp8 lie in buffers, which have no stride of the call's.
  [[nodiscard]] GemmCall at(const CallArguments& call) const {
    return {.a = call.at<void>(a),
            .b = call.at<void>(b),
            .d = call.at<void>(d),
            .inv_scale_a = call.at<float>(inv_scale_a),
            .inv_scale_b = call.at<float>(inv_scale_b),
            .m = call.m,
            .bias = call.at<void>(Slot::kBias),
            .ld_a = call.stride(a),
            .ld_b = call.stride(b),
            .ld_d = call.stride(d),
            .shards = shards ? call.weight_shards : 1};
  }
};

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
      if (is_step(kind)) all.forward_casts[kind] = F8_TRY(forward_casts(kind));
    }
    all.output = output();
    for (CallKind kind = 0; kind < kBackwardKinds; ++kind) {
      if (is_step(kind) && is_backward(kind))
        all.backward_casts[kind] = F8_TRY(backward_casts(kind));
    }
    for (Results results = 0; results < kResults; ++results) {
      if (has(results)) all.gradients[results] = F8_TRY(gradients(results));
    }
    return all;
  }

 private:
  [[nodiscard]] bool is_step(CallKind kind) const {
    if ((kind & kOverRanks) != 0 && (kind & kFirstStep) == 0) return false;
    return (kind & kFirstStep) == 0 || !kernels_.slots.empty();
  }
  // A gradient in high precision reads dy itself.
  [[nodiscard]] bool is_backward(CallKind kind) const {
    if ((kind & kWeightAlone) != 0) {
      return (kind & (kGradOutputQ | kGradOutputQt | kGiven)) == 0 && desc_.recompute &&
             desc_.needs_grad_input && is_fp8(Gemm::kGradInput) &&
             ((kind & kGradOutputSums) == 0 || desc_.bias_grad);
    }
    return ((kind & kGradOutputQ) == 0 || (desc_.needs_grad_input && is_fp8(Gemm::kGradInput))) &&
           ((kind & kGradOutputQt) == 0 ||
            (desc_.needs_grad_weight && is_fp8(Gemm::kGradWeight))) &&
           ((kind & kGradOutputSums) == 0 || desc_.bias_grad) &&
           ((kind & kGiven) == 0 || desc_.recompute);
  }
  [[nodiscard]] bool has(Results results) const {
    const bool dx = (results & kDx) != 0;
    const bool dw = (results & kDw) != 0;
    return (!dx || desc_.needs_grad_input) && (!dw || desc_.needs_grad_weight) &&
           ((results & kDb) == 0 || desc_.bias_grad) &&
           ((results & kAddDx) == 0 || (dx && plan(Gemm::kGradInput, true) != nullptr)) &&
           ((results & kAddDw) == 0 || (dw && plan(Gemm::kGradWeight, true) != nullptr));
  }

  Result<LaunchList> forward_casts(CallKind kind) {
    const bool keeps = (kind & kForwardSaved) != 0;
    const CallTensors tensors = layout_.forward_tensors(keeps);
    const auto& [x, w, none] = tensors;
    const Ref first = (kind & kGivenW) != 0 ? x.col_amax : w.row_amax;
    const bool saved = keeps && !desc_.recompute;  // copies
    return casts_.plan({.tensors = tensors, .clear = clear_amax(first, x.row_amax, 0)},
                       kernels_.forward_copies(saved, kind & kGiven), kind);
  }

  LaunchList output() const {
    LaunchRange range{.up_to_m = desc_.shape.m};
    add_gemm(range, Gemm::kOutput, false, layout_.forward_gemm,
             operands(Gemm::kOutput, kInputRefs, kWeightRefs));
    return {std::move(range)};
  }

  Result<LaunchList> backward_casts(CallKind kind) {
    const bool sums = (kind & kGradOutputSums) != 0;
    const bool q = (kind & kGradOutputQ) != 0;
    const bool qt = (kind & kGradOutputQt) != 0;
    const CopySet copies =
        (kind & kWeightAlone) != 0 ? kWqt : kernels_.backward_copies(q, qt, kind & kGiven);
    LaunchList list =
        F8_TRY(casts_.plan({.tensors = layout_.backward,
                            .clear = clear_amax(layout_.amax, layout_.backward.dy.row_amax, 0),
                            .sums = sums},
                           copies, kind));
    for (LaunchRange& range : list) {
      if (sums && range.up_to_m > 0 && !range.has_sums) F8_TRY(add_column_sums(range));
    }
    return list;
  }

  Result<LaunchList> gradients(Results results) {
    LaunchList list;
    for (const int64_t up_to_m : {int64_t{0}, desc_.shape.m}) {
      LaunchRange& range = list.emplace_back();
      range.up_to_m = up_to_m;
      if ((results & kDb) != 0) F8_TRY(add_bias_gradient(range));
      add_gradients(range, results);
    }
    return list;
  }

  [[nodiscard]] const GemmPlan* plan(Gemm gemm, bool add) const {
    return (add ? gemms_.adding : gemms_.all)[static_cast<size_t>(gemm)].get();
  }
  [[nodiscard]] bool is_fp8(Gemm gemm) const { return desc_.recipe.at(gemm).is_fp8(); }

  // In high precision a GEMM reads the tensors themselves, else these copies of them.
  [[nodiscard]] GemmOperands operands(Gemm gemm, const Fp8Refs& a, const Fp8Refs& b) const {
    constexpr GemmOperands kOperands[] = {{Slot::kX, Slot::kW, Slot::kY},
                                          {Slot::kDy, Slot::kW, Slot::kDx},
                                          {Slot::kDy, Slot::kX, Slot::kDw}};
    GemmOperands out = kOperands[static_cast<size_t>(gemm)];
    if (!is_fp8(gemm)) return out;
    std::tie(out.a, out.inv_scale_a) =
        gemm == Gemm::kGradWeight ? std::pair(a.qt, a.qt_inverse) : std::pair(a.q, a.q_inverse);
    std::tie(out.b, out.inv_scale_b) =
        gemm == Gemm::kOutput ? std::pair(b.q, b.q_inverse) : std::pair(b.qt, b.qt_inverse);
    return out;
  }

  void add_gemm(LaunchRange& range, Gemm gemm, bool add, Ref workspace,
                const GemmOperands& operands) const {
    range.add(f8::format("gemm {}", to_string(gemm)),
              [plan = plan(gemm, add), workspace, operands](const LaunchTarget& to) {
                return plan->run(operands.at(to.call), to.call.at<void>(workspace), to.stream);
              });
  }

  Status add_column_sums(LaunchRange& range) {
    const int64_t n = desc_.shape.n;
    const Kernel* kernel = F8_TRY(context_.kernel(codegen::ColumnSumsSpec{kernels_.tensor_dtype}));
    const auto add_sums = [kernel, sums = layout_.sums, n](const LaunchTarget& to) {
      const auto& [context, call, stream, in_order] = to;
      const auto args = column_sums_args(call.at<void>(Slot::kDy), call.stride(Slot::kDy), call.m,
                                         n, call.at<float>(sums));
      return launch_column_sums(context.driver, *kernel, args, context.options.programmatic_launch,
                                stream);
    };
    const auto row = static_cast<double>(n) * static_cast<double>(size_bytes(desc_.tensor_dtype));
    range.add("sum dy", add_sums, {.of_step = row});
    return {};
  }

  // The gradient of an empty batch is zero.
  Status add_bias_gradient(LaunchRange& range) {
    const int64_t n = desc_.shape.n;
    const Ref sums = layout_.sums;
    if (range.up_to_m == 0) {
      const size_t bytes = static_cast<size_t>(n) * size_bytes(desc_.bias_grad_dtype);
      range.add("clear db", [bytes](const LaunchTarget& to) -> Status {
        if (to.call.accumulate_bias) return {};
        return zero(to.context.driver, to.context.primary, to.call.at<void>(Slot::kDb), 1, bytes,
                    bytes, to.stream);
      });
      return {};
    }
    const Kernel* kernel = F8_TRY(context_.kernel(*kernels_.bias_grad));
    range.add("bias gradient", [kernel, sums, n](const LaunchTarget& to) {
      const auto& [context, call, stream, in_order] = to;
      const auto args = bias_grad_args(call.at<float>(sums), call.m, n, call.at<void>(Slot::kDb),
                                       call.accumulate_bias);
      return launch_bias_grad(context.driver, *kernel, args, context.options.programmatic_launch,
                              stream);
    });
    return {};
  }

  void add_gradients(LaunchRange& range, Results results) const {
    GemmOperands input = operands(Gemm::kGradInput, kGradOutputRefs, kWeightRefs);
    input.shards = desc_.weight_shards;
    const GemmOperands weight = operands(Gemm::kGradWeight, kGradOutputRefs, kInputRefs);
    const bool adds = (results & (kAddDx | kAddDw)) != 0;
    if ((results & kDx) != 0 && (results & kDw) != 0 && !adds && gemms_.gradients != nullptr &&
        range.up_to_m > 0) {
      range.add("gemm gradients",
                [plan = gemms_.gradients.get(), input, weight](const LaunchTarget& to) {
                  return plan->run(input.at(to.call), weight.at(to.call), to.stream);
                });
      return;
    }
    const Ref workspace = layout_.backward_gemm;
    if ((results & kDx) != 0) {
      add_gemm(range, Gemm::kGradInput, (results & kAddDx) != 0, workspace, input);
    }
    if ((results & kDw) != 0) {
      add_gemm(range, Gemm::kGradWeight, (results & kAddDw) != 0, workspace, weight);
    }
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
