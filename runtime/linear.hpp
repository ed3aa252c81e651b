// A linear layer's forward and backward under a recipe: y[M,N] = x[M,K] w[N,K]^T. Plan once, run
// often.
//
// A plan is immutable and shared between threads; it owns no tensor. The caller gives, for each
// call, the tensors (bf16, dense, row-major, 16-byte aligned), a workspace (scratch, free again
// when the call's work on the stream is done) and, for training, a saved buffer that forward fills
// and backward reads.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/gemm.hpp"

namespace f8::runtime {

struct LinearDesc {
  Shape shape;    // m: the largest M that a call may have
  Recipe recipe;  // tensorwise and rowwise in this version; others are kUnsupported
  Dtype grad_weight_dtype = Dtype::kBf16;            // or f32
  std::array<std::optional<GemmChoice>, 3> choices;  // indexed by Gemm; empty: GemmPlan::choose
};

struct ForwardCall {
  const void* x = nullptr;  // [m][K] bf16
  const void* w = nullptr;  // [N][K] bf16
  void* y = nullptr;        // [m][N] bf16
  void* saved = nullptr;    // saved_bytes(), for backward; null: there will be no backward
  int64_t m = 0;
};

struct BackwardCall {
  const void* dy = nullptr;     // [m][N] bf16
  const void* saved = nullptr;  // as forward left it
  void* dx = nullptr;           // [m][K] bf16, or null: not wanted
  void* dw = nullptr;           // [N][K], or null
  int64_t m = 0;
};

// One launch of a call, in order: what `bench linear` times one by one.
struct Step {
  std::string name;  // "amax x,w", "cast x,w", "gemm output", ...
  std::function<Status(Stream)> launch;
};

class Linear {
 public:
  [[nodiscard]] static Result<std::shared_ptr<const Linear>> plan(
      const std::shared_ptr<Context>& context, const LinearDesc& desc);
  ~Linear();

  [[nodiscard]] size_t workspace_bytes() const;
  [[nodiscard]] size_t saved_bytes() const;
  [[nodiscard]] Status forward(const ForwardCall& call, void* workspace, Stream stream) const;
  [[nodiscard]] Status backward(const BackwardCall& call, void* workspace, Stream stream) const;

  // The same work as forward() and backward(), launch by launch, for measuring. Steps are good for
  // as long as the linear. A call that cannot run gives one step, which returns the error.
  [[nodiscard]] std::vector<Step> forward_steps(const ForwardCall& call, void* workspace) const;
  [[nodiscard]] std::vector<Step> backward_steps(const BackwardCall& call, void* workspace) const;

  [[nodiscard]] const LinearDesc& desc() const;
  [[nodiscard]] const GemmChoice& choice(Gemm gemm) const;

 private:
  struct State;
  explicit Linear(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace f8::runtime
