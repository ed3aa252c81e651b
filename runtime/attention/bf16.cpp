#include "runtime/attention/bf16.hpp"

#include "recipes/fp8_layout.hpp"
#include "runtime/attention/operands.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"

namespace f8::runtime {
namespace {

// The blocks of packed sequences, of queries and then of keys, which lie before the library's workspace.
struct Blocks {
  int64_t of_queries = 0, of_keys = 0;
  size_t bytes = 0;

  Blocks(const AttentionDesc& desc, const AttentionSizes& sizes) {
    if (!desc.packed) return;
    constexpr int64_t kAlignment = 256;
    of_queries = desc.blocks(sizes.batch, sizes.tokens_q);
    of_keys = desc.blocks(sizes.batch, sizes.tokens_kv);
    const int64_t all = (of_queries + of_keys) * int64_t{sizeof(kernels::AttentionBlock)};
    bytes = static_cast<size_t>(ceil_div(all, kAlignment) * kAlignment);
  }
};

}  // namespace

Result<std::shared_ptr<const Attention>> Bf16Attention::create(
    const std::shared_ptr<Context>& context, const AttentionDesc& desc) {
  AttentionProviderPtr provider = F8_TRY(open_attention_provider(context, desc));
  const Kernel* layout = nullptr;
  if (desc.packed) {
    layout = F8_TRY(
        context->kernel(codegen::AttentionCastSpec{.head_dim = static_cast<int>(desc.head_dim),
                                                   .step = codegen::AttentionStep::kLayout,
                                                   .packed = true}));
  }
  return std::shared_ptr<const Attention>(
      new Bf16Attention(context, desc, std::move(provider), layout));
}

size_t Bf16Attention::saved_bytes(const AttentionSizes& sizes) const {
  return desc_.packed ? static_cast<size_t>(sizes.batch + 1) * 2 * sizeof(int32_t) : 0;
}

size_t Bf16Attention::workspace_bytes(const AttentionSizes& sizes) const {
  return Blocks(desc_, sizes).bytes +
         dense_workspace_bytes(*provider_, AttentionPass::kForward, desc_, sizes);
}

size_t Bf16Attention::backward_workspace_bytes(const AttentionSizes& sizes) const {
  return dense_workspace_bytes(*provider_, AttentionPass::kBackward, desc_, sizes);
}

Status Bf16Attention::forward(const float8_attention_forward_args& args, Stream stream) const {
  return run(args, stream, kAllParts);
}

Status Bf16Attention::run(const float8_attention_forward_args& args, Stream stream,
                          unsigned parts) const {
  F8_TRY(check(args.sizes));
  if (is_nothing(args.sizes)) return {};
  const size_t bytes = workspace_bytes(args.sizes);
  CallMemory memory(kAttentionForwardArgs);
  F8_TRY(add_operands(kAttentionForwardArgs, args, desc_, Access::kRead, memory));
  F8_TRY(add_saved(kAttentionForwardArgs, args, saved_bytes(args.sizes), Access::kWrite, memory));
  F8_TRY(add_results(kAttentionForwardArgs, args, desc_, Access::kWrite, bytes, memory));
  F8_TRY(add_offsets(args, desc_, memory));
  F8_TRY(memory.check(kAttentionForward, *context_, stream));
  if (desc_.packed && (parts & kLayout) != 0) F8_TRY(launch_layout(args, stream));
  if ((parts & kAttend) == 0) return {};
  ProviderCall call{.sizes = args.sizes,
                    .q = args.q,
                    .k = args.k,
                    .v = args.v,
                    .o = dense_heads(args.o, desc_, args.sizes, OfKeys::kNo),
                    .lse = args.lse};
  char* const workspace = static_cast<char*>(args.workspace.data);
  const size_t of_blocks = Blocks(desc_, args.sizes).bytes;
  call.workspace = {workspace + of_blocks, bytes - of_blocks};
  if (desc_.packed) {
    call.offsets = static_cast<const int32_t*>(args.saved.data);
    call.blocks = reinterpret_cast<const kernels::AttentionBlock*>(workspace);
  }
  return provider_->run(AttentionPass::kForward, call, stream);
}

Status Bf16Attention::launch_layout(const float8_attention_forward_args& args,
                                    Stream stream) const {
  auto* const blocks = static_cast<kernels::AttentionBlock*>(args.workspace.data);
  kernels::AttentionPackedCastArgs layout{};
  layout.q.tokens = static_cast<int32_t>(args.sizes.tokens_q);
  layout.k.tokens = static_cast<int32_t>(args.sizes.tokens_kv);
  layout.batch = 1;
  layout.blocks_q = blocks;
  layout.blocks_k = blocks + Blocks(desc_, args.sizes).of_queries;
  layout.offsets = static_cast<int32_t*>(args.saved.data);
  layout.sequences = static_cast<int32_t>(args.sizes.batch);
  set_offsets(args, layout);
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  return launch_with(layout, state.driver, *layout_, 1, state.options.programmatic_launch, stream);
}

Status Bf16Attention::dequantize(const float8_attention_dequantize_args&, Stream) const {
  return fail(ErrorCode::kInvalidArgument,
              "{}: the attention is of recipe bf16, which has no copies in fp8; its backward takes "
              "q, k and v themselves",
              kAttentionDequantize);
}

Status Bf16Attention::backward(const float8_attention_backward_args& args, Stream stream) const {
  F8_TRY(check(args.sizes));
  if (is_nothing(args.sizes)) return {};
  const size_t bytes = backward_workspace_bytes(args.sizes);
  CallMemory memory(kAttentionBackwardArgs);
  F8_TRY(add_operands(kAttentionBackwardArgs, args, desc_, Access::kRead, memory));
  F8_TRY(add_gradients(args, desc_, memory));
  F8_TRY(add_saved(kAttentionBackwardArgs, args, saved_bytes(args.sizes), Access::kRead, memory));
  F8_TRY(add_results(kAttentionBackwardArgs, args, desc_, Access::kRead, bytes, memory));
  F8_TRY(memory.check(kAttentionBackward, *context_, stream));
  ProviderCall call = backward_call(args, desc_);
  call.q = args.q;
  call.k = args.k;
  call.v = args.v;
  call.workspace = {args.workspace.data, bytes};
  if (desc_.packed) call.offsets = static_cast<const int32_t*>(args.saved.data);
  return provider_->run(AttentionPass::kBackward, call, stream);
}

std::vector<Step> Bf16Attention::forward_steps(const float8_attention_forward_args& args) const {
  PartSteps steps([this, args](Stream stream, unsigned parts) { return run(args, stream, parts); });
  if (desc_.packed) steps.add("layout", kLayout);
  steps.add("forward in bf16", kAttend, 0, kAttentionForwardProducts);
  return steps.take();
}

std::vector<Step> Bf16Attention::backward_steps(const float8_attention_backward_args& args) const {
  return {{"backward in bf16", [this, args](Stream stream) { return backward(args, stream); }, 0,
           kAttentionBackwardProducts}};
}

}  // namespace f8::runtime
