// The backward of attention in fp8: the casts before it, dQ, and dK with dV. A plan is immutable and shared between
// threads.
#pragma once

#include <vector>

#include "codegen/kernels/attention/attention_backward_args.cuh"
#include "runtime/attention/forward.hpp"
#include "runtime/device/tensor_map.hpp"

namespace f8::runtime {

// Of a call: arrays as in AttentionCall, and elements [b][h][token][d] by strides. `kept` has what the forward kept.
struct AttentionBackwardCall {
  int64_t batch = 1;  // sequences
  kernels::AttentionPackedCastArgs kept{};
  kernels::AttentionOperand dout{}, o{};  // of bf16 elements
  const float* lse = nullptr;
  const float* largest_p = nullptr;
  void* workspace = nullptr;  // workspace_bytes(), aligned to 16 bytes
  kernels::AttentionGradient dq{}, dk{}, dv{};
};

class AttentionBackward {
 public:
  // Loads the kernels.
  [[nodiscard]] static Result<AttentionBackward> create(const std::shared_ptr<Context>& context,
                                                        const AttentionDesc& desc);
  [[nodiscard]] size_t workspace_bytes(int64_t batch, int64_t queries, int64_t keys) const;

  // The launches, in order. That of kKeys is of dV too where a kernel has both gradients, and there is none of kValues.
  enum Part : unsigned { kCast = 1, kQueries = 2, kKeys = 4, kValues = 8, kAllParts = 15 };
  [[nodiscard]] bool has_both() const { return dkv_.size() == 1; }
  // Enqueues these; no allocation, lock or synchronisation. The caller has checked the pointers.
  [[nodiscard]] Status run(const AttentionBackwardCall& call, Stream stream, unsigned parts) const;

 private:
  // Where the arrays of the workspace begin.
  struct Layout;

  [[nodiscard]] Status cast(const AttentionBackwardCall& call, const Layout& layout,
                            Stream stream) const;
  [[nodiscard]] Status differentiate_queries(const AttentionBackwardCall& call,
                                             const Layout& layout, Stream stream) const;
  [[nodiscard]] Status differentiate_keys(const AttentionBackwardCall& call, const Layout& layout,
                                          Stream stream, unsigned parts) const;
  [[nodiscard]] Status differentiate(const AttentionBackwardCall& call, const Layout& layout,
                                     const Kernel& kernel, int64_t ctas, CUtensorMap* maps,
                                     Stream stream) const;

  AttentionBackward(std::shared_ptr<Context> context, const AttentionDesc& desc, const Kernel& cast,
                    const Kernel& dq, std::vector<const Kernel*> dkv)
      : context_(std::move(context)), desc_(desc), cast_(&cast), dq_(&dq), dkv_(std::move(dkv)) {}

  std::shared_ptr<Context> context_;
  AttentionDesc desc_;
  const Kernel* cast_;
  const Kernel* dq_;
  std::vector<const Kernel*> dkv_;  // of both gradients, or one of each
};

}  // namespace f8::runtime
