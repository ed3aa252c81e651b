#include "runtime/attention/provider.hpp"

#include "runtime/attention/cudnn/cudnn.hpp"
#include "runtime/attention/emulated.hpp"

namespace f8::runtime {

Result<AttentionProviderPtr> open_attention_provider(const std::shared_ptr<Context>& context,
                                                     const AttentionDesc& desc) {
  return context->device().emulated ? create_emulated_attention(context, desc)
                                    : create_cudnn_attention(context, desc);
}

}  // namespace f8::runtime
