#include "runtime/linear/tensors/computed_casts.hpp"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "runtime/device/context_state.hpp"
#include "runtime/linear/plan/plan_casts.hpp"
#include "runtime/quantize/bias_grad.hpp"

namespace f8::runtime {
namespace {

// The arguments of a launch each of whose blocks has a part of every operand: make() gives those of a
// launch of one operand.
template <class Make>
auto args_of(std::span<const QuantizeOperand> operands, Make&& make) {
  auto args = make(operands.first(1));
  for (size_t i = 1; i < operands.size(); ++i) {
    const auto of_one = make(operands.subspan(i, 1));
    args.tensors[i] = of_one.tensors[0];
    if constexpr (requires { args.counters; }) args.counters[i] = of_one.counters[0];
  }
  args.count = static_cast<int32_t>(operands.size());
  return args;
}

bool raises_words(const codegen::AmaxSpec& amax) {
  return amax.row || amax.col;
}

// Tells whether the launch of the maxima leaves what the cast reads.
bool is_left(const ComputedPass& pass, codegen::Computed source) {
  return pass.amax && codegen::writes_results(source, pass.amax->of);
}

}  // namespace

std::vector<ComputedPass> computed_passes(const LinearKernels& kernels, CopySet copies,
                                          const ComputedSource& source, bool first_step) {
  std::vector<ComputedPass> all;
  for (const KernelPass& pass : kernels.passes(copies, first_step)) {
    for (const FusedCast& fused : pass.casts) {
      codegen::CastSpec cast = fused.cast;
      cast.sums = source.sums && all.empty();
      ComputedPass& made = all.emplace_back();
      if (pass.amax) {
        made.amax = {*pass.amax, source.source, source.activation};
        // As in a list of casts with given maxima, the tensor's is a single word.
        if (source.raises_tensors() && pass.amax->tensor && !pass.amax->col) {
          made.amax->of.row = true;
        }
      }
      made.cast = is_left(made, source.source)
                      ? codegen::KernelSpec(cast)
                      : codegen::ComputedCastSpec{cast, source.source, source.activation};
      made.fused = fused;
    }
  }
  return all;
}

// The words that are raised come first, so that one call clears them: those of rows, of which a call may
// have less than the most, are the last.
void ComputedCasts::lay_out(std::span<const ComputedPass> passes, size_t of_step, int64_t rows,
                            size_t reserved, int sm_count, std::span<TensorBuffers> tensors) {
  const int64_t cols = tensors.front().cols;
  size_t tile_bytes = 0;
  int64_t partials = 0;
  bool raises = false;
  for (const auto& [amax, cast, fused] : passes) {
    if (!amax || source_.given_maxima) continue;
    tile_bytes = std::max(tile_bytes, tile_amax_bytes(amax->of, rows, cols));
    raises = raises || raises_words(amax->of);
    if (amax->of.tensor) partials = amax_partials(rows, cols, sm_count);
  }
  Arena arena;
  const auto take = [&](size_t bytes) { return Ref(Slot::kWorkspace, arena.take(bytes)); };
  (void)take(reserved);
  AmaxWords words({Slot::kWorkspace, arena.size()});
  if (!source_.given_maxima) {
    const Ref first = words.take(0);
    for (TensorBuffers& at : tensors) {
      if (!source_.keeps_columns) at.col_amax = words.take(cols);
      at.amax = words.take(AmaxWords::kTensor);
    }
    for (TensorBuffers& at : tensors) at.row_amax = words.take(rows);
    clear_ = clear_amax(first, tensors.back().row_amax, 0);
    (void)take(raises ? words.bytes() : 0);
    for (TensorBuffers& at : tensors) {
      at.tile_amax = take(tile_bytes);
      at.partials = source_.raises_tensors()
                        ? at.amax
                        : take(sizeof(uint32_t) * static_cast<size_t>(partials));
    }
  }
  if (source_.sums) tile_sums_ = take(tensors.size() * column_sums_bytes(rows, cols));
  const size_t without_results = arena.size();
  const bool leaves = std::ranges::any_of(
      passes, [&](const ComputedPass& pass) { return is_left(pass, source_.source); });
  if (leaves) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      results_[i] = take(static_cast<size_t>(rows) * static_cast<size_t>(cols) *
                         size_bytes(passes.front().fused.cast.in));
    }
  }
  workspace_bytes_ = raises || partials > 0 || source_.sums || leaves ? arena.size() : 0;
  const bool later_finds = std::ranges::any_of(
      passes.first(of_step), [](const ComputedPass& pass) { return pass.amax.has_value(); });
  later_bytes_ = later_finds ? workspace_bytes_ : source_.sums ? without_results : 0;
}

Result<ComputedCasts> ComputedCasts::plan(Context& context, const LinearKernels& kernels,
                                          CopySet copies, const TensorBuffers& at, int64_t rows,
                                          size_t reserved, const ComputedSource& source) {
  ComputedCasts all;
  all.source_ = source;
  auto passes = computed_passes(kernels, copies, source, false);
  const size_t of_step = passes.size();
  if (!kernels.slots.empty()) {
    std::ranges::move(computed_passes(kernels, copies, source, true), std::back_inserter(passes));
  }
  std::array tensors = {at, at};
  const std::span used = std::span(tensors).first(tensors_of(source.source));
  all.lay_out(passes, of_step, rows, reserved, context.device().sm_count, used);
  std::vector<codegen::KernelSpec> specs;
  for (const ComputedPass& pass : passes) {
    if (pass.amax) specs.emplace_back(*pass.amax);
    specs.push_back(pass.cast);
  }
  const codegen::BiasGradSpec add_sums{Dtype::kF32};
  if (source.sums) specs.emplace_back(add_sums);
  F8_TRY(context.compile(specs));
  if (source.sums) all.add_sums_ = F8_TRY(context.kernel(add_sums));
  for (size_t i = 0; i < passes.size(); ++i) {
    const auto& [amax, cast, fused] = passes[i];
    Pass made{.amax = amax ? F8_TRY(context.kernel(*amax)) : nullptr,
              .cast = F8_TRY(context.kernel(cast)),
              .operands = {}};
    for (size_t t = 0; t < used.size(); ++t) {
      made.operands[t] = cast_operand(fused, used[t], Slot::kAmax);
      made.operands[t].tile_amax = source.given_maxima ? Ref{} : used[t].tile_amax;
    }
    (i < of_step ? all.casts_ : all.first_).push_back(made);
  }
  return all;
}

// Launches a kernel by what the kernels of a tensor take, and what the source takes beside it.
template <class Computed, class Args>
Status ComputedCasts::launch(const Context::State& context, const Kernel& kernel, const Args& args,
                             const ComputedCall& call, Stream stream) const {
  const int32_t merged = is_merged(source_.source) ? 2 : 1;  // a block has as many tiles
  const auto& t = args.tensors[0];
  const int64_t ld = call.ld_factor == 0 ? t.cols / merged : call.ld_factor;
  Computed computed = {args, call.factor, ld, call.rstd, call.mean, call.bias, {}};
  computed.of.tensors[0].blocks /= merged;
  if constexpr (std::is_same_v<Args, kernels::AmaxArgs>) {
    const auto& spec = std::get<codegen::ComputedAmaxSpec>(kernel.spec).of;
    if (codegen::writes_results(source_.source, spec)) {
      for (int32_t i = 0; i < args.count; ++i) {
        computed.results[i] = call.first.at<void>(results_[static_cast<size_t>(i)]);
      }
    }
  }
  return launch_with(computed, context.driver, kernel, t.blocks / merged,
                     context.options.programmatic_launch, stream);
}

int32_t ComputedCasts::partials_of(const Context::State& context, int32_t most) const {
  return std::min(most, codegen::tensor_blocks_per_sm(source_.source) * context.info.sm_count);
}

Status ComputedCasts::find_maxima(const Context::State& context, const Pass& pass,
                                  const ComputedCall& call,
                                  std::span<const QuantizeOperand> operands, Stream stream) const {
  const auto& spec = std::get<codegen::ComputedAmaxSpec>(pass.amax->spec).of;
  auto args = args_of(operands, [&](std::span<const QuantizeOperand> one) {
    return amax_args(spec, context.info.sm_count, one);
  });
  if (!spec.row && !spec.col) {
    for (kernels::AmaxTensor& t : args.tensors) t.blocks = partials_of(context, t.blocks);
  }
  return launch<kernels::ComputedAmaxArgs>(context, *pass.amax, args, call, stream);
}

Status ComputedCasts::cast(const Context::State& context, const Pass& pass,
                           const ComputedCall& call, std::span<const QuantizeOperand> operands,
                           Stream stream) const {
  const auto* const computed = std::get_if<codegen::ComputedCastSpec>(&pass.cast->spec);
  const codegen::CastSpec& spec =
      computed != nullptr ? computed->of : std::get<codegen::CastSpec>(pass.cast->spec);
  auto args = args_of(operands, [&](std::span<const QuantizeOperand> one) {
    return cast_args(spec, context.info.sm_count, one);
  });
  if (spec.sums) args.sums = call.first.at<float>(tile_sums_);
  if (source_.raises_tensors()) {
    for (kernels::CastTensor& t : args.tensors) t.partial_count = std::min(t.partial_count, 1);
  }
  if (computed != nullptr) {
    return launch<kernels::ComputedCastArgs>(context, *pass.cast, args, call, stream);
  }
  // The cast reads what the launch of the maxima left, each tensor by blocks of its own.
  int32_t blocks = 0;
  for (int32_t i = 0; i < args.count; ++i) {
    kernels::CastTensor& t = args.tensors[i];
    t.x = call.first.at<void>(results_[static_cast<size_t>(i)]);
    t.ld = t.cols;
    t.partial_count = partials_of(context, t.partial_count);
    t.first_block = std::exchange(blocks, blocks + t.blocks);
  }
  return launch_cast(context.driver, *pass.cast, args, context.options.programmatic_launch, stream);
}

std::array<QuantizeOperand, 2> ComputedCasts::operands_of(const Pass& pass,
                                                          const ComputedCall& call) {
  return {pass.operands[0].at(call.first), pass.operands[1].at(call.second)};
}

Status ComputedCasts::find(const Context::State& context, const ComputedCall& call,
                           Stream stream) const {
  for (const Pass& pass : casts_) {
    if (pass.amax == nullptr) continue;
    const std::array all = operands_of(pass, call);
    F8_TRY(
        find_maxima(context, pass, call, std::span(all).first(tensors_of(source_.source)), stream));
  }
  return {};
}

Status ComputedCasts::run(const Context::State& context, const ComputedCall& call,
                          Stream stream) const {
  bool cleared = false;
  for (const Pass& pass : call.first_step ? first_ : casts_) {
    std::array all = operands_of(pass, call);
    const std::span operands = std::span(all).first(tensors_of(source_.source));
    if (pass.amax != nullptr && !source_.given_maxima) {
      const auto& spec = std::get<codegen::ComputedAmaxSpec>(pass.amax->spec).of;
      if (source_.keeps_columns || !fits_tile_amax(spec, operands[0].rows, operands[0].cols)) {
        for (QuantizeOperand& operand : operands) operand.tile_amax = nullptr;
        if (raises_words(spec) && !std::exchange(cleared, true)) {
          F8_TRY(clear_({.context = context, .call = call.first, .stream = stream}));
          if (source_.keeps_columns) {
            F8_TRY(set_words(context.driver, operands[0].col_amax, 0,
                             static_cast<size_t>(operands[0].cols), stream));
          }
        }
      }
      F8_TRY(find_maxima(context, pass, call, operands, stream));
    }
    F8_TRY(cast(context, pass, call, operands, stream));
  }
  if (add_sums_ == nullptr) return {};
  const int64_t rows = call.first.m, cols = casts_.front().operands[0].cols;
  const float* tile_sums = call.first.at<float>(tile_sums_);
  for (size_t i = 0; i < tensors_of(source_.source); ++i) {
    F8_TRY(launch_bias_grad(
        context.driver, *add_sums_,
        bias_grad_args(tile_sums, rows, cols, call.sums + static_cast<int64_t>(i) * cols, false),
        context.options.programmatic_launch, stream));
    tile_sums += column_sums_bytes(rows, cols) / sizeof(float);
  }
  return {};
}

}  // namespace f8::runtime
