// The state of delayed scaling on the device, for all linears of a model in one buffer of the
// caller's, so that one all-reduce and one kernel serve them all (recipes/scales/delayed.hpp has the
// rule). A linear has Linear::scale_slots() slots; a model's are those of its linears end to end.
//
//   state      := amax scale history format non_finite     each at a multiple of 256 bytes
//   amax       := u32[count]            this step's maxima, bits of |x| as fp32; casts raise them
//   scale      := f32[count][8]         [0] the scale to cast with, [4] its inverse
//   history    := u32[length][count]    newest first; 0: none yet
//   format     := u32[count]            1: e5m2, else e4m3; 2: power of two
//   non_finite := u32[count]            steps whose amax was not finite
//
// It is plain data: a copy of the buffer, taken when its stream is idle, resumes bitwise, and
// scale_state.hpp keeps it between runs. A step is forward and backward of all linears, sync_amax()
// of amaxes() if there are ranks, then update(), or discard() for a step that does not count.
#pragma once

#include <span>
#include <vector>

#include "codegen/kernels/kernel_args.cuh"
#include "float8/float8.h"
#include "recipes/scales/delayed.hpp"
#include "runtime/device/calls/call_memory.hpp"
#include "runtime/device/context.hpp"

namespace f8::runtime {

// A linear's part of the state, or nothing.
struct ScaleSlots {
  uint32_t* amax = nullptr;  // null: the casts of an evaluation, which record nothing
  const float* scale = nullptr;
  const uint32_t* format = nullptr;  // read in a first step over ranks

  // The C interface has the same as `opaque`, in this order.
  operator float8_scale_slots() const {  // NOLINT: implicit on purpose
    return {{amax, const_cast<float*>(scale), const_cast<uint32_t*>(format)}};
  }
  [[nodiscard]] static ScaleSlots of(const float8_scale_slots& slots) {
    return {.amax = static_cast<uint32_t*>(slots.opaque[0]),
            .scale = static_cast<const float*>(slots.opaque[1]),
            .format = static_cast<const uint32_t*>(slots.opaque[2])};
  }
};

// Replaces `count` amaxes on the device by their maxima over ranks, in stream order: sync_amax() of
// runtime/distributed.
using AmaxReducer = Status (*)(uint32_t* amax_bits, size_t count, float8_nccl_comm ranks,
                               Stream stream);

// Refuses a call without first_step on a state that was only initialised, as far as the
// context keeps records.
[[nodiscard]] Status check_not_fresh(Context& context, const float8_scale_slots& scales);

// Launches one update of scales, as DelayedScales::update() does.
[[nodiscard]] Status launch_scale_update(const Context::State& context, const Kernel& kernel,
                                         const kernels::ScaleUpdateArgs& args, Stream stream);
// The arguments for a first step over ranks: the scales of `count` slots come from the amaxes of
// that step alone, as in dynamic scaling. `scratch` has 2 * count words.
[[nodiscard]] kernels::ScaleUpdateArgs first_scale_args(uint32_t* amax, uint32_t* scratch,
                                                        size_t count, const ScaleSlots& slots,
                                                        bool hold);
inline constexpr size_t kFirstWords = 3;  // for each slot: its amax, and its part of the scratch

// The offsets of the parts of a state, in bytes.
struct ScaleLayout {
  size_t amax = 0;
  size_t scale = 0;
  size_t history = 0;
  size_t format = 0;
  size_t non_finite = 0;
  size_t bytes = 0;
};
[[nodiscard]] ScaleLayout scale_layout(size_t slots, int history);

class DelayedScales {
 public:
  // Without slots there is no state: bytes() is 0, and nothing is launched.
  [[nodiscard]] static Result<DelayedScales> plan(const std::shared_ptr<Context>& context,
                                                  std::span<const DelayedSlot> slots,
                                                  const DelayedOptions& options = {});

  [[nodiscard]] size_t bytes() const { return layout_.bytes; }
  [[nodiscard]] size_t count() const { return slots_.size(); }
  [[nodiscard]] const ScaleLayout& layout() const { return layout_; }
  [[nodiscard]] std::span<const DelayedSlot> slots() const { return slots_; }
  [[nodiscard]] const DelayedOptions& options() const { return options_; }
  [[nodiscard]] const std::shared_ptr<Context>& context() const { return context_; }

  // Checks as far as possible that `state` is one: the calls below and scale_checkpoint.hpp's do
  // so.
  [[nodiscard]] Status check(const char* call, const void* state, Stream stream) const;
  // Gives a state in host memory, as init() leaves it on the device.
  [[nodiscard]] std::vector<uint32_t> initial() const;

  // Sets all scales to 1 and empties the histories. It copies from the host, so it does not belong
  // into a graph.
  [[nodiscard]] Status init(void* state, Stream stream) const;
  // Gives count() words, to be reduced with MAX over ranks between backward and update().
  [[nodiscard]] uint32_t* amaxes(void* state) const;
  // Gives the slots of a linear whose first one is `first`.
  [[nodiscard]] ScaleSlots slots(void* state, size_t first) const;
  // Gives the history of each slot, newest first. It waits for the stream.
  [[nodiscard]] Result<std::vector<std::vector<uint32_t>>> histories(const void* state,
                                                                     Stream stream) const;
  // Sets *found_inf, in device memory, to 1 if an amax of the step is not finite, and leaves it
  // alone otherwise.
  [[nodiscard]] Status find_inf(const void* state, float* found_inf, Stream stream) const;
  // Ends a step, in one launch for all slots, and zeroes the amaxes. A step with *found_inf != 0,
  // in device memory, is discarded. So is one with an amax that is not finite, unless the options
  // say kSaturate.
  [[nodiscard]] Status update(void* state, Stream stream, const float* found_inf = nullptr) const;
  // Drops what the step recorded.
  [[nodiscard]] Status discard(void* state, Stream stream) const;

 private:
  DelayedScales() = default;
  [[nodiscard]] Status check_found_inf(const char* call, const float* found_inf, Access access,
                                       Stream stream) const;
  [[nodiscard]] kernels::ScaleUpdateArgs update_args(void* state) const;
  [[nodiscard]] Status launch_update(const kernels::ScaleUpdateArgs& args, Stream stream) const;

  std::shared_ptr<Context> context_;
  const Kernel* kernel_ = nullptr;
  const Kernel* found_inf_kernel_ = nullptr;
  std::vector<DelayedSlot> slots_;
  DelayedOptions options_;
  ScaleLayout layout_;
};

}  // namespace f8::runtime
