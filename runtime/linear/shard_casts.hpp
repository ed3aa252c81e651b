// The casts of a tensor that ranks hold by rows, a shard each, to the bits of the whole tensor's: a
// call finds the shard's maxima, the caller replaces those that span ranks by their maxima over the
// ranks, and a second call casts with them.
//
//   amax      := columns | tensor    of the shard, then over ranks; a part that no scale needs is
//                                    not there
//   row_amax  := rows                of the shard, and so of the tensor
//
// Ranks that hold the tensor by columns reduce row_amax and the tensor's word instead.
//
// All are the bits of |x| as fp32. Maxima of blocks are found by the cast, since a shard has whole
// blocks.
#pragma once

#include <vector>

#include "runtime/linear/kernels.hpp"
#include "runtime/quantize/quantize.hpp"

namespace f8::runtime {

class ShardCasts {
 public:
  // `passes` make the copies of one tensor. `rows` is the most that a shard has.
  [[nodiscard]] static Result<ShardCasts> plan(Context& context,
                                               const std::vector<KernelPass>& passes, int64_t rows,
                                               int64_t cols);

  [[nodiscard]] int64_t amax_words() const { return amax_words_; }
  [[nodiscard]] int64_t row_amax_words() const { return row_amax_words_; }
  // Both take row_amax and col_amax of the operand for row_amax and amax.
  [[nodiscard]] Status find(const Context::State& context, QuantizeOperand shard,
                            Stream stream) const;
  [[nodiscard]] Status cast(const Context::State& context, QuantizeOperand shard,
                            Stream stream) const;

 private:
  struct Pass {
    const Kernel* amax = nullptr;  // null: the cast needs none
    const Kernel* cast = nullptr;
  };
  void set_tensor_word(QuantizeOperand& shard) const;

  std::vector<Pass> passes_;
  int64_t columns_ = 0;  // words of the tensor's columns
  int64_t amax_words_ = 0;
  int64_t row_amax_words_ = 0;
};

}  // namespace f8::runtime
