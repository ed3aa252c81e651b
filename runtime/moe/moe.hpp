// The MLP of SwiGLU experts: y = w2_e (silu(gate) up) of each row of expert e, where gate and up are the
// two halves of w13_e x. It is two expert linears (runtime/experts/experts.hpp) whose casts read what
// comes before them: rows of tokens by their index, silu(gate) up and its gradients, none of which is in
// memory. A plan is immutable and shared between threads.
#pragma once

#include "float8/moe.h"
#include "runtime/device/call_memory.hpp"
#include "runtime/experts/experts.hpp"

namespace f8::runtime {

struct MoeDesc {
  int64_t m_max = 0;   // the most rows of all experts
  int64_t dim = 0;     // D, of x and y
  int64_t hidden = 0;  // F
  int64_t experts = 1;
  Recipe recipe;
  Dtype tensor_dtype = Dtype::kBf16;
  Dtype grad_weight_dtype = Dtype::kBf16;
  bool accumulate_grad_weight = false;
  bool recompute_weight = false;  // as in ExpertsDesc
  bool rows_in_place = false;     // x and dy have the experts' rows themselves
  bool w3_apart = false;          // w13 and dw13 are two tensors each
  NonFinite non_finite = NonFinite::kPropagate;
  int sm_limit = 0;
};

using MoeForwardCall = float8_moe_forward_args;
using MoeBackwardCall = float8_moe_backward_args;

class Moe {
 public:
  [[nodiscard]] static Result<std::shared_ptr<const Moe>> plan(
      const std::shared_ptr<Context>& context, const MoeDesc& desc);

  [[nodiscard]] size_t layout_bytes() const { return w13_->layout_bytes(); }
  [[nodiscard]] size_t workspace_bytes() const { return workspace_bytes_; }
  // gate and up, and what the linears save.
  [[nodiscard]] size_t saved_bytes() const { return saved_bytes_; }
  // The expert linears of w13 and of w2.
  [[nodiscard]] const std::shared_ptr<const Experts>& w13() const { return w13_; }
  [[nodiscard]] const std::shared_ptr<const Experts>& w2() const { return w2_; }
  [[nodiscard]] Status forward(const MoeForwardCall& call, Stream stream) const;
  [[nodiscard]] Status backward(const MoeBackwardCall& call, Stream stream) const;

 private:
  Moe(std::shared_ptr<Context> context, MoeDesc desc, std::shared_ptr<const Experts> w13,
      std::shared_ptr<const Experts> w2);
  template <class Call>
  [[nodiscard]] Status check_common(const char* args, const Call& call, bool reads_weights) const;
  template <class Call>
  void add_common(CallMemory& memory, const Call& call) const;
  [[nodiscard]] Status check(const MoeForwardCall& call, Stream stream) const;
  [[nodiscard]] Status check(const MoeBackwardCall& call, Stream stream) const;
  // silu(gate) up as the rows of an input, where `gate_up` is [m][2 F].
  [[nodiscard]] kernels::RowOperands swiglu_of(const float8_matrix& gate_up) const;
  [[nodiscard]] float8_matrix gate_up(const float8_buffer& saved) const;

  std::shared_ptr<Context> context_;
  MoeDesc desc_;
  std::shared_ptr<const Experts> w13_, w2_;
  size_t saved_of_w13_ = 0, saved_of_w2_ = 0;          // places in `saved`
  size_t forward_scratch_ = 0, backward_scratch_ = 0;  // and in the workspace
  size_t saved_bytes_ = 0, workspace_bytes_ = 0;
};

}  // namespace f8::runtime
