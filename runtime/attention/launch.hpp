// The launch of a kernel of attention, whose arguments follow from the mask and from whether sequences are packed.
#pragma once

#include <algorithm>
#include <limits>

#include "codegen/kernels/attention/attention_args.cuh"
#include "runtime/attention/forward.hpp"
#include "runtime/device/launch.hpp"

namespace f8::runtime {

// `args` are those of a full or causal mask of a batch.
template <class Args>
[[nodiscard]] Status launch_attention(const Driver& driver, const Kernel& kernel, int64_t ctas,
                                      CUtensorMap* maps, const AttentionDesc& desc,
                                      const Args& args, const PackedBlocks& blocks, bool overlap,
                                      Stream stream) {
  using kernels::AttentionPackedArgs, kernels::AttentionWindow;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const AttentionWindow<Args> window{args, static_cast<int32_t>(std::min(desc.window, kMost)), 0};
  const auto pack = [&](const auto& of_batch) {
    return AttentionPackedArgs{of_batch, blocks.of_queries, blocks.of_keys, blocks.sequences, 0};
  };
  auto packed_window = pack(window);
  auto packed = pack(args);
  // A kernel without a window reads the first part alone.
  const void* own = &window;
  if (desc.packed) own = desc.window > 0 ? static_cast<const void*>(&packed_window) : &packed;
  void* parameters[] = {maps, const_cast<void*>(own)};
  return launch(driver, kernel, ctas, parameters, overlap, stream);
}

}  // namespace f8::runtime
