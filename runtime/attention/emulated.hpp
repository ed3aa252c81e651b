// The stand-in for cuDNN on an emulated device: the same attention in fp32 on the CPU, its results rounded once.
#pragma once

#include "runtime/attention/provider.hpp"

namespace f8::runtime {

[[nodiscard]] Result<AttentionProviderPtr> create_emulated_attention(
    const std::shared_ptr<Context>& context, const AttentionDesc& desc);

}  // namespace f8::runtime
