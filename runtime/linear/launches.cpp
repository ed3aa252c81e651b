// Patching a call's arguments into its planned launches. Nothing here allocates, locks or formats.
#include "runtime/linear/launches.hpp"

#include "runtime/device/memory.hpp"
#include "runtime/quantize/bias_grad.hpp"

namespace f8::runtime {
namespace {

// A launch's operands with the call's pointers.
struct Operands {
  std::array<QuantizeOperand, kernels::kMaxTensors> list;
  size_t count;

  Operands(const Launch& launch, const CallArguments& call) : count(launch.operands.size()) {
    for (size_t i = 0; i < count; ++i) list[i] = launch.operands[i].at(call);
  }
  [[nodiscard]] std::span<const QuantizeOperand> all() const { return {list.data(), count}; }
};

// One launch with everything that it needs beside its description.
struct Runner {
  const Launch& launch;
  const Context::State& context;
  const CallArguments& call;
  Stream stream;
  bool overlapped;
  int64_t overlapped_blocks;
  const Driver& driver = context.driver;
  bool programmatic = context.options.programmatic_launch;
  int sm_count = context.info.sm_count;

  [[nodiscard]] Status set_words() const {
    const auto count = static_cast<size_t>(launch.count + (launch.count_m ? call.m : 0));
    return runtime::set_words(driver, call.at<uint32_t>(launch.out), launch.value, count, stream);
  }

  [[nodiscard]] Status zero_rows() const {
    const int64_t stride = call.stride(launch.out);
    const size_t pitch =
        stride == 0 ? launch.row_bytes : static_cast<size_t>(stride) * launch.element_bytes;
    return zero(driver, context.primary, call.at<void>(launch.out), launch.count, launch.row_bytes,
                pitch, stream);
  }

  [[nodiscard]] Status amax() const {
    const Operands operands(launch, call);
    auto args =
        amax_args(std::get<codegen::AmaxSpec>(launch.kernel->spec), sm_count, operands.all());
    args.noop_flag = call.at<uint32_t>(Slot::kNoopFlag);
    return launch_amax(driver, *launch.kernel, args, programmatic, stream);
  }

  [[nodiscard]] Status cast() const {
    const Operands operands(launch, call);
    auto args =
        cast_args(std::get<codegen::CastSpec>(launch.kernel->spec), sm_count, operands.all());
    args.noop_flag = call.at<uint32_t>(Slot::kNoopFlag);
    args.overlap = overlapped ? 1 : 0;
    args.sums = call.at<float>(launch.sums);
    return launch_cast(driver, *launch.kernel, args, programmatic, stream, overlapped_blocks);
  }

  [[nodiscard]] Status quantize() const {
    const Operands operands(launch, call);
    const size_t sync = overlapped ? second_sync(sm_count) : 0;
    auto args = quantize_args(std::get<codegen::CastSpec>(launch.kernel->spec), sm_count,
                              operands.all(), call.at<uint8_t>(launch.workspace + sync));
    args.cast.overlap = overlapped ? 1 : 0;
    return launch_quantize(driver, *launch.kernel, args, programmatic, stream, overlapped_blocks);
  }

  [[nodiscard]] Status first_scales() const {
    auto* amax = call.at<uint32_t>(launch.out);
    const auto count = static_cast<size_t>(launch.count);
    const auto args = first_scale_args(amax, amax + count, count, call.scales, launch.hold);
    return launch_scale_update(context, *launch.kernel, args, stream);
  }

  [[nodiscard]] Status column_sums() const {
    const QuantizeOperand x = launch.operands[0].at(call);
    const auto args = column_sums_args(x.x, x.ld, x.rows, x.cols, call.at<float>(launch.sums));
    return launch_column_sums(driver, *launch.kernel, args, programmatic, stream);
  }

  [[nodiscard]] Status bias_grad() const {
    const auto args = bias_grad_args(call.at<float>(launch.sums), call.m, launch.count,
                                     call.at<void>(launch.out), call.accumulate_bias);
    return launch_bias_grad(driver, *launch.kernel, args, programmatic, stream);
  }

  // Operands in fp8 lie in buffers, which have no stride of the call's.
  [[nodiscard]] GemmCall gemm_call(const GemmOperands& at) const {
    return {.a = call.at<void>(at.a),
            .b = call.at<void>(at.b),
            .d = call.at<void>(at.d),
            .inv_scale_a = call.at<float>(at.inv_scale_a),
            .inv_scale_b = call.at<float>(at.inv_scale_b),
            .m = call.m,
            .bias = call.at<void>(at.bias),
            .ld_a = call.stride(at.a),
            .ld_b = call.stride(at.b),
            .ld_d = call.stride(at.d)};
  }

  [[nodiscard]] Status run() const {
    switch (launch.kind) {
      case Launch::Kind::kSetWords:
        return set_words();
      case Launch::Kind::kZeroRows:
        return zero_rows();
      case Launch::Kind::kAmax:
        return amax();
      case Launch::Kind::kCast:
        return cast();
      case Launch::Kind::kQuantize:
        return quantize();
      case Launch::Kind::kReduceAmax:
        return call.reduce(call.at<uint32_t>(launch.out), static_cast<size_t>(launch.count),
                           call.ranks, stream);
      case Launch::Kind::kFirstScales:
        return first_scales();
      case Launch::Kind::kColumnSums:
        return column_sums();
      case Launch::Kind::kBiasGrad:
        return bias_grad();
      case Launch::Kind::kGemm:
        return launch.gemm->run(gemm_call(launch.gemms[0]), call.at<void>(launch.workspace),
                                stream);
      case Launch::Kind::kGroupedGemm:
        return launch.grouped->run(gemm_call(launch.gemms[0]), gemm_call(launch.gemms[1]), stream);
    }
    return {};
  }
};

}  // namespace

QuantizeOperand CastOperand::at(const CallArguments& call) const {
  return {.x = call.at<void>(x),
          .rows = rows_at(call.m),
          .cols = cols,
          .ld = call.stride(x),
          .partials = call.at<uint32_t>(partials),
          .tile_amax = call.m <= tile_amax_up_to_m ? call.at<uint16_t>(tile_amax) : nullptr,
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

int64_t tiles_of(const std::vector<CastOperand>& operands, int64_t m) {
  int64_t tiles = 0;
  for (const CastOperand& operand : operands) tiles += cast_tiles(operand.rows_at(m), operand.cols);
  return tiles;
}

double Launch::bytes_moved(int64_t m) const {
  double elements = 0;
  for (const CastOperand& operand : operands) {
    elements += static_cast<double>(operand.rows_at(m)) * static_cast<double>(operand.cols);
  }
  return elements * bytes_per_element;
}

Status Launch::run(const Context::State& context, const CallArguments& call, Stream stream,
                   bool overlapped, int64_t overlapped_blocks) const {
  return Runner{*this, context, call, stream, overlapped, overlapped_blocks}.run();
}

Status run(const LaunchList& list, const Context::State& context, const CallArguments& call,
           Stream stream) {
  const auto next = [&](auto launch) {
    while (launch != list.end() && !launch->applies(call.m)) ++launch;
    return launch;
  };
  bool overlapped = false;  // with `before`
  auto before = list.end();
  for (auto launch = next(list.begin()); launch != list.end();) {
    const auto after = next(launch + 1);
    const bool overlaps_next =
        !overlapped && after != list.end() && call.m <= after->overlaps_up_to_m;
    const int64_t blocks = overlapped      ? tiles_of(before->operands, call.m)
                           : overlaps_next ? tiles_of(after->operands, call.m)
                                           : 0;
    F8_TRY(launch->run(context, call, stream, overlapped, blocks));
    overlapped = overlaps_next;
    before = launch;
    launch = after;
  }
  return {};
}

}  // namespace f8::runtime
