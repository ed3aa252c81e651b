// What stands for cudnn.cpp in a build without cuDNN's headers.
#include "runtime/attention/cudnn/cudnn.hpp"

namespace f8::runtime {

Result<int> cudnn_version() {
  return fail(ErrorCode::kUnsupported, "this build of float8 has no cuDNN (FLOAT8_CUDNN=OFF)");
}

Result<AttentionProviderPtr> create_cudnn_attention(const std::shared_ptr<Context>&,
                                                    const AttentionDesc&) {
  return std::unexpected(cudnn_version().error());
}

}  // namespace f8::runtime
