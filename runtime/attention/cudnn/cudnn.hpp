// cuDNN as a provider of attention, opened when the first plan needs it.
#pragma once

#include "runtime/attention/provider.hpp"

namespace f8::runtime {

[[nodiscard]] Result<AttentionProviderPtr> create_cudnn_attention(
    const std::shared_ptr<Context>& context, const AttentionDesc& desc);

}  // namespace f8::runtime
