// The state of a planned linear: it checks a call's arguments and binds them to launches.
#pragma once

#include <memory>

#include "runtime/device/calls/call_memory.hpp"
#include "runtime/linear/linear.hpp"
#include "runtime/linear/plan/plan_launches.hpp"

namespace f8::runtime {

struct Linear::State {
  std::shared_ptr<Context> context;
  LinearDesc desc;
  LinearKernels kernels;
  const Driver* driver = nullptr;
  CUcontext primary = nullptr;
  LinearGemms gemms;
  LinearLayout layout;
  LinearLaunches launches;

  [[nodiscard]] bool is_fp8(Gemm g) const { return desc.recipe.at(g).is_fp8(); }

  // Check all of a call but its memory.
  [[nodiscard]] Status check_arguments(const ForwardCall& call) const;
  [[nodiscard]] Status check_arguments(const BackwardCall& call) const;
  [[nodiscard]] bool reads_dy(const BackwardCall& call) const;
  // The copies of dy.fp8 that a backward reads.
  struct DyCopies {
    bool q = false, qt = false;
  };
  [[nodiscard]] DyCopies copies_of_dy(const BackwardCall& call) const;
  // Backward casts x again, though the call has the x.fp8 of the forward: it has no qt.
  [[nodiscard]] bool casts_x_tensor(const ForwardCall&) const { return false; }
  [[nodiscard]] bool casts_x_tensor(const BackwardCall& call) const {
    return desc.recompute && call.x.fp8 != nullptr && call.x.fp8->qt == nullptr;
  }
  [[nodiscard]] Status check(const ForwardCall& call) const;
  [[nodiscard]] Status check(const BackwardCall& call) const;
  template <class Call>
  [[nodiscard]] Status check_counters(const Call& call) const;
  template <class Call>
  [[nodiscard]] Status check_scales(const Call& call) const;
  template <class Call>
  [[nodiscard]] Status check_tensors(const Call& call, bool q) const;
  // Compare a call with earlier ones (CallRecords).
  [[nodiscard]] Status check_records(const ForwardCall& call) const;
  [[nodiscard]] Status check_records(const BackwardCall& call) const;
  template <class Call>
  [[nodiscard]] Status check_fresh_scales(const Call& call) const;

  // Lists the memory that a call touches.
  [[nodiscard]] CallMemory memory(const ForwardCall& call) const;
  [[nodiscard]] CallMemory memory(const BackwardCall& call) const;
  template <class Call>
  [[nodiscard]] CallMemory common_memory(const Call& call) const;
  template <class Call>
  void add_copies(CallMemory& memory, const Call& call, Access saved, bool q) const;
  // Does what only a context that checks pointers, or an emulated one, does.
  template <class Call>
  [[nodiscard]] Status check_device(const char* name, const Call& call, Stream stream) const {
    if (!context->state().keeps_records()) [[likely]] {
      return {};
    }
    F8_TRY(check(call));
    F8_TRY(check_records(call));
    return memory(call).check_device(name, *context, stream);
  }

  // Gives the view of a tensor's transposed copy in `saved`.
  [[nodiscard]] float8_tensor saved_view(Tensor tensor, const Fp8Refs& refs, const void* saved,
                                         int64_t rows) const;

  // The bytes of the workspace that a call writes at most.
  [[nodiscard]] size_t workspace_bytes(const ForwardCall& call) const {
    return layout.forward_bytes.of(call.x.fp8 != nullptr, call.w.fp8 != nullptr, true);
  }
  [[nodiscard]] size_t workspace_bytes(const BackwardCall& call) const {
    const bool x = call.x.fp8 != nullptr && !casts_x_tensor(call);
    return layout.backward_bytes.of(x, call.w.fp8 != nullptr, call.dy.fp8 != nullptr);
  }

  // The launches of a call, and what it gives to them.
  CallLaunches bind(const ForwardCall& call, CallArguments& to) const;
  CallLaunches bind(const BackwardCall& call, CallArguments& to) const;
  template <class Call>
  CallKind bind_inputs(const Call& call, CallArguments& to) const;
  // `saved` without the input's part, as the offsets of the layout count it.
  [[nodiscard]] const void* shifted_saved(const void* saved) const {
    return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(saved) -
                                         layout.saved_input_bytes);
  }
  template <class Call>
  [[nodiscard]] Status run(const char* name, const Call& call, Stream stream,
                           AmaxReducer reduce) const;
  template <class Call>
  [[nodiscard]] std::vector<Step> steps(const char* name, const Call& call) const;
  // The bits of a call's kind that delayed scaling decides.
  [[nodiscard]] CallKind step_kind(bool first_step, const CallArguments& call) const {
    if (!first_step || kernels.slots.empty()) return 0;
    return call.ranks == nullptr ? kFirstStep : kFirstStep | kOverRanks;
  }
  template <class Call>
  void set_common(const Call& call, CallArguments& to) const {
    to.scales = ScaleSlots::of(call.scales);
    to.ranks = step_of(call).ranks;
    to.set(Slot::kWorkspace, call.workspace.data);
    to.set(Slot::kLaunchCounts, launch_counts(call));
    to.set(Slot::kAmax, to.scales.amax);
    to.set(Slot::kScale, to.scales.scale);
    to.set(Slot::kCounters, call.counters);
  }
};

}  // namespace f8::runtime
