// The forward of attention over operands in fp8: O = softmax(scale Q K^T) V, and LSE. A plan is
// immutable and shared between threads.
#pragma once

#include "codegen/kernels/attention/attention_args.cuh"
#include "recipes/attention.hpp"
#include "runtime/device/context.hpp"

namespace f8::runtime {

struct AttentionDesc {
  int64_t heads_q = 1;
  int64_t heads_kv = 1;  // a divisor of heads_q
  int64_t head_dim = 128;
  bool causal = false;
  int64_t window = 0;   // the keys that a causal query has at most; 0: all
  float scale = 0;      // of the scores
  bool packed = false;  // sequences behind each other, from offsets on the device
  AttentionRecipe recipe = AttentionRecipe::kFp8Forward;

  [[nodiscard]] codegen::AttentionMask mask() const;
  // The blocks of a head in all sequences of a batch, or in a pack of so many.
  [[nodiscard]] int64_t blocks(int64_t batch, int64_t tokens) const;
};

// The blocks of packed sequences.
struct PackedBlocks {
  const kernels::AttentionBlock* of_queries = nullptr;
  const kernels::AttentionBlock* of_keys = nullptr;
  int32_t sequences = 0;
};

// Arrays are dense and lie in the order of their brackets: b batch, h and g heads of queries and of keys, d the
// head; q and k are whole blocks of 128 tokens, s. Packed sequences are a batch of one in o and lse, whose tokens are
// those of all sequences, and in the others [b][h] are [h], of the blocks of all sequences.
struct AttentionCall {
  int64_t batch = 1;  // sequences
  int64_t queries = 0;
  int64_t keys = 0;                    // at least 1
  const void* q = nullptr;             // e4m3 [b][h][s][d]
  const void* k = nullptr;             // e4m3 [b][g][s][d]
  const void* v_t = nullptr;           // e4m3 [b][g][d][s], by kernels::fragment_place()
  const float* inv_scale_q = nullptr;  // powers of two [b][h][s / 128]
  const float* inv_scale_k = nullptr;  // [b][g][s / 128]
  const float* inv_scale_v = nullptr;
  PackedBlocks packed;
  void* o = nullptr;           // bf16 [b][queries][h][d]
  float* lse = nullptr;        // [b][h][queries]
  float* largest_p = nullptr;  // likewise, or null
};

class AttentionForward {
 public:
  // Loads the kernel.
  [[nodiscard]] static Result<AttentionForward> create(const std::shared_ptr<Context>& context,
                                                       const AttentionDesc& desc);
  // Enqueues one launch, or nothing without queries; no allocation, lock or synchronisation. The caller has
  // checked the pointers.
  [[nodiscard]] Status run(const AttentionCall& call, Stream stream) const;

 private:
  AttentionForward(std::shared_ptr<Context> context, const AttentionDesc& desc,
                   const Kernel& kernel, int64_t queries_of_cta)
      : context_(std::move(context)),
        desc_(desc),
        kernel_(&kernel),
        queries_of_cta_(queries_of_cta) {}

  std::shared_ptr<Context> context_;
  AttentionDesc desc_;
  const Kernel* kernel_;
  int64_t queries_of_cta_;
};

}  // namespace f8::runtime
