// The checks of a group's calls are those of its linears, with the memory of all of them.
#include "runtime/lists/group_state.hpp"

#include <algorithm>

#include "runtime/linear/fp8_tensor.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kForward = "float8_linear_group_forward";
constexpr const char* kBackward = "float8_linear_group_backward";

bool has_all_weights(const LinearGroupCall& call) {
  return std::all_of(call.linears, call.linears + call.count,
                     [](const GroupedLinearCall& linear) { return linear.w.fp8 != nullptr; });
}

ForwardCall forward_call(const LinearGroupCall& call, size_t i) {
  const GroupedLinearCall& of = call.linears[i];
  return {.m = call.m,
          .x = call.x,
          .w = of.w,
          .bias = of.bias,
          .y = of.y,
          .saved = call.saved,
          .step = call.step,
          .scales = of.scales,
          .counters = of.counters};
}

// The first linear writes dx, the others add to it.
BackwardCall backward_call(const LinearGroupCall& call, size_t i) {
  const GroupedLinearCall& of = call.linears[i];
  BackwardCall out{.m = call.m,
                   .dy = of.dy,
                   .x = call.x,
                   .w = of.w,
                   .dx = call.dx,
                   .dw = of.dw,
                   .db = of.db,
                   .saved = call.saved,
                   .step = call.step,
                   .scales = of.scales,
                   .counters = of.counters};
  if (i > 0) out.dx.accumulate = 1;
  return out;
}

}  // namespace

Status LinearGroup::State::check_call(const LinearGroupCall& call) const {
  if (call.count != linears.size()) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "float8_linear_group_args.count is {}, the group has {} linears", call.count,
                linears.size());
  }
  if (call.workspace.data == nullptr && layout.workspace_bytes > 0 && call.m > 0) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "float8_linear_group_args.workspace.data is NULL");
  }
  return {};
}

CallMemory LinearGroup::State::memory(const LinearGroupCall& call, Access x, Access saved) const {
  const auto [m, n, k] = Shape{call.m, 0, desc().shape.k};
  const Dtype type = desc().tensor_dtype;
  CallMemory memory("float8_linear_group_args");
  memory.add_rows("x", call.x.data, m, k, call.x.ld, type, x);
  memory.add("saved", call.saved.data,
             has_all_weights(call) ? layout.saved_input_bytes : layout.saved_bytes, saved);
  if (saved == Access::kRead) {
    memory.add_rows("dx", call.dx.data, m, k, call.dx.ld, type, Access::kWrite);
  }
  memory.add("workspace", call.workspace.data, layout.workspace_bytes, Access::kWrite);
  return memory;
}

// Checks a linear's part of a call. The memory that all linears share is added once.
template <class Call>
Status LinearGroup::State::check_linear(GroupMemory& memory, Call call, size_t i,
                                        Stream stream) const {
  const auto index = static_cast<int>(i);
  const Linear::State& of = linear(i);
  F8_TRY(in_group(of.check_arguments(call), index));
  if (call.m == 0 && std::is_same_v<Call, ForwardCall>) return {};
  if (context->state().keeps_records()) F8_TRY(in_group(of.check_fresh_scales(call), index));
  call.x = {};
  call.saved = {};
  if constexpr (requires { call.dx; }) call.dx = {};
  return memory.add(of.memory(call), index, *context, stream);
}

Status LinearGroup::State::check_forward(const LinearGroupCall& call, Stream stream) const {
  F8_TRY(check_call(call));
  GroupMemory all(kForward);
  for (size_t i = 0; i < linears.size(); ++i) {
    F8_TRY(check_linear(all, forward_call(call, i), i, stream));
  }
  if (call.m == 0) return {};
  F8_TRY(all.add(memory(call, Access::kRead, Access::kWrite), kOfGroup, *context, stream));
  F8_TRY(all.check_overlaps());
  if (context->state().keeps_records() && call.saved.data != nullptr) {
    context->state().records.set_forward(call.saved.data, {this, call.m, has_all_weights(call)});
  }
  return {};
}

Status LinearGroup::State::check_backward(const LinearGroupCall& call, Stream stream) const {
  F8_TRY(check_call(call));
  GroupMemory all(kBackward);
  bool reads_x = false;
  for (size_t i = 0; i < linears.size(); ++i) {
    F8_TRY(check_linear(all, backward_call(call, i), i, stream));
    reads_x =
        reads_x || (call.linears[i].dw.data != nullptr && !linear(i).is_fp8(Gemm::kGradWeight));
  }
  F8_TRY(all.add(memory(call, reads_x ? Access::kRead : Access::kNone, Access::kRead), kOfGroup,
                 *context, stream));
  F8_TRY(all.check_overlaps());
  if (!context->state().keeps_records() || call.saved.data == nullptr) return {};
  const CallRecords::Forward forward = context->state().records.forward(call.saved.data);
  if (forward.linear != this) return {};  // unknown: the buffer may have been moved
  if (forward.m != call.m) {
    return fail(ErrorCode::kInvalidArgument,
                "float8_linear_group_args.m is {}, the forward that filled `saved` had an m of {}",
                call.m, forward.m);
  }
  if (forward.weight_given == has_all_weights(call)) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}: {} weights are given in fp8, the forward that filled `saved` had {}; give each "
              "to both or to neither",
              kBackward, forward.weight_given ? "not all" : "all",
              forward.weight_given ? "all" : "not all");
}

unsigned LinearGroup::State::reads(const LinearGroupCall& call, size_t i) const {
  const Linear::State& of = linear(i);
  return (call.dx.data != nullptr && of.is_fp8(Gemm::kGradInput) ? kReadsQ : 0) |
         (call.linears[i].dw.data != nullptr && of.is_fp8(Gemm::kGradWeight) ? kReadsQt : 0);
}

// Binds a linear's part of a call. `with_qt`: forward made copies for a backward.
void LinearGroup::State::bind(const LinearGroupCall& call, size_t i, bool with_qt,
                              CallArguments& to) const {
  const GroupedLinearCall& of = call.linears[i];
  const LinearKernels& kernels = linear(i).kernels;
  const LinearLayout& buffers = layout.members[i];
  to.m = call.m;
  to.accumulate_bias = of.db.accumulate != 0;
  to.scales = ScaleSlots::of(of.scales);
  to.ranks = step_of(call).ranks;
  to.set(Slot::kX, call.x.data, call.x.ld);
  to.set(Slot::kW, of.w.data, of.w.ld);
  to.set(Slot::kY, of.y.data, of.y.ld);
  to.set(Slot::kDy, of.dy.data, of.dy.ld);
  to.set(Slot::kDx, call.dx.data, call.dx.ld);
  to.set(Slot::kDw, of.dw.data, of.dw.ld);
  to.set(Slot::kBias, of.bias);
  to.set(Slot::kDb, of.db.data);
  to.set(Slot::kSaved, call.saved.data);
  to.set(Slot::kWorkspace, call.workspace.data);
  to.set(Slot::kLaunchCounts, launch_counts(call));
  to.set(Slot::kAmax, step_of(call).evaluate != 0 ? nullptr : to.scales.amax);
  to.set(Slot::kScale, to.scales.scale);
  to.set(Slot::kCounters, of.counters);
  bind_refs(fp8_refs(kernels.of(Tensor::kInput), buffers.forward.x, with_qt), Slot::kInputQ, to);
  if (of.w.fp8 != nullptr) {
    bind_tensor(*of.w.fp8, Slot::kWeightQ, to);
    to.weight_shards = std::max<int64_t>(of.w.fp8->qt_shards, 1);
  } else {
    bind_refs(fp8_refs(kernels.of(Tensor::kWeight), buffers.forward.w, with_qt), Slot::kWeightQ,
              to);
  }
  bind_refs(fp8_refs(kernels.of(Tensor::kGradOutput), buffers.backward.dy,
                     (reads(call, i) & kReadsQt) != 0),
            Slot::kGradOutputQ, to);
}

bool LinearGroup::State::casts_weights(bool saved, size_t i) const {
  const Copies& w = linear(i).kernels.of(Tensor::kWeight);
  return w.q || (saved && w.qt);
}

}  // namespace f8::runtime
