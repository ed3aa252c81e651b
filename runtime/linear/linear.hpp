// A linear layer's forward and backward under a recipe: y[M,N] = x[M,K] w[N,K]^T. Plan once, run
// often.
//
// A plan is immutable and shared between threads; it owns no tensor. The caller gives, for each
// call, the tensors (row-major, 16-byte aligned), a workspace (between calls it is free for other
// work, except for its reserved bytes: see layout.hpp) and, for training, a saved buffer that
// forward fills and backward reads.
//
// Tensors that a recipe keeps in high precision in a backward GEMM are not saved: backward reads x
// or w itself. With `recompute` nothing is saved: backward casts x and w again. A weight that stays
// the same for several calls (gradient accumulation) can be cast once, into a weight cache, and
// delayed scaling takes and leaves its state in ScaleSlots.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/gemm/gemm.hpp"
#include "runtime/quantize/cast_counters.hpp"
#include "runtime/quantize/delayed_scales.hpp"

namespace f8::runtime {

struct LinearDesc {
  Shape shape;  // m: the largest M that a call may have
  // Any legal one. What it leaves in high precision is multiplied as it comes, in tensor_dtype with
  // fp32 sums (f32 as fp32, not TF32): "bf16" in a recipe stands for that type.
  Recipe recipe;
  Dtype grad_weight_dtype = Dtype::kBf16;            // or f16, f32; in high precision or f32
  bool bias = false;                                 // y += bias
  bool accumulate_grad_weight = false;               // a call may add to the gradient that is there
  bool needs_grad_input = true;                      // false: a first layer, dx is never wanted
  std::array<std::optional<GemmChoice>, 3> choices;  // indexed by Gemm; empty: GemmPlan::choose
  Dtype tensor_dtype = Dtype::kBf16;                 // or f16, f32: of x, w, dy, y, dx and bias
  // Keep nothing in fp8 between forward and backward: backward reads x (and w, where it has no
  // weight cache) and casts them again, to the same bits. Delayed scales must be those that forward
  // had.
  bool recompute = false;
  // The type of WeightCall::w, where it is not tensor_dtype: f32 master weights go into the cache.
  // The cache is then all that forward and backward need of the weight, unless the recipe has a
  // GEMM in high precision that reads w.
  std::optional<Dtype> master_dtype = {};
  bool bias_grad = false;                // backward may be asked for db
  Dtype bias_grad_dtype = Dtype::kBf16;  // or f16, f32
  // The policy for dynamic scales whose amax is not finite; DelayedOptions has that for delayed
  // ones.
  NonFinite non_finite = NonFinite::kPropagate;
  // Casts add to the counters that a call brings (cast_counters.hpp). It takes some time, and small
  // tensors are cast in two launches.
  bool count = false;
  // cast_weight heeds WeightCall::valid; small weights are then cast in two launches.
  bool weight_flag = false;
  bool operator==(const LinearDesc&) const = default;
};

// Row strides (ld_*) are in elements: 0 where rows follow each other, else at least a row and whole
// 16 bytes.

struct ForwardCall {
  const void* x = nullptr;  // [m][K]
  const void* w = nullptr;  // [N][K]; not read where there is a weight cache and `output` is fp8
  void* y = nullptr;        // [m][N]
  void* saved = nullptr;    // saved_bytes(), for backward; null: no backward, or `recompute`
  int64_t m = 0;
  const void* bias = nullptr;          // [N], where the plan has one
  const void* weight_cache = nullptr;  // as cast_weight left it, or null: cast w
  ScaleSlots scales = {};              // where the recipe has delayed scaling
  bool first_step = false;             // delayed operands are scaled as if dynamic
  int64_t ld_x = 0, ld_w = 0, ld_y = 0;
  CastCounters* counters = nullptr;  // kCountersOfLinear on the device, with LinearDesc::count
  // In a first step: over the ranks that hold the other parts of the tensors. Delayed operands are
  // then scaled as if dynamic over all of them, one reduction of a call's maxima in stream order.
  AmaxReduction ranks = {};
  bool evaluate = false;  // the scale state stays as it is: no amax is recorded, `ranks` not asked
};

struct BackwardCall {
  const void* dy = nullptr;     // [m][N]
  const void* saved = nullptr;  // as forward left it
  void* dx = nullptr;           // [m][K], or null: not wanted
  void* dw = nullptr;           // [N][K] of grad_weight_dtype, or null
  int64_t m = 0;
  const void* x = nullptr;             // where `grad_weight` is in high precision, or `recompute`
  const void* w = nullptr;             // where `grad_input` is, or `recompute` without a cache
  const void* weight_cache = nullptr;  // the one that forward had
  bool accumulate = false;             // dw += instead of dw =; the plan says whether it may
  ScaleSlots scales = {};
  bool first_step = false;
  int64_t ld_dy = 0, ld_dx = 0, ld_dw = 0, ld_x = 0, ld_w = 0;
  // [N] of bias_grad_dtype, or null: the sum of dy over its rows, in fp32 and always in the same
  // order (reference::column_sums), then rounded once. With LinearDesc::bias_grad.
  void* db = nullptr;
  bool accumulate_bias = false;      // db += instead of db =
  CastCounters* counters = nullptr;  // as forward's
  AmaxReduction ranks = {};          // as forward's
};

struct WeightCall {
  const void* w = nullptr;  // [N][K] of master_dtype
  void* cache = nullptr;    // weight_cache_bytes(), written
  ScaleSlots scales = {};
  bool first_step = false;
  int64_t ld_w = 0;
  CastCounters* counters = nullptr;  // as forward's
  // A word on the device: where it is 1, the cache is as it should be and nothing is written; else
  // the weight is cast and then it becomes 1. So a graph of micro-batches may cast in each of them.
  // Null: always cast. One word a linear; invalidate_weights() clears them when weights change.
  // With delayed scaling a cast that is left out does not record its amax, so clear before a step
  // whose update() shall see it. With LinearDesc::weight_flag.
  uint32_t* valid = nullptr;
  AmaxReduction ranks = {};  // as ForwardCall's
};

// `count` words of WeightCall::valid to 0, in stream order: what follows an optimizer's step, and
// what comes before the first cast.
[[nodiscard]] Status invalidate_weights(Context& context, uint32_t* valid, size_t count,
                                        Stream stream);

// One launch of a call, in order: what `bench linear` times one by one.
struct Step {
  std::string name;  // "amax x,w", "cast x,w", "gemm output", ...
  std::function<Status(Stream)> launch;
  double bytes = 0;  // that an amax or cast must move; 0 for what is not bound by memory
};

class Linear {
 public:
  [[nodiscard]] static Result<std::shared_ptr<const Linear>> plan(
      const std::shared_ptr<Context>& context, const LinearDesc& desc);
  ~Linear();

  [[nodiscard]] size_t workspace_bytes() const;
  // Without the weight's part where forward and backward have a weight cache. May be 0: then null
  // serves, and a forward without `saved` is as good.
  [[nodiscard]] size_t saved_bytes(bool weight_cache = false) const;
  [[nodiscard]] size_t weight_cache_bytes() const;  // 0 where the weight is never cast
  // The slot of DelayedScales for each operand with delayed scaling, in the order of ScaleSlots.
  [[nodiscard]] const std::vector<DelayedSlot>& scale_slots() const;

  // The weight's fp8 copies and scales into a buffer that calls use until the weight changes.
  [[nodiscard]] Status cast_weight(const WeightCall& call, void* workspace, Stream stream) const;
  [[nodiscard]] Status forward(const ForwardCall& call, void* workspace, Stream stream) const;
  [[nodiscard]] Status backward(const BackwardCall& call, void* workspace, Stream stream) const;

  // The same work as forward() and backward(), launch by launch, for measuring. Steps are good for
  // as long as the linear. A call that cannot run gives one step, which returns the error.
  [[nodiscard]] std::vector<Step> forward_steps(const ForwardCall& call, void* workspace) const;
  [[nodiscard]] std::vector<Step> backward_steps(const BackwardCall& call, void* workspace) const;
  [[nodiscard]] std::vector<Step> cast_weight_steps(const WeightCall& call, void* workspace) const;

  [[nodiscard]] const std::shared_ptr<Context>& context() const;
  [[nodiscard]] const LinearDesc& desc() const;
  [[nodiscard]] const GemmChoice& choice(Gemm gemm) const;

 private:
  friend class WeightCasts;
  struct State;
  explicit Linear(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace f8::runtime
