#include "runtime/attention/forward.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "codegen/kernels/attention/attention_args.cuh"
#include "recipes/problem.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"
#include "runtime/device/tensor_map.hpp"

namespace f8::runtime {

Result<AttentionForward> AttentionForward::create(const std::shared_ptr<Context>& context,
                                                  const AttentionDesc& desc) {
  if (desc.head_dim != 128) {
    return fail(ErrorCode::kUnsupported, "heads of {}: attention in fp8 has heads of 128",
                desc.head_dim);
  }
  if (desc.heads_kv < 1 || desc.heads_q < 1 || desc.heads_q % desc.heads_kv != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{} heads of queries and {} of keys: the first are a multiple of the second",
                desc.heads_q, desc.heads_kv);
  }
  if (!std::isfinite(desc.scale) || desc.scale < 0) {
    return fail(ErrorCode::kInvalidArgument, "scale is {}; it is positive, or 0 for the head's own",
                desc.scale);
  }
  const Kernel* kernel =
      F8_TRY(context->kernel(codegen::AttentionForwardSpec{.causal = desc.causal}));
  AttentionDesc own = desc;
  if (own.scale == 0) own.scale = 1.0F / std::sqrt(static_cast<float>(own.head_dim));
  return AttentionForward(context, own, *kernel);
}

Status AttentionForward::run(const AttentionCall& call, Stream stream) const {
  if (call.tokens == 0 || call.batch == 0) return {};
  if (call.tokens % kernels::kAttentionTile != 0) {
    return fail(ErrorCode::kInvalidArgument, "{} tokens: sequences are padded to a multiple of {}",
                call.tokens, kernels::kAttentionTile);
  }
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  AttentionMaps maps;
  F8_TRY(encode_attention_maps(state.driver, call.tokens, call.batch * desc_.heads_q,
                               call.batch * desc_.heads_kv, desc_.head_dim, call.q, call.k,
                               call.v_t, maps));
  kernels::AttentionArgs args{.inv_scale_q = call.inv_scale_q,
                              .inv_scale_k = call.inv_scale_k,
                              .inv_scale_v = call.inv_scale_v,
                              .o = static_cast<kernels::u16*>(call.o),
                              .lse = call.lse,
                              .tokens = static_cast<int32_t>(call.tokens),
                              .heads_q = static_cast<int32_t>(desc_.heads_q),
                              .heads_kv = static_cast<int32_t>(desc_.heads_kv),
                              .batch = static_cast<int32_t>(call.batch),
                              .scale_log2 = desc_.scale * std::numbers::log2e_v<float>,
                              .padding = 0};
  const int64_t works = call.tokens / kernels::kAttentionTile * call.batch * desc_.heads_q;
  const int64_t blocks = std::min<int64_t>(works, state.info.sm_count);
  void* parameters[] = {&maps, &args};
  return launch(state.driver, *kernel_, blocks, parameters, state.options.programmatic_launch,
                stream);
}

}  // namespace f8::runtime
