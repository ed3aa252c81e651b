// Delayed scaling: the scale state of a model's linears, which is one tensor of bytes of the
// caller's (float8.h, "delayed scaling"). All linears of a state have one recipe.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "float8/float8.h"
#include "python/shim/plans/plans.hpp"

namespace float8_torch {

// A state as an op has it: its bytes, and how they are laid out and updated, as one integer
// (python/float8/torch/scales.py): bits 0-31 the linears, 32-47 the history, 48-55 the margin; bit
// 56 in a graph that was exported while the linear had no scales: its calls are first ones for ever.
class Scales {
 public:
  // `tensor` is the state, or the part of it whose offset names a linear: 16 bytes times its index.
  Scales(const Tensor& tensor, int64_t layout, Config config, const Place& place);

  // Throws where the tensor that this was made of is not all of the state.
  void check_whole(const Tensor& tensor) const;
  // The slots of the linear that the tensor names. `any` is a plan of the recipe.
  [[nodiscard]] float8_scale_slots slots(const AnyPlan& any) const;
  // Tells whether this step is the linear's first one: an operand of it has no scale yet.
  [[nodiscard]] bool first_step() const;
  // Says which linears these are.
  void set_first_steps(const std::vector<int64_t>& linears) const;
  // Finds them in the state, on the host.
  [[nodiscard]] std::vector<int64_t> find_first_steps() const;

  // Before the first call of a linear there is nothing to end: then it does nothing. The step is
  // dropped where found_inf is not 0.
  void sync(const float* found_inf) const;
  void init() const;
  [[nodiscard]] int64_t bytes() const;

 private:
  // The layout's plan, of which the tensor's storage is a state.
  [[nodiscard]] float8_scales* plan_of_state(const AnyPlan& any) const;
  [[nodiscard]] float8_scales* handle(const AnyPlan& plan) const;

  Place place_;
  uint64_t config_;
  int64_t layout_;
  bool exported_first_;
  char* state_ = nullptr;
  int64_t offset_ = 0;  // of the tensor in the state, in bytes
  int64_t bytes_ = 0;   // of the tensor's storage
};

// Throws unless the tensor has the form of a scale state or of a part of one: bytes that follow each
// other.
void check_form_of_state(const Tensor& tensor);

// Says of the state at `to` what is known of the one at `from`: which linears have their first step to
// come; of none if `from` is null.
void copy_first_steps(const void* from, const void* to);

// Forgets what is known of a state whose memory goes: another tensor may get it. It is for Python's
// ctypes.
extern "C" [[gnu::visibility("default")]] void float8_forget_state(const void* state);

// The ops of a scale state (ops.cpp says what they do).
int64_t scales_bytes(int64_t config, int64_t layout);
void scales_init(const Tensor& state, int64_t config, int64_t layout);
void scales_set_first(const Tensor& state, int64_t config, int64_t layout,
                      std::vector<int64_t> linears);
std::vector<int64_t> scales_find_first(const Tensor& state, int64_t config, int64_t layout);
void scales_sync(const Tensor& state, int64_t config, int64_t layout,
                 const std::optional<Tensor>& found_inf);

}  // namespace float8_torch
