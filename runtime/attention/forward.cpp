#include "runtime/attention/forward.hpp"

#include <algorithm>
#include <limits>
#include <numbers>

#include "codegen/kernels/attention/attention_args.cuh"
#include "recipes/fp8_layout.hpp"
#include "recipes/problem.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"
#include "runtime/device/tensor_map.hpp"

namespace f8::runtime {
Result<AttentionForward> AttentionForward::create(const std::shared_ptr<Context>& context,
                                                  const AttentionDesc& desc) {
  using codegen::AttentionMask;
  const AttentionMask mask = desc.window > 0 ? AttentionMask::kWindow
                             : desc.causal   ? AttentionMask::kCausal
                                             : AttentionMask::kFull;
  const Kernel* kernel = F8_TRY(context->kernel(codegen::AttentionForwardSpec{.mask = mask}));
  return AttentionForward(context, desc, *kernel);
}

Status AttentionForward::run(const AttentionCall& call, Stream stream) const {
  if (call.queries == 0 || call.batch == 0) return {};
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const int64_t blocks_q = ceil_div(call.queries, kernels::kAttentionTile);
  const int64_t blocks_k = ceil_div(call.keys, kernels::kAttentionTile);
  AttentionMaps maps;
  F8_TRY(encode_attention_maps(state.driver, call.batch * desc_.heads_q,
                               blocks_q * kernels::kAttentionTile, call.batch * desc_.heads_kv,
                               blocks_k * kernels::kAttentionTile, desc_.head_dim, call.q, call.k,
                               call.v_t, maps));
  // A kernel without a window reads its AttentionArgs alone.
  kernels::AttentionWindowArgs args{
      {.inv_scale_q = call.inv_scale_q,
       .inv_scale_k = call.inv_scale_k,
       .inv_scale_v = call.inv_scale_v,
       .o = static_cast<kernels::u16*>(call.o),
       .lse = call.lse,
       .queries = static_cast<int32_t>(call.queries),
       .keys = static_cast<int32_t>(call.keys),
       .heads_q = static_cast<int32_t>(desc_.heads_q),
       .heads_kv = static_cast<int32_t>(desc_.heads_kv),
       .batch = static_cast<int32_t>(call.batch),
       .scale_log2 = desc_.scale * std::numbers::log2e_v<float>},
      static_cast<int32_t>(std::min<int64_t>(desc_.window, std::numeric_limits<int32_t>::max())),
      0};
  const int64_t works = blocks_q * call.batch * desc_.heads_q;
  const int64_t blocks = std::min<int64_t>(works, state.info.sm_count);
  void* parameters[] = {&maps, &args};
  return launch(state.driver, *kernel_, blocks, parameters, state.options.programmatic_launch,
                stream);
}

}  // namespace f8::runtime
