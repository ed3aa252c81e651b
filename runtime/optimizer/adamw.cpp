#include "runtime/optimizer/adamw.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "codegen/kernels/optimizer/adamw_args.cuh"
#include "recipes/problem.hpp"
#include "runtime/device/calls/call_memory.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/element_type.hpp"
#include "runtime/device/launch.hpp"
#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kAdamwCall = "float8_adamw";
constexpr const char* kAdamwTensor = "float8_adamw_tensor";
constexpr int64_t kAdamwBlocksPerSm = 2;  // those that its registers let be resident
constexpr int64_t kElementsOfThread = 8;
static_assert(sizeof(kernels::FingerprintState) == FLOAT8_FINGERPRINT_BYTES);

// The weights of a launch are of one kind.
struct AdamwKind {
  int32_t dtype = 0;
  int32_t cast_dtype = 0;
  bool row = false;
  bool col = false;
  bool operator==(const AdamwKind&) const = default;

  [[nodiscard]] codegen::AdamwSpec spec() const {
    const bool rounds = dtype != cast_dtype;
    return {{.in = element_type(cast_dtype),
             .tensor = true,
             .row = row,
             .col = col,
             .from_f32 = rounds}};
  }
  // Less than the number of the context's kernels.
  [[nodiscard]] size_t index() const {
    return static_cast<size_t>(((dtype * 3 + cast_dtype) * 2 + (row ? 1 : 0)) * 2 + (col ? 1 : 0));
  }
};

AdamwKind adamw_kind(const AdamwWeight& w) {
  return {w.dtype, w.cast_dtype, w.row_amax != nullptr, w.col_amax != nullptr};
}

Status check_adamw_weight(const AdamwWeight& w) {
  if (w.rows < 0 || w.rows > kMaxDim) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}.rows is {}; it is 0 to {}", kAdamwTensor, w.rows,
                kMaxDim);
  }
  if (w.cols < 16 || w.cols > kMaxDim || w.cols % 16 != 0) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}.cols is {}; it is a multiple of 16, up to {}",
                kAdamwTensor, w.cols, kMaxDim);
  }
  if (w.dtype != w.cast_dtype && w.dtype != FLOAT8_F32) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.cast_dtype is {} and dtype is {}; FLOAT8_F32 alone is rounded to another type",
                kAdamwTensor, w.cast_dtype, w.dtype);
  }
  if (w.rows == 0) return {};
  for (const auto& [field, pointer] : {std::pair<const char*, const void*>{"param", w.param},
                                       {"grad", w.grad},
                                       {"exp_avg", w.exp_avg},
                                       {"exp_avg_sq", w.exp_avg_sq},
                                       {"step", w.step}}) {
    F8_TRY(need(kAdamwTensor, field, pointer));
  }
  return {};
}

CallMemory adamw_memory(const float8_adamw_args& args, const AdamwWeight& w) {
  CallMemory memory(kAdamwTensor);
  const Dtype type = element_type(w.dtype);
  const auto add = [&](const char* name, const void* at, Access access) {
    memory.add_rows(name, at, w.rows, w.cols, 0, type, access);
  };
  const auto add_words = [&](const char* name, const void* at, int64_t count) {
    memory.add(name, at, sizeof(uint32_t) * static_cast<size_t>(count), Access::kWrite,
               alignof(uint32_t));
  };
  add("param", w.param, Access::kWrite);
  add("grad", w.grad, args.grad_scale == nullptr ? Access::kRead : Access::kWrite);
  add("exp_avg", w.exp_avg, Access::kWrite);
  add("exp_avg_sq", w.exp_avg_sq, Access::kWrite);
  add("max_exp_avg_sq", w.max_exp_avg_sq, Access::kWrite);
  memory.add("step", w.step, sizeof(float), Access::kRead, alignof(float));
  add_words("amax", w.amax, 1);
  add_words("row_amax", w.row_amax, w.rows);
  add_words("col_amax", w.col_amax, w.cols);
  memory.add("fingerprint", w.fingerprint, FLOAT8_FINGERPRINT_BYTES, Access::kWrite);
  for (const auto& [name, at] :
       {std::pair<const char*, const void*>{"float8_adamw_args.lr_tensor", args.lr_tensor},
        {"float8_adamw_args.grad_scale", args.grad_scale},
        {"float8_adamw_args.found_inf", args.found_inf}}) {
    memory.add_beside(name, at, sizeof(float), Access::kRead, alignof(float));
  }
  return memory;
}

Status check_adamw_options(const float8_adamw_args& args) {
  for (const auto& [field, value] :
       {std::pair{"lr", args.lr}, {"eps", args.eps}, {"weight_decay", args.weight_decay}}) {
    if (std::isfinite(value) && value >= 0) [[likely]] {
      continue;
    }
    return fail(ErrorCode::kInvalidArgument, "float8_adamw_args.{} is {}; it is 0 or more", field,
                value);
  }
  for (const auto& [field, value] : {std::pair{"beta1", args.beta1}, {"beta2", args.beta2}}) {
    if (value >= 0 && value < 1) [[likely]] {
      continue;
    }
    return fail(ErrorCode::kInvalidArgument,
                "float8_adamw_args.{} is {}; it is 0 or more, and less than 1", field, value);
  }
  return {};
}

Dtype memory_type_of(const QuantizerDesc& desc) {
  return desc.f32_source ? Dtype::kF32 : desc.dtype;
}

// Makes the call the weight's, and checks all but what single_pass() does.
Status check_adamw_cast(const AdamwWeight& w, AdamwCast& cast) {
  if (cast.quantizer == nullptr) return {};
  const QuantizerDesc& desc = cast.quantizer->desc();
  if (desc.cols != w.cols || memory_type_of(desc) != element_type(w.dtype) ||
      desc.dtype != element_type(w.cast_dtype)) {
    return fail(
        ErrorCode::kInvalidArgument,
        "{}.quantizer is of {} columns and other types than the weight of {}; plan it for its "
        "cols, dtype and cast_dtype",
        kAdamwTensor, desc.cols, w.cols);
  }
  if (w.amax != nullptr || w.row_amax != nullptr || w.col_amax != nullptr) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.quantizer is given with words for maxima; its cast needs none: leave them NULL",
                kAdamwTensor);
  }
  cast.call.x = {w.param, 0, nullptr};
  cast.call.rows = w.rows;
  return {};
}

Status check_adamw(Context& context, const float8_adamw_args& args, const AdamwWeights& weights,
                   std::span<AdamwCast> casts, Stream stream) {
  F8_TRY(check_adamw_options(args));
  for (size_t i = 0; i < weights.count; ++i) {
    const AdamwWeight w = weights.at(i);
    Status good = check_adamw_weight(w);
    if (good) good = adamw_memory(args, w).check(kAdamwCall, context, stream);
    if (good && !casts.empty()) good = check_adamw_cast(w, casts[i]);
    if (good && !casts.empty() && casts[i].quantizer != nullptr && w.rows > 0) {
      const auto pass = casts[i].quantizer->single_pass(kAdamwCall, casts[i].call, stream);
      if (!pass) good = std::unexpected(pass.error());
    }
    for (size_t other = 0; good && w.rows > 0 && other < i; ++other) {
      if (weights.given(other)->param != w.param) [[likely]] {
        continue;
      }
      good = fail(ErrorCode::kInvalidArgument,
                  "{}.param is that of tensors[{}]; a step updates each weight once", kAdamwTensor,
                  other);
    }
    if (!good) [[unlikely]] {
      good.error().message =
          f8::format("float8_adamw_args.tensors[{}]: {}", i, good.error().message);
      return good;
    }
  }
  return {};
}

kernels::AdamwOptions adamw_options(const float8_adamw_args& args) {
  return {.lr_tensor = args.lr_tensor,
          .grad_scale = args.grad_scale,
          .found_inf = args.found_inf,
          .lr = static_cast<float>(args.lr),
          .beta1 = static_cast<float>(args.beta1),
          .beta2 = static_cast<float>(args.beta2),
          .eps = static_cast<float>(args.eps),
          .weight_decay = static_cast<float>(args.weight_decay),
          .maximize = args.maximize != 0 ? 1 : 0};
}

kernels::AdamwTensor adamw_tensor(const AdamwWeight& w) {
  return {.param = w.param,
          .grad = w.grad,
          .exp_avg = w.exp_avg,
          .exp_avg_sq = w.exp_avg_sq,
          .max_exp_avg_sq = w.max_exp_avg_sq,
          .step = w.step,
          .amax = w.amax,
          .row_amax = w.row_amax,
          .col_amax = w.col_amax,
          .fingerprint = static_cast<kernels::FingerprintState*>(w.fingerprint),
          .seed = w.seed,
          .rows = static_cast<int32_t>(w.rows),
          .cols = static_cast<int32_t>(w.cols),
          .first_block = 0,
          .blocks = 0};
}

// The launches of one kind of weights, as many weights at once as a launch takes.
class AdamwLaunch {
 public:
  AdamwLaunch(const Context::State& state, const float8_adamw_args& args, const AdamwKind& kind,
              const Kernel& kernel, Stream stream)
      : state_(state), kernel_(kernel), stream_(stream), tiles_(kind.row || kind.col) {
    args_.count = 0;
    args_.padding = 0;
    args_.options = adamw_options(args);
  }
  [[nodiscard]] Status add(const AdamwWeight& w) {
    args_.tensors[args_.count++] = adamw_tensor(w);
    return args_.count == kernels::kMaxAdamwTensors ? finish() : Status{};
  }
  [[nodiscard]] Status finish() {
    if (args_.count == 0) return {};
    const int64_t blocks = set_blocks();
    F8_TRY(launch_with(args_, state_.driver, kernel_, blocks, state_.options.programmatic_launch,
                       stream_));
    args_.count = 0;
    return {};
  }

 private:
  [[nodiscard]] static int64_t elements(const kernels::AdamwTensor& t) {
    return int64_t{t.rows} * t.cols;
  }
  // A block has a tile; or weights share the device by their elements.
  int64_t set_blocks() {
    const std::span weights(args_.tensors, static_cast<size_t>(args_.count));
    int64_t all = 0;
    for (const kernels::AdamwTensor& t : weights) all += elements(t);
    const int64_t resident = kAdamwBlocksPerSm * state_.info.sm_count;
    int64_t first = 0;
    for (kernels::AdamwTensor& t : weights) {
      const auto share =
          static_cast<int64_t>(static_cast<double>(elements(t)) / static_cast<double>(all) *
                               static_cast<double>(resident));
      const int64_t most = ceil_div(elements(t), kElementsOfThread * kernels::kTileThreads);
      const int64_t blocks =
          tiles_ ? ceil_div(t.rows, kernels::kCastTile) * ceil_div(t.cols, kernels::kCastTile)
                 : std::clamp<int64_t>(most, 1, std::max<int64_t>(share, 1));
      t.first_block = static_cast<int32_t>(first);
      t.blocks = static_cast<int32_t>(blocks);
      first += blocks;
    }
    return first;
  }

  const Context::State& state_;
  const Kernel& kernel_;
  Stream stream_;
  bool tiles_;
  kernels::AdamwArgs args_;
};

Result<const Kernel*> adamw_kernel(Context& context, const AdamwKind& kind) {
  return kept_kernel(context, context.state().adamw_kernels[kind.index()], kind.spec());
}

// Updates the weights of which `is_cast` says no.
template <class IsCast>
Status update_weights(Context& context, const float8_adamw_args& args, const AdamwWeights& weights,
                      const IsCast& is_cast, Stream stream) {
  for (size_t i = 0; i < weights.count; ++i) {
    if (is_cast(i)) continue;
    const AdamwKind kind = adamw_kind(weights.at(i));
    const auto is_alike = [&](size_t other) {
      return !is_cast(other) && adamw_kind(weights.at(other)) == kind;
    };
    bool launched = false;
    for (size_t other = 0; other < i && !launched; ++other) launched = is_alike(other);
    if (launched) continue;
    AdamwLaunch launch(context.state(), args, kind, *F8_TRY(adamw_kernel(context, kind)), stream);
    for (size_t other = i; other < weights.count; ++other) {
      const AdamwWeight w = weights.at(other);
      if (w.rows > 0 && is_alike(other)) F8_TRY(launch.add(w));
    }
    F8_TRY(launch.finish());
  }
  return {};
}

// Updates and casts weights that are cast alike and follow each other, up to kMaxTensors in a launch.
Status update_and_cast(Context& context, const float8_adamw_args& args, const AdamwWeights& weights,
                       std::span<const AdamwCast> casts, Stream stream) {
  const Context::State& state = context.state();
  std::array<QuantizeOperand, kernels::kMaxTensors> operands;
  kernels::AdamwCastArgs launch{};
  launch.options = adamw_options(args);
  size_t count = 0;
  codegen::CastSpec cast;
  const auto finish = [&]() -> Status {
    if (count == 0) return {};
    const std::span<const QuantizeOperand> some(operands.data(), count);
    launch.cast = cast_args(cast, state.info.sm_count, some);
    const Kernel* kernel = F8_TRY(context.kernel(codegen::AdamwCastSpec{cast}));
    count = 0;
    return launch_with(launch, state.driver, *kernel, blocks_of(launch.cast),
                       state.options.programmatic_launch, stream);
  };
  for (size_t i = 0; i < casts.size(); ++i) {
    if (casts[i].quantizer == nullptr || weights.at(i).rows == 0) continue;
    const SinglePassCast pass =
        F8_TRY(casts[i].quantizer->single_pass(kAdamwCall, casts[i].call, stream));
    if (count == operands.size() || (count > 0 && !(pass.cast == cast))) F8_TRY(finish());
    cast = pass.cast;
    launch.tensors[count] = adamw_tensor(weights.at(i));
    operands[count++] = pass.operand;
  }
  return finish();
}

}  // namespace

Status adamw(Context& context, const float8_adamw_args& args, const AdamwWeights& weights,
             std::span<AdamwCast> casts, Stream stream) {
  F8_TRY(check_adamw(context, args, weights, casts, stream));
  const auto is_cast = [&](size_t i) { return !casts.empty() && casts[i].quantizer != nullptr; };
  // Every kernel is there before the first launch.
  for (size_t i = 0; i < weights.count; ++i) {
    const AdamwWeight w = weights.at(i);
    if (!is_cast(i)) {
      F8_TRY(adamw_kernel(context, adamw_kind(w)));
    } else if (w.rows > 0) {
      const SinglePassCast pass =
          F8_TRY(casts[i].quantizer->single_pass(kAdamwCall, casts[i].call, stream));
      F8_TRY(context.kernel(codegen::AdamwCastSpec{pass.cast}));
    }
  }
  const ScopedContext current(context.state().driver, context.state().primary);
  F8_TRY(current.status());
  F8_TRY(update_weights(context, args, weights, is_cast, stream));
  return update_and_cast(context, args, weights, casts, stream);
}

}  // namespace f8::runtime
