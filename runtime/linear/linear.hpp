// A linear layer's forward and backward under a recipe: y[M,N] = x[M,K] w[N,K]^T. Plan once, run
// often.
//
// A plan is immutable and shared between threads; it owns no tensor. The caller gives, for each
// call, the tensors (row-major, 16-byte aligned), a workspace (between calls it is free for other
// work, except for its reserved bytes: see plan/layout.hpp) and, for training, a saved buffer that
// forward fills and backward reads.
//
// Tensors that a recipe keeps in high precision in a backward GEMM are not saved: backward reads x
// or w itself. With `recompute` scales of whole tensors alone are saved: backward casts x and w again. A weight that stays
// the same for several calls (gradient accumulation) can be cast once, by a Quantizer, and delayed
// scaling takes and leaves its state in ScaleSlots.
#pragma once

#include <memory>
#include <vector>

#include "float8/float8.h"
#include "runtime/device/step.hpp"
#include "runtime/linear/plan/linear_desc.hpp"
#include "runtime/quantize/cast_counters.hpp"
#include "runtime/quantize/delayed_scales.hpp"

namespace f8::runtime {

// A call's arguments are those of the C interface, which float8.h describes. Here m has no default,
// and nothing reads struct_size and the sizes of buffers, which the C interface checks.
using ForwardCall = float8_forward_args;
using BackwardCall = float8_backward_args;

struct ChosenKernels;  // plan/kernels.hpp

class Linear {
 public:
  // Chooses the kernels, compiles what is not there yet, and plans. It starts no process.
  [[nodiscard]] static Result<std::shared_ptr<const Linear>> plan(
      const std::shared_ptr<Context>& context, const LinearDesc& desc);
  // The same with kernels that were chosen for `desc` and compiled before.
  [[nodiscard]] static Result<std::shared_ptr<const Linear>> plan(
      const std::shared_ptr<Context>& context, const LinearDesc& desc, ChosenKernels chosen);
  ~Linear();

  // Any call needs so much, or one that is given these tensors in fp8. In backward x has the copy that is read.
  [[nodiscard]] size_t workspace_bytes() const;
  [[nodiscard]] size_t forward_workspace_bytes(bool x_fp8, bool w_fp8) const;
  [[nodiscard]] size_t backward_workspace_bytes(bool x_fp8, bool w_fp8, bool dy_fp8) const;
  [[nodiscard]] size_t workspace_bytes(const ForwardCall& call) const;
  [[nodiscard]] size_t workspace_bytes(const BackwardCall& call) const;
  // Without the parts of the weight (`w_fp8`) and of the input (`x_fp8`) that calls are given
  // in fp8. May be 0: then null serves, and a forward without `saved` is as good.
  [[nodiscard]] size_t saved_bytes(bool w_fp8 = false, bool x_fp8 = false) const;
  // The slot of DelayedScales for each operand with delayed scaling, in the order of ScaleSlots.
  [[nodiscard]] const std::vector<DelayedSlot>& scale_slots() const;

  // The views of what a forward left; see float8_linear_saved_tensors.
  [[nodiscard]] float8_tensor saved_x(const void* saved, int64_t m) const;
  [[nodiscard]] float8_tensor saved_w(const void* saved) const;

  // Calls with ranks need `reduce`, which reduces amaxes over them.
  [[nodiscard]] Status forward(const ForwardCall& call, Stream stream,
                               AmaxReducer reduce = nullptr) const;
  [[nodiscard]] Status backward(const BackwardCall& call, Stream stream,
                                AmaxReducer reduce = nullptr) const;

  // The same work as forward() and backward(), launch by launch, for measuring on one rank. Steps
  // are good for as long as the linear. A call that cannot run gives one step, which returns the
  // error.
  [[nodiscard]] std::vector<Step> forward_steps(const ForwardCall& call) const;
  [[nodiscard]] std::vector<Step> backward_steps(const BackwardCall& call) const;

  [[nodiscard]] const std::shared_ptr<Context>& context() const;
  [[nodiscard]] const LinearDesc& desc() const;
  [[nodiscard]] const GemmChoice& choice(Gemm gemm) const;

 private:
  struct State;
  explicit Linear(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace f8::runtime
