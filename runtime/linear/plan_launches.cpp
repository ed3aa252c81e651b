// Listing launches. Which of amax, cast and one-launch kernels a call runs depends on its m by
// limits alone, which are found here.
#include "runtime/linear/plan_launches.hpp"

#include <algorithm>
#include <map>

#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

using codegen::ScaleMode;
using Kind = Launch::Kind;

// A tensor of a kind of call, and where what is made of it goes.
struct TensorBuffers {
  Ref x;
  int64_t rows = 0;  // 0: the call's m
  int64_t cols = 0;
  Ref q = {}, qt = {}, q_scale = {}, qt_scale = {};
  Ref partials = {}, lines = {}, words = {};
  WordLayout word = {};
};
using CallTensors = std::array<TensorBuffers, 3>;  // indexed by Tensor

Ref words_at(Ref words, int64_t index) {
  return words + sizeof(uint32_t) * static_cast<size_t>(index);
}

// The inverse scales of a copy, for its GEMM.
Ref inverse_of(const CastSetting& setting, Ref scale) {
  return setting.granularity == Granularity::kTensor ? words_at(scale, kernels::kInverse) : scale;
}

// `recorded`: where the amaxes of delayed scaling go.
CastOperand cast_operand(const FusedCast& fused, const TensorBuffers& at, Ref recorded) {
  const codegen::CastSpec& cast = fused.cast;
  const bool axis = has_scale(cast, ScaleMode::kAxis);
  CastOperand operand{.x = at.x, .rows = at.rows, .cols = at.cols};
  operand.partials = axis ? words_at(at.words, at.word.tensor) : at.partials;
  operand.lines = at.lines;
  operand.row_amax = words_at(at.words, at.word.row);
  operand.col_amax = words_at(at.words, at.word.column);
  operand.q = at.q;
  operand.qt = at.qt;
  operand.scale = cast.qt && cast.scale_qt == ScaleMode::kTensor ? at.qt_scale : at.q_scale;
  operand.inv_row = at.q_scale;
  operand.inv_col = at.qt_scale;
  if (fused.slot >= 0) {
    operand.delayed = words_at(Slot::kScale, fused.slot * kernels::kScaleStride);
    operand.recorded_amax = words_at(recorded, fused.slot);
  }
  operand.counters =
      Ref(Slot::kCounters) + 2 * static_cast<size_t>(fused.tensor) * sizeof(kernels::CastCounters);
  return operand;
}

TensorBuffers weight_buffers(const LinearDesc& desc, const LinearLayout& layout) {
  const Ref work = Slot::kWorkspace;
  return {.x = Slot::kW,
          .rows = desc.shape.n,
          .cols = desc.shape.k,
          .partials = work + layout.w_partials,
          .lines = work + layout.w_lines,
          .words = work + layout.words,
          .word = layout.w_words};
}

void set_copies(TensorBuffers& tensor, Ref at, const CopyLayout& copies) {
  tensor.q = at + copies.q;
  tensor.q_scale = at + copies.q_scale;
}
void set_transposed(TensorBuffers& tensor, Ref at, const CopyLayout& copies) {
  tensor.qt = at + copies.qt;
  tensor.qt_scale = at + copies.qt_scale;
}

TensorBuffers cache_buffers(const LinearDesc& desc, const LinearLayout& layout) {
  TensorBuffers w = weight_buffers(desc, layout);
  set_copies(w, Slot::kCache, layout.cache);
  set_transposed(w, Slot::kCache, layout.cache);
  return w;
}

class LaunchPlanner {
 public:
  LaunchPlanner(Context& context, const LinearDesc& desc, const LinearKernels& kernels,
                const LinearGemms& gemms, const LinearLayout& layout)
      : context_(context), desc_(desc), kernels_(kernels), gemms_(gemms), layout_(layout) {}

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
  // A kernel pass with its kernels.
  struct Pass {
    KernelPass spec;
    const Kernel* amax = nullptr;
    const Kernel* cast = nullptr;
    const Kernel* quantize = nullptr;  // null: never in one launch
    const Kernel* summing = nullptr;
  };
  // A section of a list that casts: its tensors, and which amax buffer it clears.
  struct Casts {
    LaunchList& list;
    const CallTensors& tensors;
    Launch clear;
    bool sums = false;       // a cast of dy leaves column sums where it can
    bool recording = false;  // only for the maxima of a first step over ranks
    int64_t cleared_above_m = 0;
    int64_t summed_above_m = 0;  // for larger m a cast has left the sums
  };
  // What an overlap with the next pass depends on.
  struct Overlap {
    const Pass* pass;
    int64_t single_up_to_m;  // the pass is one launch
    std::vector<CastOperand> operands;
  };

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
  [[nodiscard]] int sm_count() const { return context_.device().sm_count; }

  // The largest m of a call that `holds`, which holds for all below it; 0: none.
  template <class Holds>
  [[nodiscard]] int64_t largest_m(Holds&& holds) const {
    int64_t below = 0;
    int64_t above = desc_.shape.m + 1;
    while (above - below > 1) {
      const int64_t middle = below + (above - below) / 2;
      (holds(middle) ? below : above) = middle;
    }
    return below;
  }

  Result<const std::vector<Pass>*> passes(CopySet copies, bool first_step) {
    const auto [at, is_new] = passes_.try_emplace({copies, first_step});
    if (!is_new) return &at->second;
    const ContextOptions& options = context_.options();
    for (KernelPass& spec : kernels_.passes(copies, first_step)) {
      Pass pass;
      if (spec.amax) pass.amax = F8_TRY(context_.kernel(*spec.amax));
      pass.cast = F8_TRY(context_.kernel(spec.cast));
      if (spec.one_launch &&
          (options.cooperative_launch || !codegen::is_cooperative(*spec.one_launch))) {
        pass.quantize = F8_TRY(context_.kernel(*spec.one_launch));
      }
      if (spec.summing) pass.summing = F8_TRY(context_.kernel(*spec.summing));
      pass.spec = std::move(spec);
      at->second.push_back(std::move(pass));
    }
    return &at->second;
  }

  [[nodiscard]] std::vector<CastOperand> operands_of(const Pass& pass, const Casts& casts) const {
    std::vector<CastOperand> operands;
    for (const FusedCast& fused : pass.spec.casts) {
      const Ref recorded = casts.recording ? Ref(Slot::kWorkspace, layout_.first) : Slot::kAmax;
      CastOperand& operand = operands.emplace_back(
          cast_operand(fused, casts.tensors[static_cast<size_t>(fused.tensor)], recorded));
      if (casts.recording) operand.counters = {};
      const auto amax = amax_before(fused.cast);
      operand.lines_up_to = !amax ? 0 : largest_m([&](int64_t m) {
        return takes_lines(*amax, operand.rows_at(m), operand.cols);
      });
    }
    return operands;
  }

  // The largest m for which a pass goes as `launches` or in fewer launches.
  [[nodiscard]] int64_t largest_m(const Pass& pass, const std::vector<CastOperand>& operands,
                                  Launches launches) const {
    if (pass.quantize == nullptr) return 0;
    return largest_m([&](int64_t m) {
      std::vector<QuantizeOperand> sizes;
      for (const CastOperand& x : operands) sizes.push_back({.rows = x.rows_at(m), .cols = x.cols});
      return quantize_launches(*pass.spec.one_launch, sm_count(), sizes) <= launches;
    });
  }

  // Up to which m a pass may overlap the one before it: one launch each, of different tensors; and
  // where blocks wait for each other, so small that all are resident.
  [[nodiscard]] int64_t overlaps_up_to(const Overlap& before, const Overlap& own) const {
    for (const FusedCast& cast : own.pass->spec.casts) {
      if (std::ranges::count(before.pass->spec.casts, cast.tensor, &FusedCast::tensor) > 0)
        return 0;
    }
    const int64_t single = std::min(before.single_up_to_m, own.single_up_to_m);
    const auto waits = [](const Pass& pass) {
      return pass.spec.amax && !codegen::scales_rows_alone(pass.spec.cast);
    };
    if (!waits(*before.pass) && !waits(*own.pass)) return single;
    const auto tiles = [](const std::vector<CastOperand>& operands, int64_t m) {
      int64_t sum = 0;
      for (const CastOperand& x : operands) sum += cast_tiles(x.rows_at(m), x.cols);
      return sum;
    };
    return std::min(single, largest_m([&](int64_t m) {
                      return tiles(before.operands, m) + tiles(own.operands, m) <=
                             resident_quantize_blocks(sm_count());
                    }));
  }

  // The clear of the amax buffer before a launch that raises words of it, for the m for which no
  // launch before has had it cleared.
  void add_clear(Casts& casts, const Pass& pass, const std::vector<CastOperand>& operands,
                 int64_t above_m) const {
    if (!pass.spec.amax->row && !pass.spec.amax->col) return;
    int64_t lines_up_to = desc_.shape.m;
    for (const CastOperand& x : operands) lines_up_to = std::min(lines_up_to, x.lines_up_to);
    casts.clear.above_m = std::max(above_m, lines_up_to);
    casts.clear.up_to_m = casts.cleared_above_m;
    if (casts.clear.above_m >= casts.clear.up_to_m) return;
    casts.cleared_above_m = casts.clear.above_m;
    casts.list.push_back(casts.clear);
  }

  Overlap add_pass(Casts& casts, const Pass& pass, const Overlap* before) const {
    const KernelPass& spec = pass.spec;
    Overlap own{&pass, desc_.shape.m, operands_of(pass, casts)};
    const int64_t one = largest_m(pass, own.operands, Launches::kOne);
    const int64_t each = largest_m(pass, own.operands, Launches::kOneEach);
    if (spec.amax) own.single_up_to_m = one;
    const int64_t overlaps = before == nullptr ? 0 : overlaps_up_to(*before, own);
    const auto read = static_cast<double>(size_bytes(spec.cast.in));
    const double moved = read + (spec.cast.q ? 1 : 0) + (spec.cast.qt ? 1 : 0);
    Launch quantize{.kind = Kind::kQuantize,
                    .name = spec.quantize_name,
                    .kernel = pass.quantize,
                    .bytes_per_element = moved,
                    .up_to_m = one,
                    .overlaps_up_to_m = overlaps,
                    .operands = own.operands,
                    .workspace = Ref(Slot::kWorkspace, layout_.sync)};
    if (one > 0) casts.list.push_back(quantize);
    for (size_t i = 0; each > one && i < own.operands.size(); ++i) {
      quantize.name = spec.casts[i].quantize_name;
      quantize.above_m = one;
      quantize.up_to_m = each;
      quantize.overlaps_up_to_m = 0;
      quantize.operands = {own.operands[i]};
      casts.list.push_back(quantize);
    }
    if (each == desc_.shape.m) return own;
    if (spec.amax) {
      add_clear(casts, pass, own.operands, each);
      casts.list.push_back({.kind = Kind::kAmax,
                            .name = spec.amax_name,
                            .kernel = pass.amax,
                            .bytes_per_element = read,
                            .above_m = each,
                            .operands = own.operands});
    }
    Launch cast{.kind = Kind::kCast,
                .name = spec.cast_name,
                .kernel = pass.cast,
                .bytes_per_element = moved,
                .above_m = each,
                .overlaps_up_to_m = spec.amax ? 0 : overlaps,
                .operands = own.operands};
    if (casts.sums && pass.summing != nullptr) {
      cast.kernel = pass.summing;
      cast.sums = Ref(Slot::kWorkspace, layout_.sums);
      casts.summed_above_m = each;
    }
    casts.list.push_back(std::move(cast));
    return own;
  }

  Status add_passes(Casts& casts, CopySet copies, bool first_step) {
    casts.cleared_above_m = desc_.shape.m;
    std::optional<Overlap> before;
    for (const Pass& pass : *F8_TRY(passes(copies, first_step))) {
      before = add_pass(casts, pass, before ? &*before : nullptr);
    }
    return {};
  }

  // A first step over ranks runs the casts of later steps: first for the maxima that they record,
  // then with the scales of these over all ranks.
  Status add_casts(Casts& casts, CopySet copies, CallKind kind) {
    casts.summed_above_m = desc_.shape.m;
    if ((kind & kOverRanks) == 0) return add_passes(casts, copies, (kind & kFirstStep) != 0);
    const Ref amax(Slot::kWorkspace, layout_.first);
    const auto count = static_cast<int64_t>(kernels_.slots.size());
    const Kernel* update = F8_TRY(context_.kernel(codegen::ScaleUpdateSpec{}));
    casts.list.push_back({.kind = Kind::kSetWords,
                          .name = "clear amax",
                          .out = amax,
                          .count = static_cast<int64_t>(kFirstWords) * count});
    Casts recording{.list = casts.list, .tensors = casts.tensors, .clear = casts.clear};
    recording.recording = true;
    F8_TRY(add_passes(recording, copies, false));
    casts.list.push_back(
        {.kind = Kind::kReduceAmax, .name = "reduce amax", .out = amax, .count = count});
    casts.list.push_back({.kind = Kind::kFirstScales,
                          .name = "first scales",
                          .kernel = update,
                          .out = amax,
                          .count = count,
                          .hold = kernels_.hold});
    return add_passes(casts, copies, false);
  }

  // `count` words of the amax buffer from word `first` on, and one for each row where `count_m`.
  [[nodiscard]] Launch clear_amax(int64_t first, int64_t count, bool count_m) const {
    return {.kind = Kind::kSetWords,
            .name = "clear amax",
            .out = words_at(Ref(Slot::kWorkspace, layout_.words), first),
            .count = count,
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
    const Ref work = Slot::kWorkspace;
    CallTensors tensors;
    TensorBuffers& x = tensors[static_cast<size_t>(Tensor::kInput)];
    TensorBuffers& w = tensors[static_cast<size_t>(Tensor::kWeight)];
    x = {.x = Slot::kX,
         .cols = desc_.shape.k,
         .partials = work + layout_.x_partials,
         .lines = work + layout_.x_lines,
         .words = work + layout_.words,
         .word = layout_.x_words};
    set_copies(x, work, layout_.x);
    if (saved) set_transposed(x, Slot::kSaved, layout_.x);
    if (cached) {
      w = cache_buffers(desc_, layout_);
    } else {
      w = weight_buffers(desc_, layout_);
      set_copies(w, work, layout_.w);
      if (saved) set_transposed(w, Slot::kSaved, layout_.w);
    }
    LaunchList list;
    const int64_t first_word = cached ? layout_.input_words : 0;
    Casts casts{.list = list,
                .tensors = tensors,
                .clear = clear_amax(first_word, layout_.x_words.row - first_word, true)};
    F8_TRY(add_casts(casts, kernels_.forward_copies(saved, cached), kind));

    GemmOperands operands{.a = Slot::kX, .b = Slot::kW, .d = Slot::kY, .bias = Slot::kBias};
    if (is_fp8(Gemm::kOutput)) {
      operands.a = x.q;
      operands.b = w.q;
      operands.inv_scale_a = inverse_q(Tensor::kInput, x, saved);
      operands.inv_scale_b = inverse_q(Tensor::kWeight, w, saved || cached);
    }
    list.push_back({.kind = Kind::kGemm,
                    .name = "gemm output",
                    .workspace = work + layout_.forward_gemm,
                    .gemms = {operands},
                    .gemm = gemm(Gemm::kOutput)});
    return list;
  }

  // dy's buffers, and those of what backward casts again.
  [[nodiscard]] CallTensors backward_tensors() const {
    const Ref work = Slot::kWorkspace;
    CallTensors tensors;
    TensorBuffers& dy = tensors[static_cast<size_t>(Tensor::kGradOutput)];
    dy = {.x = Slot::kDy,
          .cols = desc_.shape.n,
          .partials = work + layout_.dy_partials,
          .lines = work + layout_.dy_lines,
          .words = work + layout_.words,
          .word = layout_.dy_words};
    set_copies(dy, work, layout_.dy);
    set_transposed(dy, work, layout_.dy);
    const auto again = [&](Ref x, int64_t rows, const LinearLayout::Again& at,
                           const CopyLayout& copies) {
      TensorBuffers tensor{.x = x,
                           .rows = rows,
                           .cols = desc_.shape.k,
                           .partials = work + at.partials,
                           .lines = work + at.lines,
                           .words = work + layout_.words,
                           .word = at.words};
      set_transposed(tensor, work, copies);
      return tensor;
    };
    tensors[static_cast<size_t>(Tensor::kInput)] = again(Slot::kX, 0, layout_.x_again, layout_.x);
    tensors[static_cast<size_t>(Tensor::kWeight)] =
        again(Slot::kW, desc_.shape.n, layout_.w_again, layout_.w);
    return tensors;
  }

  Result<LaunchList> backward(CallKind kind) {
    const bool dx = (kind & kBackwardDx) != 0;
    const bool dw = (kind & kBackwardDw) != 0;
    const bool db = (kind & kBackwardDb) != 0;
    // A gradient in high precision reads dy itself.
    const bool q = dx && is_fp8(Gemm::kGradInput);
    const bool qt = dw && is_fp8(Gemm::kGradWeight);
    const CallTensors tensors = backward_tensors();
    LaunchList list;
    Casts casts{.list = list,
                .tensors = tensors,
                .clear = clear_amax(0, layout_.dy_words.row, true),
                .sums = db,
                .summed_above_m = desc_.shape.m};
    if (q || qt) {
      const bool cached = (kind & kBackwardCached) != 0;
      F8_TRY(add_casts(casts, kernels_.backward_copies(q, qt, cached), kind));
    }
    if (db) F8_TRY(add_bias_gradient(list, casts.summed_above_m));
    add_gradients(list, kind, tensors[static_cast<size_t>(Tensor::kGradOutput)]);
    return list;
  }

  // `summed_above_m`: for larger m a cast has left the column sums.
  Status add_bias_gradient(LaunchList& list, int64_t summed_above_m) {
    const Ref sums(Slot::kWorkspace, layout_.sums);
    list.push_back(
        {.kind = Kind::kColumnSums,
         .name = "sum dy",
         .kernel = F8_TRY(context_.kernel(codegen::ColumnSumsSpec{kernels_.tensor_dtype})),
         .bytes_per_element = static_cast<double>(size_bytes(kernels_.tensor_dtype)),
         .up_to_m = summed_above_m,
         .operands = {{.x = Slot::kDy, .cols = desc_.shape.n}},
         .sums = sums});
    list.push_back({.kind = Kind::kBiasGrad,
                    .name = "bias gradient",
                    .kernel = F8_TRY(context_.kernel(*kernels_.bias_grad)),
                    .out = Slot::kDb,
                    .sums = sums,
                    .count = desc_.shape.n});
    return {};
  }

  void add_gradients(LaunchList& list, CallKind kind, const TensorBuffers& dy) const {
    const bool dx = (kind & kBackwardDx) != 0;
    const bool dw = (kind & kBackwardDw) != 0;
    const bool accumulate = (kind & kBackwardAccumulate) != 0;
    const Ref own(Slot::kWorkspace, layout_.backward_gemm);
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
      const Ref saved = desc_.recompute ? Slot::kWorkspace : Slot::kSaved;
      weight.a = dy.qt;
      weight.b = saved + layout_.x.qt;
      weight.inv_scale_a = inverse_of(*kernels_.of(Tensor::kGradOutput).qt, dy.qt_scale);
      weight.inv_scale_b = inverse_of(*kernels_.of(Tensor::kInput).qt, saved + layout_.x.qt_scale);
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
                      .workspace = own,
                      .gemms = {input},
                      .gemm = gemm(Gemm::kGradInput)});
    }
    if (dw) {
      list.push_back({.kind = Kind::kGemm,
                      .name = "gemm grad_weight",
                      .workspace = own,
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
    CallTensors tensors;
    tensors[static_cast<size_t>(Tensor::kWeight)] = cache_buffers(desc_, layout_);
    LaunchList list;
    Casts casts{
        .list = list, .tensors = tensors, .clear = clear_amax(0, layout_.input_words, false)};
    F8_TRY(add_casts(casts, kernels_.cache_copies(), kind));
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
  std::map<std::pair<CopySet, bool>, std::vector<Pass>> passes_;
};

}  // namespace

Result<LinearLaunches> plan_launches(const std::shared_ptr<Context>& context,
                                     const LinearDesc& desc, const LinearKernels& kernels,
                                     const LinearGemms& gemms, const LinearLayout& layout) {
  return LaunchPlanner(*context, desc, kernels, gemms, layout).plan();
}

CastOperand cache_operand(const LinearDesc& desc, const LinearLayout& layout,
                          const FusedCast& cast) {
  return cast_operand(cast, cache_buffers(desc, layout), Slot::kAmax);
}

}  // namespace f8::runtime
