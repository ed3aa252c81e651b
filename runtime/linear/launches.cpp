// Patching a call's arguments into its planned launches. Nothing here allocates, locks or formats.
#include "runtime/linear/launches.hpp"

#include "runtime/device/memory.hpp"
#include "runtime/quantize/bias_grad.hpp"

namespace f8::runtime {
namespace {

// A launch's operands with the call's pointers; nothing is written but these.
class Operands {
 public:
  Operands(const std::vector<CastOperand>& from, const CallArguments& call) : count_(from.size()) {
    for (size_t i = 0; i < count_; ++i) std::construct_at(&list_[i], from[i].at(call));
  }
  operator std::span<const QuantizeOperand>() const { return {list_, count_}; }  // NOLINT

 private:
  union {
    QuantizeOperand list_[kernels::kMaxTensors];
  };
  size_t count_;
};

}  // namespace

QuantizeOperand CastOperand::at(const CallArguments& call) const {
  return {.x = call.at<void>(x),
          .rows = rows == 0 ? call.m : rows,
          .cols = cols,
          .ld = call.stride(x),
          .partials = call.at<uint32_t>(partials),
          .tile_amax = call.at<uint16_t>(tile_amax),
          .row_amax = call.at<uint32_t>(row_amax),
          .col_amax = call.at<uint32_t>(col_amax),
          .q = call.at<uint8_t>(q),
          .qt = call.at<uint8_t>(qt),
          .scale = call.at<float>(scale),
          .inv_row = call.at<float>(inv_row),
          .inv_col = call.at<float>(inv_col),
          .delayed = call.at<float>(delayed),
          .recorded_amax = call.at<uint32_t>(recorded_amax),
          .counters = call.at<kernels::CastCounters>(counters)};
}

// Operands in fp8 lie in buffers, which have no stride of the call's.
GemmCall GemmOperands::at(const CallArguments& call) const {
  return {.a = call.at<void>(a),
          .b = call.at<void>(b),
          .d = call.at<void>(d),
          .inv_scale_a = call.at<float>(inv_scale_a),
          .inv_scale_b = call.at<float>(inv_scale_b),
          .m = call.m,
          .bias = call.at<void>(Slot::kBias),
          .ld_a = call.stride(a),
          .ld_b = call.stride(b),
          .ld_d = call.stride(d)};
}

Status SetWords::run(const LaunchTarget& to) const {
  return set_words(to.context.driver, to.call.at<uint32_t>(words), value,
                   static_cast<size_t>(count + (and_m ? to.call.m : 0)), to.stream);
}

Status ReduceAmax::run(const LaunchTarget& to) const {
  return to.call.reduce(to.call.at<uint32_t>(amax), count, to.call.ranks, to.stream);
}

Status FirstScales::run(const LaunchTarget& to) const {
  auto* words = to.call.at<uint32_t>(amax);
  const auto args = first_scale_args(words, words + count, count, to.call.scales, hold);
  return launch_scale_update(to.context, *kernel, args, to.stream);
}

Status CastLaunch::run(const LaunchTarget& to) const {
  const auto& [context, call, stream] = to;
  const Driver& driver = context.driver;
  const bool programmatic = context.options.programmatic_launch;
  const int sm_count = context.info.sm_count;
  const Operands all(operands, call);
  const auto* noop_flag = call.at<uint32_t>(Slot::kNoopFlag);
  if (const auto* amax = std::get_if<codegen::AmaxSpec>(&kernel->spec)) {
    auto args = amax_args(*amax, sm_count, all);
    args.noop_flag = noop_flag;
    return launch_amax(driver, *kernel, args, programmatic, stream);
  }
  const auto& spec = std::get<codegen::CastSpec>(kernel->spec);
  auto* words = call.at<uint8_t>(sync + (overlapped ? second_sync(sm_count) : 0));
  auto args = quantize_args(spec, sm_count, all, words);
  args.cast.noop_flag = noop_flag;
  args.cast.overlap = overlapped ? 1 : 0;
  args.cast.sums = call.at<float>(sums);
  const int64_t beside = neighbour.at(call.m);
  return spec.one_launch ? launch_quantize(driver, *kernel, args, programmatic, stream, beside)
                         : launch_cast(driver, *kernel, args.cast, programmatic, stream, beside);
}

Status ColumnSums::run(const LaunchTarget& to) const {
  const auto args = column_sums_args(to.call.at<void>(Slot::kDy), to.call.stride(Slot::kDy),
                                     to.call.m, cols, to.call.at<float>(sums));
  return launch_column_sums(to.context.driver, *kernel, args,
                            to.context.options.programmatic_launch, to.stream);
}

Status BiasGrad::run(const LaunchTarget& to) const {
  const auto& [context, call, stream] = to;
  auto* db = call.at<void>(Slot::kDb);
  if (call.m == 0) {
    if (call.accumulate_bias) return {};
    const auto& spec = std::get<codegen::BiasGradSpec>(kernel->spec);
    const size_t bytes = static_cast<size_t>(cols) * size_bytes(spec.out);
    return zero(context.driver, context.primary, db, 1, bytes, bytes, stream);
  }
  const auto args = bias_grad_args(call.at<float>(sums), call.m, cols, db, call.accumulate_bias);
  return launch_bias_grad(context.driver, *kernel, args, context.options.programmatic_launch,
                          stream);
}

Status GemmLaunch::run(const LaunchTarget& to) const {
  return plan->run(operands.at(to.call), to.call.at<void>(workspace), to.stream);
}

Status GroupedGemmLaunch::run(const LaunchTarget& to) const {
  return plan->run(first.at(to.call), second.at(to.call), to.stream);
}

const LaunchRange& range_at(const LaunchList& list, int64_t m) {
  auto range = list.begin();
  while (range->up_to_m < m) ++range;
  return *range;
}

Status run(const LaunchList& list, const Context::State& context, const CallArguments& call,
           Stream stream) {
  const LaunchTarget target{context, call, stream};
  for (const Launch& launch : range_at(list, call.m).launches) F8_TRY(run(launch, target));
  return {};
}

}  // namespace f8::runtime
