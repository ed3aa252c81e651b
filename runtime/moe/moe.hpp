// The MLP of SwiGLU experts: y = w2_e (silu(gate) up) of each row of expert e, where gate and up are the
// two halves of w13_e x. It is two expert linears (runtime/experts/experts.hpp) whose casts read what
// comes before them: rows of tokens by their index, silu(gate) up and its gradients, none of which is in
// memory. A plan is immutable and shared between threads.
#pragma once

#include <array>
#include <memory>
#include <optional>

#include "float8/moe.h"
#include "runtime/device/calls/call_memory.hpp"
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
  bool needs_grad_w13 = true;     // false: frozen weights, neither dw13 nor dw3 is ever wanted
  bool needs_grad_w2 = true;
  NonFinite non_finite = NonFinite::kPropagate;
  int sm_limit = 0;
  std::array<decltype(ExpertsDesc::configs), 2> configs = {};  // of w13 and of w2
};

using MoeForwardCall = float8_moe_forward_args;
using MoeBackwardCall = float8_moe_backward_args;

// By float8_moe_buffer.
struct MoeBuffer {
  const char* name;
  float8_buffer float8_moe_buffers::*at;
};
inline constexpr std::array<MoeBuffer, 6> kMoeBuffers = {
    {{"buffers.gate_up", &float8_moe_buffers::gate_up},
     {"buffers.saved_of_w13", &float8_moe_buffers::saved_of_w13},
     {"buffers.saved_of_w2", &float8_moe_buffers::saved_of_w2},
     {"buffers.hidden_grad", &float8_moe_buffers::hidden_grad},
     {"buffers.gate_up_grad_q", &float8_moe_buffers::gate_up_grad_q},
     {"buffers.gate_up_grad_qt", &float8_moe_buffers::gate_up_grad_qt}}};

class Moe {
 public:
  [[nodiscard]] static Result<std::shared_ptr<const Moe>> plan(
      const std::shared_ptr<Context>& context, const MoeDesc& desc);

  [[nodiscard]] int64_t m_max() const { return desc_.m_max; }
  [[nodiscard]] size_t layout_bytes() const { return w13_->layout_bytes(); }
  // What any call needs, and what a call does, whose part is a known one.
  [[nodiscard]] size_t workspace_bytes() const { return workspace_bytes_; }
  [[nodiscard]] size_t bytes_of(const MoeForwardCall& call) const { return layout_of(call).bytes; }
  [[nodiscard]] size_t bytes_of(const MoeBackwardCall& call) const { return layout_of(call).bytes; }
  // By float8_moe_call.
  [[nodiscard]] size_t call_bytes(int32_t call) const;
  // The first three buffers, one behind the other.
  [[nodiscard]] size_t saved_bytes() const { return saved_bytes_; }
  // By float8_moe_buffer.
  [[nodiscard]] size_t buffer_bytes(int32_t buffer) const {
    return buffer_bytes(buffer, desc_.m_max);
  }
  [[nodiscard]] size_t buffer_bytes(int32_t buffer, int64_t m) const;
  // The expert linears of w13 and of w2.
  [[nodiscard]] const std::shared_ptr<const Experts>& w13() const { return w13_; }
  [[nodiscard]] const std::shared_ptr<const Experts>& w2() const { return w2_; }
  [[nodiscard]] Status forward(const MoeForwardCall& call, Stream stream) const;
  [[nodiscard]] Status backward(const MoeBackwardCall& call, Stream stream) const;

 private:
  using Buffers = std::array<float8_buffer, kMoeBuffers.size()>;
  // What a kind of calls has in its workspace: the blocks of both linears, gate and up where they are not
  // saved, and in a whole backward the gradient of silu(gate) up.
  struct Layout {
    BlockOffsets w13, w2;
    std::optional<size_t> gate_up, hidden_grad;
    size_t bytes = 0;
  };
  static constexpr size_t kCalls = FLOAT8_MOE_EVALUATE + 1;

  Moe(std::shared_ptr<Context> context, MoeDesc desc, std::shared_ptr<const Experts> w13,
      std::shared_ptr<const Experts> w2);
  [[nodiscard]] Layout lay_out(int32_t call, bool weights_given) const;
  [[nodiscard]] const Layout& layout_of(const MoeForwardCall& call) const;
  [[nodiscard]] const Layout& layout_of(const MoeBackwardCall& call) const;
  template <class Call>
  [[nodiscard]] Buffers buffers_of(const Call& call) const;
  // A backward's call reads these.
  [[nodiscard]] bool reads_w13(const MoeBackwardCall& call) const;
  [[nodiscard]] bool reads_w2(const MoeBackwardCall& call) const;
  template <class Call>
  [[nodiscard]] Status check_common(const char* args, const Call& call, bool reads_x,
                                    bool reads_w13, bool reads_w2) const;
  template <class Call>
  void add_common(CallMemory& memory, const Call& call, bool reads_x, bool reads_w13,
                  bool reads_w2) const;
  // The buffers, as sets of bits: those without which there is no call, and those that it may be given.
  template <class Call>
  [[nodiscard]] Status add_buffers(CallMemory& memory, const char* args, const Call& call,
                                   unsigned needed, unsigned read, unsigned written) const;
  [[nodiscard]] Status check_results(const MoeBackwardCall& call) const;
  [[nodiscard]] Status check(const MoeForwardCall& call, Stream stream) const;
  [[nodiscard]] Status check(const MoeBackwardCall& call, Stream stream) const;
  // silu(gate) up as the rows of an input, where `gate_up` is [m][2 F].
  [[nodiscard]] kernels::RowOperands swiglu_of(const float8_matrix& gate_up) const;
  [[nodiscard]] float8_matrix gate_up(void* data) const;
  [[nodiscard]] Status backward_of_w2(const MoeBackwardCall& call, const Buffers& buffers,
                                      Stream stream) const;
  [[nodiscard]] Status backward_of_w13(const MoeBackwardCall& call, const Buffers& buffers,
                                       Stream stream) const;

  std::shared_ptr<Context> context_;
  MoeDesc desc_;
  std::shared_ptr<const Experts> w13_, w2_;
  std::array<std::array<Layout, 2>, kCalls> layouts_;  // by float8_moe_call, and by weights_given
  std::array<size_t, 3> saved_at_ = {};                // places in `saved`
  size_t saved_bytes_ = 0, workspace_bytes_ = 0;
};

}  // namespace f8::runtime
