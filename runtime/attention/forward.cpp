#include "runtime/attention/forward.hpp"

#include <algorithm>
#include <limits>
#include <numbers>

#include "recipes/fp8_layout.hpp"
#include "recipes/problem.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"
#include "runtime/device/tensor_map.hpp"

namespace f8::runtime {
namespace {

kernels::AttentionWindowArgs args_of(const AttentionDesc& desc, const AttentionCall& call) {
  return {{.inv_scale_q = call.inv_scale_q,
           .inv_scale_k = call.inv_scale_k,
           .inv_scale_v = call.inv_scale_v,
           .o = static_cast<kernels::u16*>(call.o),
           .lse = call.lse,
           .queries = static_cast<int32_t>(call.queries),
           .keys = static_cast<int32_t>(call.keys),
           .heads_q = static_cast<int32_t>(desc.heads_q),
           .heads_kv = static_cast<int32_t>(desc.heads_kv),
           .batch = desc.packed ? 1 : static_cast<int32_t>(call.batch),
           .scale_log2 = desc.scale * std::numbers::log2e_v<float>},
          static_cast<int32_t>(std::min<int64_t>(desc.window, std::numeric_limits<int32_t>::max())),
          0};
}

template <class Args>
kernels::AttentionPackedArgs<Args> packed_args(const Args& args, const AttentionCall& call) {
  return {args, call.blocks_q, static_cast<int32_t>(call.batch), 0};
}

}  // namespace

int64_t AttentionDesc::blocks(int64_t batch, int64_t tokens) const {
  if (packed) return tokens / kernels::kAttentionTile + batch;
  return batch * ceil_div(tokens, kernels::kAttentionTile);
}

Result<AttentionForward> AttentionForward::create(const std::shared_ptr<Context>& context,
                                                  const AttentionDesc& desc) {
  using codegen::AttentionMask;
  const AttentionMask mask = desc.window > 0 ? AttentionMask::kWindow
                             : desc.causal   ? AttentionMask::kCausal
                                             : AttentionMask::kFull;
  const auto head_dim = static_cast<int>(desc.head_dim);
  const auto spec = codegen::AttentionForwardSpec::of(head_dim, mask, desc.packed);
  return AttentionForward(context, desc, *F8_TRY(context->kernel(spec)), 64 * spec.warpgroups());
}

Status AttentionForward::run(const AttentionCall& call, Stream stream) const {
  if (call.queries == 0 || call.batch == 0) return {};
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const int64_t batch = desc_.packed ? 1 : call.batch;
  const int64_t blocks_q = desc_.blocks(call.batch, call.queries) / batch;
  const int64_t blocks_k = desc_.blocks(call.batch, call.keys) / batch;
  AttentionMaps maps;
  F8_TRY(encode_attention_maps(state.driver, batch * desc_.heads_q,
                               blocks_q * kernels::kAttentionTile, batch * desc_.heads_kv,
                               blocks_k * kernels::kAttentionTile, desc_.head_dim, queries_of_cta_,
                               call.q, call.k, call.v_t, maps));
  // A kernel without a window reads its AttentionArgs alone.
  kernels::AttentionWindowArgs args = args_of(desc_, call);
  auto packed = packed_args<kernels::AttentionArgs>(args, call);
  auto packed_window = packed_args(args, call);
  void* const own = !desc_.packed      ? &args
                    : desc_.window > 0 ? static_cast<void*>(&packed_window)
                                       : &packed;
  void* parameters[] = {&maps, own};
  const int64_t of_head = desc_.packed ? blocks_q : ceil_div(call.queries, queries_of_cta_);
  const int64_t works = of_head * batch * desc_.heads_q;
  const int64_t blocks = std::min<int64_t>(works, state.info.sm_count);
  return launch(state.driver, *kernel_, blocks, parameters, state.options.programmatic_launch,
                stream);
}

}  // namespace f8::runtime
