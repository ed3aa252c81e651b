#include "runtime/attention/provider.hpp"

#include "runtime/attention/cudnn/cudnn.hpp"
#include "runtime/attention/emulated.hpp"
#include "runtime/attention/operands.hpp"

namespace f8::runtime {

ProviderCall backward_call(const float8_attention_backward_args& args, const AttentionDesc& desc) {
  return {.sizes = args.sizes,
          .q = {},
          .k = {},
          .v = {},
          .o = dense_heads(args.o, desc, args.sizes, OfKeys::kNo),
          .lse = const_cast<float*>(args.lse),
          .dout = args.dout,
          .dq = args.dq,
          .dk = args.dk,
          .dv = args.dv};
}

size_t dense_workspace_bytes(const AttentionProvider& provider, AttentionPass pass,
                             const AttentionDesc& desc, const AttentionSizes& sizes) {
  if (is_nothing(sizes)) return 0;
  const float8_heads q = dense_heads(nullptr, desc, sizes, OfKeys::kNo);
  const float8_heads k = dense_heads(nullptr, desc, sizes, OfKeys::kYes);
  ProviderCall call{.sizes = sizes, .q = q, .k = k, .v = k, .o = q};
  call.dout = call.dq = q;
  call.dk = call.dv = k;
  return provider.workspace_bytes(pass, call).value_or(0);
}

Result<AttentionProviderPtr> open_attention_provider(const std::shared_ptr<Context>& context,
                                                     const AttentionDesc& desc) {
  return context->device().emulated ? create_emulated_attention(context, desc)
                                    : create_cudnn_attention(context, desc);
}

}  // namespace f8::runtime
