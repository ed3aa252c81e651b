#include "runtime/attention/forward.hpp"

#include <algorithm>
#include <numbers>

#include "recipes/fp8_layout.hpp"
#include "recipes/problem.hpp"
#include "runtime/attention/launch.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/tensor_map.hpp"

namespace f8::runtime {
int64_t AttentionDesc::blocks(int64_t batch, int64_t tokens) const {
  if (packed) return tokens / kernels::kAttentionTile + batch;
  return batch * ceil_div(tokens, kernels::kAttentionTile);
}

codegen::AttentionMask AttentionDesc::mask() const {
  using codegen::AttentionMask;
  if (window > 0) return AttentionMask::kWindow;
  return causal ? AttentionMask::kCausal : AttentionMask::kFull;
}

Result<AttentionForward> AttentionForward::create(const std::shared_ptr<Context>& context,
                                                  const AttentionDesc& desc) {
  const auto head_dim = static_cast<int>(desc.head_dim);
  const auto spec = codegen::AttentionForwardSpec::of(head_dim, desc.mask(), desc.packed);
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
  // Rows of q and k, and columns of v^T, are those of whole blocks of all heads.
  const int64_t rows_q = batch * desc_.heads_q * blocks_q * kernels::kAttentionTile;
  const int64_t of_k = batch * desc_.heads_kv, keys = blocks_k * kernels::kAttentionTile;
  const int64_t of_box = std::min<int64_t>(desc_.head_dim, kernels::kAttentionTile);
  CUtensorMap maps[3];
  F8_TRY(encode_bytes_map(state.driver, "q", call.q, rows_q, desc_.head_dim, queries_of_cta_,
                          of_box, maps[0]));
  F8_TRY(encode_bytes_map(state.driver, "k", call.k, of_k * keys, desc_.head_dim,
                          kernels::kAttentionTile, of_box, maps[1]));
  F8_TRY(encode_bytes_map(state.driver, "v^T", call.v_t, of_k * desc_.head_dim, keys, of_box,
                          kernels::kAttentionTile, maps[2]));
  const kernels::AttentionArgs args{.inv_scale_q = call.inv_scale_q,
                                    .inv_scale_k = call.inv_scale_k,
                                    .inv_scale_v = call.inv_scale_v,
                                    .o = static_cast<kernels::u16*>(call.o),
                                    .lse = call.lse,
                                    .largest_p = call.largest_p,
                                    .queries = static_cast<int32_t>(call.queries),
                                    .keys = static_cast<int32_t>(call.keys),
                                    .heads_q = static_cast<int32_t>(desc_.heads_q),
                                    .heads_kv = static_cast<int32_t>(desc_.heads_kv),
                                    .batch = static_cast<int32_t>(batch),
                                    .scale_log2 = desc_.scale * std::numbers::log2e_v<float>};
  const int64_t of_head = desc_.packed ? blocks_q : ceil_div(call.queries, queries_of_cta_);
  const int64_t works = of_head * batch * desc_.heads_q;
  const int64_t blocks = std::min<int64_t>(works, state.info.sm_count);
  return launch_attention(state.driver, *kernel_, blocks, maps, desc_, args, call.packed,
                          state.options.programmatic_launch, stream);
}

}  // namespace f8::runtime
