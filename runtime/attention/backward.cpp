#include "runtime/attention/backward.hpp"

#include <algorithm>
#include <numbers>

#include "recipes/fp8_layout.hpp"
#include "recipes/problem.hpp"
#include "runtime/attention/launch.hpp"
#include "runtime/device/context_state.hpp"

namespace f8::runtime {
namespace {

constexpr int64_t kTile = kernels::kAttentionTile;

// Encodes maps of copies: rows of a head in boxes of AttentionBoxes, and columns of all heads.
struct MapOf {
  const Driver& driver;
  int64_t head_dim;
  Status rows(const char* name, const void* base, int64_t count, int64_t of_box,
              CUtensorMap& to) const {
    return encode_bytes_map(driver, name, base, count, head_dim, of_box, std::min(head_dim, kTile),
                            to);
  }
  Status columns(const char* name, const void* base, int64_t heads, int64_t tokens, int64_t of_box,
                 int64_t tokens_of_box, CUtensorMap& to) const {
    return encode_bytes_map(driver, name, base, heads * head_dim, tokens, of_box, tokens_of_box,
                            to);
  }
};

}  // namespace

// The sums are last, and the largest ones of those of the kernels, which run one after the other.
struct AttentionBackward::Layout {
  int64_t blocks_q, blocks_k;  // of all heads
  int64_t ctas_q, ctas_k;
  size_t dout, dout_t, q_t, k_t, v, steps, bounds_q, norms_v, sums, bytes;

  Layout(const AttentionDesc& desc, int sm_count, int64_t batch, int64_t queries, int64_t keys)
      : blocks_q(desc.heads_q * desc.blocks(batch, queries)),
        blocks_k(desc.heads_kv * desc.blocks(batch, keys)) {
    constexpr int64_t kCluster = kernels::kAttentionKeyCluster;
    // Each block of packed sequences begins a work (attention_backward_dkv.cuh).
    const int64_t works_k =
        desc.packed ? blocks_k : ceil_div(ceil_div(keys, kTile), kCluster) * batch * desc.heads_kv;
    ctas_q = std::min<int64_t>(blocks_q, sm_count);
    ctas_k = std::min<int64_t>(works_k, sm_count / kCluster) * kCluster;
    const int64_t head = desc.head_dim;
    size_t end = 0;
    const auto place = [&](int64_t count) {
      const size_t at = end;
      end = at + static_cast<size_t>(ceil_div(count, 16) * 16);
      return at;
    };
    dout = place(blocks_q * kTile * head);
    dout_t = place(blocks_q * kTile * head);
    q_t = place(blocks_q * kTile * head);
    k_t = place(blocks_k * kTile * head);
    v = place(blocks_k * kTile * head);
    steps = place(blocks_q * (kTile / kernels::kAttentionStep) * kernels::kAttentionStepFloats * 4);
    bounds_q = place(blocks_q * kTile * 4);
    norms_v = place(blocks_k * kernels::kAttentionNorms * 4);
    const int64_t of_keys =
        codegen::AttentionBackwardSpec::has_both(static_cast<int>(head)) ? 2 : 1;
    sums = place(std::max(ctas_q, of_keys * ctas_k) *
                 kernels::attention_sums(static_cast<int32_t>(head)) * 4);
    bytes = end;
  }
  template <class T>
  [[nodiscard]] T* at(const AttentionBackwardCall& call, size_t place) const {
    return reinterpret_cast<T*>(static_cast<char*>(call.workspace) + place);
  }
};

Result<AttentionBackward> AttentionBackward::create(const std::shared_ptr<Context>& context,
                                                    const AttentionDesc& desc) {
  using codegen::AttentionGradients, codegen::AttentionBackwardSpec;
  const auto head_dim = static_cast<int>(desc.head_dim);
  const auto kernel = [&](AttentionGradients gradients) {
    return context->kernel(AttentionBackwardSpec{head_dim, desc.mask(), desc.packed, gradients});
  };
  const Kernel* dq = F8_TRY(kernel(AttentionGradients::kDq));
  std::vector<const Kernel*> dkv;
  if (AttentionBackwardSpec::has_both(head_dim)) {
    dkv = {F8_TRY(kernel(AttentionGradients::kDkv))};
  } else {
    dkv = {F8_TRY(kernel(AttentionGradients::kDk)), F8_TRY(kernel(AttentionGradients::kDv))};
  }
  const Kernel* cast = F8_TRY(context->kernel(codegen::AttentionCastSpec{
      .head_dim = head_dim, .step = codegen::AttentionStep::kBackwardCast, .packed = desc.packed}));
  return AttentionBackward(context, desc, *cast, *dq, std::move(dkv));
}

size_t AttentionBackward::workspace_bytes(int64_t batch, int64_t queries, int64_t keys) const {
  return Layout(desc_, context_->state().info.sm_count, batch, queries, keys).bytes;
}

Status AttentionBackward::run(const AttentionBackwardCall& call, Stream stream,
                              unsigned parts) const {
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const Layout layout(desc_, state.info.sm_count, call.batch, call.kept.q.tokens,
                      call.kept.k.tokens);
  if ((parts & kCast) != 0) F8_TRY(cast(call, layout, stream));
  if ((parts & kQueries) != 0) F8_TRY(differentiate_queries(call, layout, stream));
  return differentiate_keys(call, layout, stream, parts);
}

Status AttentionBackward::cast(const AttentionBackwardCall& call, const Layout& layout,
                               Stream stream) const {
  const auto args_of = [&](const auto& kept) {
    kernels::AttentionBackwardCastArgs args{kept,
                                            call.dout,
                                            call.o,
                                            call.lse,
                                            call.largest_p,
                                            layout.at<kernels::u8>(call, layout.q_t),
                                            layout.at<kernels::u8>(call, layout.k_t),
                                            layout.at<kernels::u8>(call, layout.dout_t),
                                            layout.at<kernels::u8>(call, layout.v),
                                            layout.at<float>(call, layout.steps),
                                            layout.at<float>(call, layout.bounds_q),
                                            layout.at<float>(call, layout.norms_v),
                                            desc_.scale * std::numbers::log2e_v<float>,
                                            0};
    args.dout.copy = layout.at<kernels::u8>(call, layout.dout);
    return args;
  };
  const Context::State& state = context_->state();
  const int64_t blocks = 2 * layout.blocks_q + 2 * layout.blocks_k;
  const bool overlap = state.options.programmatic_launch;
  if (desc_.packed) {
    return launch_with(args_of(call.kept), state.driver, *cast_, blocks, overlap, stream);
  }
  const kernels::AttentionCastArgs& of_batch = call.kept;
  return launch_with(args_of(of_batch), state.driver, *cast_, blocks, overlap, stream);
}

Status AttentionBackward::differentiate(const AttentionBackwardCall& call, const Layout& layout,
                                        const Kernel& kernel, int64_t ctas, CUtensorMap* maps,
                                        Stream stream) const {
  const kernels::AttentionPackedCastArgs& kept = call.kept;
  const kernels::AttentionBackwardArgs args{.inv_scale_k = kept.k.inv_scale,
                                            .inv_scale_v = kept.v.inv_scale,
                                            .norms_v = layout.at<float>(call, layout.norms_v),
                                            .steps = layout.at<float>(call, layout.steps),
                                            .bounds_q = layout.at<float>(call, layout.bounds_q),
                                            .sums = layout.at<float>(call, layout.sums),
                                            .dq = call.dq,
                                            .dk = call.dk,
                                            .dv = call.dv,
                                            .queries = kept.q.tokens,
                                            .keys = kept.k.tokens,
                                            .heads_q = static_cast<int32_t>(desc_.heads_q),
                                            .heads_kv = static_cast<int32_t>(desc_.heads_kv),
                                            .batch = kept.batch,
                                            .scale = desc_.scale};
  const PackedBlocks blocks{kept.blocks_q, kept.blocks_k, kept.sequences};
  const Context::State& state = context_->state();
  return launch_attention(state.driver, kernel, ctas, maps, desc_, args, blocks,
                          state.options.programmatic_launch, stream);
}

Status AttentionBackward::differentiate_queries(const AttentionBackwardCall& call,
                                                const Layout& layout, Stream stream) const {
  const MapOf map{context_->state().driver, desc_.head_dim};
  const int64_t rows_q = layout.blocks_q * kTile, rows_k = layout.blocks_k * kTile;
  const int64_t of_k = desc_.heads_kv * call.kept.batch;
  const int64_t keys =
      codegen::AttentionBackwardSpec::keys_of_stage(static_cast<int>(desc_.head_dim));
  CUtensorMap maps[5];
  F8_TRY(map.rows("q", call.kept.q.copy, rows_q, kTile, maps[0]));
  F8_TRY(map.rows("dout", layout.at<kernels::u8>(call, layout.dout), rows_q, kTile, maps[1]));
  F8_TRY(map.rows("k", call.kept.k.copy, rows_k, keys, maps[2]));
  F8_TRY(map.rows("v", layout.at<kernels::u8>(call, layout.v), rows_k, keys, maps[3]));
  F8_TRY(map.columns("k^T", layout.at<kernels::u8>(call, layout.k_t), of_k, rows_k / of_k,
                     desc_.head_dim, keys, maps[4]));
  return differentiate(call, layout, *dq_, layout.ctas_q, maps, stream);
}

Status AttentionBackward::differentiate_keys(const AttentionBackwardCall& call,
                                             const Layout& layout, Stream stream,
                                             unsigned parts) const {
  constexpr int64_t kStep = kernels::kAttentionStep, kCluster = kernels::kAttentionKeyCluster;
  const MapOf map{context_->state().driver, desc_.head_dim};
  const int64_t rows_q = layout.blocks_q * kTile, rows_k = layout.blocks_k * kTile;
  const int64_t of_q = desc_.heads_q * call.kept.batch;
  CUtensorMap maps[6];
  F8_TRY(map.rows("k", call.kept.k.copy, rows_k, kTile, maps[0]));
  F8_TRY(map.rows("v", layout.at<kernels::u8>(call, layout.v), rows_k, kTile, maps[1]));
  F8_TRY(map.rows("q", call.kept.q.copy, rows_q, kStep / kCluster, maps[2]));
  F8_TRY(map.rows("dout", layout.at<kernels::u8>(call, layout.dout), rows_q, kStep / kCluster,
                  maps[3]));
  F8_TRY(map.columns("q^T", layout.at<kernels::u8>(call, layout.q_t), of_q, rows_q / of_q,
                     desc_.head_dim / kCluster, kStep, maps[4]));
  F8_TRY(map.columns("dout^T", layout.at<kernels::u8>(call, layout.dout_t), of_q, rows_q / of_q,
                     desc_.head_dim / kCluster, kStep, maps[5]));
  constexpr Part kParts[] = {kKeys, kValues};
  for (size_t i = 0; i < dkv_.size(); ++i) {
    if ((parts & kParts[i]) == 0) continue;
    F8_TRY(differentiate(call, layout, *dkv_[i], layout.ctas_k, maps, stream));
  }
  return {};
}

}  // namespace f8::runtime
