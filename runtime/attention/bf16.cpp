#include "runtime/attention/bf16.hpp"

#include "runtime/attention/operands.hpp"

namespace f8::runtime {

Result<std::shared_ptr<const Attention>> Bf16Attention::create(
    const std::shared_ptr<Context>& context, const AttentionDesc& desc) {
  if (desc.packed) {
    return fail(ErrorCode::kUnsupported,
                "attention of recipe bf16 takes no packed sequences; give it batches");
  }
  AttentionProviderPtr provider = F8_TRY(open_attention_provider(context, desc));
  return std::shared_ptr<const Attention>(new Bf16Attention(context, desc, std::move(provider)));
}

size_t Bf16Attention::workspace_bytes(const AttentionSizes& sizes) const {
  return dense_workspace_bytes(*provider_, AttentionPass::kForward, desc_, sizes);
}

size_t Bf16Attention::backward_workspace_bytes(const AttentionSizes& sizes) const {
  return dense_workspace_bytes(*provider_, AttentionPass::kBackward, desc_, sizes);
}

Status Bf16Attention::forward(const float8_attention_forward_args& args, Stream stream) const {
  F8_TRY(check(args.sizes));
  if (is_nothing(args.sizes)) return {};
  const size_t bytes = workspace_bytes(args.sizes);
  CallMemory memory(kAttentionForwardArgs);
  F8_TRY(add_operands(kAttentionForwardArgs, args, desc_, Access::kRead, memory));
  F8_TRY(add_results(kAttentionForwardArgs, args, desc_, Access::kWrite, bytes, memory));
  F8_TRY(add_offsets(args, desc_, memory));
  F8_TRY(memory.check(kAttentionForward, *context_, stream));
  return provider_->run(AttentionPass::kForward,
                        {.sizes = args.sizes,
                         .q = args.q,
                         .k = args.k,
                         .v = args.v,
                         .o = dense_heads(args.o, desc_, args.sizes, OfKeys::kNo),
                         .lse = args.lse,
                         .workspace = {args.workspace.data, bytes}},
                        stream);
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
  F8_TRY(add_results(kAttentionBackwardArgs, args, desc_, Access::kRead, bytes, memory));
  F8_TRY(memory.check(kAttentionBackward, *context_, stream));
  ProviderCall call = backward_call(args, desc_);
  call.q = args.q;
  call.k = args.k;
  call.v = args.v;
  call.workspace = {args.workspace.data, bytes};
  return provider_->run(AttentionPass::kBackward, call, stream);
}

std::vector<Step> Bf16Attention::forward_steps(const float8_attention_forward_args& args) const {
  return {{"forward in bf16", [this, args](Stream stream) { return forward(args, stream); }, 0,
           kAttentionForwardProducts}};
}

std::vector<Step> Bf16Attention::backward_steps(const float8_attention_backward_args& args) const {
  return {{"backward in bf16", [this, args](Stream stream) { return backward(args, stream); }, 0,
           kAttentionBackwardProducts}};
}

}  // namespace f8::runtime
