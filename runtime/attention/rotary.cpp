#include "runtime/attention/rotary.hpp"

#include "codegen/kernels/attention/rotary_args.cuh"
#include "runtime/attention/operands.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/element_type.hpp"
#include "runtime/device/launch.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kRotary = "float8_rotary";
constexpr const char* kRotaryArgs = "float8_rotary_args";
constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
constexpr int64_t kStep = 8;  // elements, of a stride

Status check_rotary_sizes(const float8_rotary_args& args) {
  if (args.head_dim < 16 || args.head_dim > kMaxHeadDim || args.head_dim % 16 != 0) {
    return fail(ErrorCode::kInvalidArgument, "{}.head_dim is {}; it is a multiple of 16, up to {}",
                kRotaryArgs, args.head_dim, kMaxHeadDim);
  }
  if (args.heads_q < 1 || args.heads_k < 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: heads_q is {} and heads_k is {}; there is a head of q, and of k there may be "
                "none",
                kRotaryArgs, args.heads_q, args.heads_k);
  }
  if (args.batch < 0 || args.tokens < 0 ||
      (args.batch > 0 && args.tokens > kMaxBlocks / args.batch)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: batch is {} and tokens is {}; they are 0 or more, and less than 2^31 together",
                kRotaryArgs, args.batch, args.tokens);
  }
  for (const auto& [field, stride] : {std::pair{"cos_batch_stride", args.cos_batch_stride},
                                      {"cos_token_stride", args.cos_token_stride}}) {
    if (stride >= 0 && stride % kStep == 0) continue;
    return fail(ErrorCode::kInvalidArgument,
                "{}.{} is {}; it is a multiple of {} elements, not negative", kRotaryArgs, field,
                stride, kStep);
  }
  return {};
}

Status check_rotary(Context& context, const float8_rotary_args& args, Stream stream) {
  CallMemory memory(kRotaryArgs);
  const auto add = [&](const char* name, const float8_heads& heads, int64_t count, int32_t dtype,
                       Access access) {
    return add_heads(kRotaryArgs, name, heads,
                     HeadSizes{.batch = args.batch,
                               .heads = count,
                               .tokens = args.tokens,
                               .head_dim = args.head_dim,
                               .type = element_type(dtype)},
                     access, memory);
  };
  F8_TRY(add("q", args.q, args.heads_q, args.dtype, Access::kRead));
  F8_TRY(add("q_out", args.q_out, args.heads_q, args.out_dtype, Access::kWrite));
  if (args.heads_k > 0) {
    F8_TRY(add("k", args.k, args.heads_k, args.dtype, Access::kRead));
    F8_TRY(add("k_out", args.k_out, args.heads_k, args.out_dtype, Access::kWrite));
  }
  F8_TRY(need(kRotaryArgs, "cos", args.cos));
  F8_TRY(need(kRotaryArgs, "sin", args.sin));
  const int64_t last = (args.batch - 1) * args.cos_batch_stride +
                       (args.tokens - 1) * args.cos_token_stride + args.head_dim;
  const size_t bytes = static_cast<size_t>(last) * size_bytes(element_type(args.cos_dtype));
  memory.add("cos", args.cos, bytes, Access::kRead);
  memory.add("sin", args.sin, bytes, Access::kRead);
  return memory.check(kRotary, context, stream);
}

Result<const Kernel*> rotary_kernel(Context& context, const float8_rotary_args& args) {
  const bool inverse = args.inverse != 0;
  const int32_t index =
      ((args.dtype * 3 + args.cos_dtype) * 3 + args.out_dtype) * 2 + (inverse ? 1 : 0);
  return kept_kernel(context, context.state().rotary_kernels[static_cast<size_t>(index)],
                     codegen::RotarySpec{.in = element_type(args.dtype),
                                         .cos = element_type(args.cos_dtype),
                                         .out = element_type(args.out_dtype),
                                         .inverse = inverse});
}

kernels::RotaryHeads heads_of(const float8_heads& in, const float8_heads& out) {
  return {.in = in.data,
          .out = out.data,
          .in_strides = {in.batch_stride, in.head_stride, in.token_stride},
          .out_strides = {out.batch_stride, out.head_stride, out.token_stride}};
}

}  // namespace

Status rotary(Context& context, const float8_rotary_args& args, Stream stream) {
  F8_TRY(check_rotary_sizes(args));
  if (args.batch == 0 || args.tokens == 0) return {};
  F8_TRY(check_rotary(context, args, stream));
  const Kernel* kernel = F8_TRY(rotary_kernel(context, args));
  const Context::State& state = context.state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const kernels::RotaryArgs launch{.q = heads_of(args.q, args.q_out),
                                   .k = heads_of(args.k, args.k_out),
                                   .cos = args.cos,
                                   .sin = args.sin,
                                   .cos_batch = args.cos_batch_stride,
                                   .cos_token = args.cos_token_stride,
                                   .tokens = static_cast<int32_t>(args.tokens),
                                   .heads_q = args.heads_q,
                                   .heads_k = args.heads_k,
                                   .head_dim = args.head_dim};
  return launch_with(launch, state.driver, *kernel, args.batch * args.tokens,
                     state.options.programmatic_launch, stream);
}

}  // namespace f8::runtime
