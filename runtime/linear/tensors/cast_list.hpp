// The casts of many tensors in few launches: tensors that are cast alike share an amax launch and a
// cast launch (QuantizeList), whatever their shapes. Tensors may be of several linears; each has
// call arguments of its own.
//
// Ranks may hold a tensor by rows, a shard each. Its casts have the bits of the whole tensor's: one
// call finds the shard's maxima, the caller replaces those that span ranks by their maxima over the
// ranks, and a second call casts with them.
//
//   Slot::kRankAmax  := columns | blocks | tensor    of the shard, then over ranks; a part that no
//                                                    scale needs is not there
//   Slot::kRowAmax   := rows                         of the shard, and so of the tensor
//
// Ranks that hold the tensor by columns reduce row_amax and the tensor's word instead.
//
// All are the bits of |x| as fp32. Where a shard has whole blocks, the cast finds their maxima. Where
// it may cut them, the words are those of all 128x128 blocks of the whole tensor.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "runtime/linear/plan/launches.hpp"
#include "runtime/linear/plan/layout.hpp"
#include "runtime/quantize/quantize_list.hpp"

namespace f8::runtime {

// The words of a shard's maxima.
struct ShardWords {
  int64_t columns = 0;
  int64_t blocks = 0;
  int64_t over_ranks = 0;  // those of the columns and the blocks, and the tensor's
  int64_t rows = 0;
};
// `whole_rows`: those of the whole where a shard may cut blocks, else 0.
[[nodiscard]] ShardWords shard_words(std::span<const KernelPass> passes, int64_t rows, int64_t cols,
                                     int64_t whole_rows);
// The places of these words in a call.
void place_shard_words(const ShardWords& words, TensorBuffers& at);

// What a plan reads of a tensor.
struct ListedTensor {
  const LinearKernels& kernels;
  Tensor tensor;
  CopySet copies;           // that are made of it; bits of other tensors are not looked at
  const TensorBuffers& at;  // its buffers in the call's arguments
  int64_t rows_max;         // the most rows of a call
  bool over_ranks = false;  // calls cast a shard
  int64_t whole_rows = 0;   // not 0: of the whole tensor, whose blocks a shard may cut
};

class CastList {
 public:
  // Sets the arguments of a call that concern the index-th tensor. It returns false where the call
  // leaves the tensor out.
  using Bind = std::function<bool(size_t, CallArguments&)>;
  struct Call {
    bool first_step = false;  // delayed scales are taken from the tensors
    float8_nccl_comm ranks = nullptr;
    AmaxReducer reduce = nullptr;
    const uint32_t* noop_flag = nullptr;  // of tensors whose kernels have one
    void* workspace = nullptr;
    void* launch_counts = nullptr;  // the reserved bytes, wherever they are
    Stream stream = nullptr;
  };

  [[nodiscard]] static Result<CastList> plan(const std::shared_ptr<Context>& context,
                                             std::span<const ListedTensor> tensors);

  // A workspace begins with the reserved bytes (plan/layout.hpp), unless there is none.
  [[nodiscard]] size_t workspace_bytes() const { return workspace_bytes_; }
  // The launches of kernels that cast all tensors, those without a fixed size with m rows, in a step
  // that is not the first one.
  [[nodiscard]] size_t launches(int64_t m) const;
  // Casts the tensors. Of those over ranks it reads the maxima, of others it finds them.
  [[nodiscard]] Status run(const Bind& bind, const Call& call) const;
  // Finds the maxima of the shards.
  [[nodiscard]] Status find(const Bind& bind, Stream stream) const;

 private:
  // A matrix of a launch: a tensor, and what is done to it.
  struct Member {
    size_t tensor;
    CastOperand operand;
  };
  struct Group {
    QuantizeList list;
    std::vector<Member> members;
    bool over_ranks;
    bool delayed;
  };
  struct Listed {
    ShardWords words;
    size_t first_word;         // of its linear's words in a first step over ranks
    size_t first_slot, slots;  // the tensor's own among its linear's scale slots
    bool hold;
  };
  using Operands = std::array<QuantizeOperand, kernels::kMaxListed>;
  CastList() = default;
  [[nodiscard]] static Result<std::vector<Group>> groups(const std::shared_ptr<Context>& context,
                                                         std::span<const ListedTensor> tensors,
                                                         bool first);
  [[nodiscard]] std::span<const QuantizeOperand> bind_group(const Bind& bind, const Group& group,
                                                            uint32_t* recorded,
                                                            Operands& operands) const;
  // `recorded` has words of the linears' slots, which a launch raises to the maxima and does nothing
  // else of use; it is null in a cast.
  [[nodiscard]] Status run_groups(const Bind& bind, const Call& call, bool first,
                                  uint32_t* recorded) const;
  [[nodiscard]] Status find_first_scales(const Bind& bind, const Call& call) const;
  [[nodiscard]] Status clear(const Bind& bind, Slot slot, int64_t ShardWords::*count,
                             Stream stream) const;

  std::shared_ptr<Context> context_;
  std::vector<Listed> tensors_;
  std::vector<Group> groups_;
  std::vector<Group> first_groups_;  // of a first step, where a tensor has delayed scaling
  const Kernel* scale_update_ = nullptr;
  size_t first_count_ = 0;  // words of all linears in a first step over ranks
  size_t scratch_ = 0;      // where the launches' scratch begins in the workspace, in bytes
  size_t first_words_ = 0;  // where the words of a first step over ranks begin, in bytes
  size_t workspace_bytes_ = 0;
};

}  // namespace f8::runtime
