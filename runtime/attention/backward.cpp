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
constexpr int64_t kHead = codegen::kAttentionBackwardHeadDim;

struct MapOf {
  const Driver& driver;
  Status operator()(const char* name, const void* base, int64_t rows, int64_t cols,
                    int64_t box_rows, int64_t box_cols, CUtensorMap& to) const {
    return encode_bytes_map(driver, name, base, rows, cols, box_rows, box_cols, to);
  }
};

}  // namespace

// The sums are last, and the larger ones of those of both kernels, which run one after the other.
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
    size_t end = 0;
    const auto place = [&](int64_t count) {
      const size_t at = end;
      end = at + static_cast<size_t>(ceil_div(count, 16) * 16);
      return at;
    };
    dout = place(blocks_q * kTile * kHead);
    dout_t = place(blocks_q * kTile * kHead);
    q_t = place(blocks_q * kTile * kHead);
    k_t = place(blocks_k * kTile * kHead);
    v = place(blocks_k * kTile * kHead);
    steps = place(blocks_q * (kTile / kernels::kAttentionStep) * kernels::kAttentionStepFloats * 4);
    bounds_q = place(blocks_q * kTile * 4);
    norms_v = place(blocks_k * kernels::kAttentionNorms * 4);
    sums = place(std::max(ctas_q * kernels::kAttentionSumsOfQueries,
                          ctas_k * kernels::kAttentionSumsOfKeys) *
                 4);
    bytes = end;
  }
  template <class T>
  [[nodiscard]] T* at(const AttentionBackwardCall& call, size_t place) const {
    return reinterpret_cast<T*>(static_cast<char*>(call.workspace) + place);
  }
};

Result<AttentionBackward> AttentionBackward::create(const std::shared_ptr<Context>& context,
                                                    const AttentionDesc& desc) {
  if (desc.head_dim != kHead) {
    return fail(ErrorCode::kUnsupported,
                "a backward in fp8 of heads of {}: it has heads of {}; plan the attention without "
                "fp8_backward, and take a backward in bf16 of what it dequantizes",
                desc.head_dim, kHead);
  }
  codegen::AttentionBackwardSpec spec{.mask = desc.mask(), .packed = desc.packed};
  const Kernel* dq = F8_TRY(context->kernel(spec));
  spec.keys = true;
  const Kernel* dkv = F8_TRY(context->kernel(spec));
  const Kernel* cast = F8_TRY(context->kernel(codegen::AttentionCastSpec{
      .step = codegen::AttentionStep::kBackwardCast, .packed = desc.packed}));
  return AttentionBackward(context, desc, *cast, *dq, *dkv);
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
  return (parts & kKeys) == 0 ? Status() : differentiate_keys(call, layout, stream);
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
  const MapOf map{context_->state().driver};
  const int64_t rows_q = layout.blocks_q * kTile, rows_k = layout.blocks_k * kTile;
  const int64_t of_k = desc_.heads_kv * call.kept.batch;
  const auto* const dout = layout.at<kernels::u8>(call, layout.dout);
  CUtensorMap maps[5];
  F8_TRY(map("q", call.kept.q.copy, rows_q, kHead, kTile, kHead, maps[0]));
  F8_TRY(map("dout", dout, rows_q, kHead, kTile, kHead, maps[1]));
  F8_TRY(map("k", call.kept.k.copy, rows_k, kHead, kTile, kHead, maps[2]));
  F8_TRY(map("v", layout.at<kernels::u8>(call, layout.v), rows_k, kHead, kTile, kHead, maps[3]));
  F8_TRY(map("k^T", layout.at<kernels::u8>(call, layout.k_t), of_k * kHead, rows_k / of_k, kHead,
             kTile, maps[4]));
  return differentiate(call, layout, *dq_, layout.ctas_q, maps, stream);
}

Status AttentionBackward::differentiate_keys(const AttentionBackwardCall& call,
                                             const Layout& layout, Stream stream) const {
  constexpr int64_t kPart = kernels::kAttentionStep / kernels::kAttentionKeyCluster;
  constexpr int64_t kColumns = kHead / kernels::kAttentionKeyCluster;
  const MapOf map{context_->state().driver};
  const int64_t rows_q = layout.blocks_q * kTile, rows_k = layout.blocks_k * kTile;
  const int64_t of_q = desc_.heads_q * call.kept.batch;
  const auto* const dout = layout.at<kernels::u8>(call, layout.dout);
  CUtensorMap maps[6];
  F8_TRY(map("k", call.kept.k.copy, rows_k, kHead, kTile, kHead, maps[0]));
  F8_TRY(map("v", layout.at<kernels::u8>(call, layout.v), rows_k, kHead, kTile, kHead, maps[1]));
  F8_TRY(map("q", call.kept.q.copy, rows_q, kHead, kPart, kHead, maps[2]));
  F8_TRY(map("dout", dout, rows_q, kHead, kPart, kHead, maps[3]));
  F8_TRY(map("q^T", layout.at<kernels::u8>(call, layout.q_t), of_q * kHead, rows_q / of_q, kColumns,
             kernels::kAttentionStep, maps[4]));
  F8_TRY(map("dout^T", layout.at<kernels::u8>(call, layout.dout_t), of_q * kHead, rows_q / of_q,
             kColumns, kernels::kAttentionStep, maps[5]));
  return differentiate(call, layout, *dkv_, layout.ctas_k, maps, stream);
}

}  // namespace f8::runtime
