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
                     [](const GroupedLinearCall& linear) { return linear.w_tensor != nullptr; });
}

ForwardCall forward_call(const LinearGroupCall& call, size_t i) {
  const GroupedLinearCall& of = call.linears[i];
  return {.x = call.x,
          .w = of.w,
          .y = of.y,
          .saved = call.saved,
          .m = call.m,
          .ld_x = call.ld_x,
          .ld_w = of.ld_w,
          .ld_y = of.ld_y,
          .bias = of.bias,
          .scales = of.scales,
          .first_step = call.first_step,
          .counters = of.counters,
          .ranks = call.ranks,
          .evaluate = call.evaluate,
          .w_tensor = of.w_tensor};
}

// The first linear writes dx, the others add to it.
BackwardCall backward_call(const LinearGroupCall& call, size_t i) {
  const GroupedLinearCall& of = call.linears[i];
  return {.dy = of.dy,
          .saved = call.saved,
          .dx = call.dx,
          .dw = of.dw,
          .m = call.m,
          .ld_dy = of.ld_dy,
          .ld_dx = call.ld_dx,
          .ld_dw = of.ld_dw,
          .ld_x = call.ld_x,
          .ld_w = of.ld_w,
          .x = call.x,
          .w = of.w,
          .scales = of.scales,
          .first_step = call.first_step,
          .accumulate = of.accumulate,
          .counters = of.counters,
          .db = of.db,
          .accumulate_bias = of.accumulate_bias,
          .ranks = call.ranks,
          .w_tensor = of.w_tensor,
          .accumulate_dx = i > 0 || call.accumulate_dx != 0 ? 1 : 0};
}

}  // namespace

Status LinearGroup::State::check_call(const char* name, const LinearGroupCall& call,
                                      const void* workspace) const {
  if (call.count != linears.size()) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "float8_linear_group_args.count is {}, the group has {} linears", call.count,
                linears.size());
  }
  if (workspace == nullptr && layout.workspace_bytes > 0 && call.m > 0) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "workspace of {} is NULL", name);
  }
  return {};
}

CallMemory LinearGroup::State::memory(const LinearGroupCall& call, const void* workspace, Access x,
                                      Access saved) const {
  const auto [m, n, k] = Shape{call.m, 0, desc().shape.k};
  const Dtype type = desc().tensor_dtype;
  CallMemory memory("float8_linear_group_args");
  memory.add_rows("x", call.x, m, k, call.ld_x, type, x);
  memory.add("saved", call.saved,
             has_all_weights(call) ? layout.saved_input_bytes : layout.saved_bytes, saved);
  if (saved == Access::kRead) {
    memory.add_rows("dx", call.dx, m, k, call.ld_dx, type, Access::kWrite);
  }
  memory.add_beside("workspace", workspace, layout.workspace_bytes, Access::kWrite);
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
  call.x = nullptr;
  call.saved = nullptr;
  if constexpr (requires { call.dx; }) call.dx = nullptr;
  return memory.add(of.memory(call, nullptr), index, *context, stream);
}

Status LinearGroup::State::check_forward(const LinearGroupCall& call, const void* workspace,
                                         Stream stream) const {
  F8_TRY(check_call(kForward, call, workspace));
  GroupMemory all(kForward);
  for (size_t i = 0; i < linears.size(); ++i) {
    F8_TRY(check_linear(all, forward_call(call, i), i, stream));
  }
  if (call.m == 0) return {};
  F8_TRY(
      all.add(memory(call, workspace, Access::kRead, Access::kWrite), kOfGroup, *context, stream));
  F8_TRY(all.check_overlaps());
  if (context->state().keeps_records() && call.saved != nullptr) {
    context->state().records.set_forward(call.saved, {this, call.m, has_all_weights(call)});
  }
  return {};
}

Status LinearGroup::State::check_backward(const LinearGroupCall& call, const void* workspace,
                                          Stream stream) const {
  F8_TRY(check_call(kBackward, call, workspace));
  GroupMemory all(kBackward);
  bool reads_x = false;
  for (size_t i = 0; i < linears.size(); ++i) {
    F8_TRY(check_linear(all, backward_call(call, i), i, stream));
    reads_x = reads_x || (call.linears[i].dw != nullptr && !linear(i).is_fp8(Gemm::kGradWeight));
  }
  F8_TRY(all.add(memory(call, workspace, reads_x ? Access::kRead : Access::kNone, Access::kRead),
                 kOfGroup, *context, stream));
  F8_TRY(all.check_overlaps());
  if (!context->state().keeps_records() || call.saved == nullptr) return {};
  const CallRecords::Forward forward = context->state().records.forward(call.saved);
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
  return (call.dx != nullptr && of.is_fp8(Gemm::kGradInput) ? kReadsQ : 0) |
         (call.linears[i].dw != nullptr && of.is_fp8(Gemm::kGradWeight) ? kReadsQt : 0);
}

// Binds a linear's part of a call. `with_qt`: forward made copies for a backward.
void LinearGroup::State::bind(const LinearGroupCall& call, size_t i, void* workspace, bool with_qt,
                              CallArguments& to) const {
  const GroupedLinearCall& of = call.linears[i];
  const LinearKernels& kernels = linear(i).kernels;
  const LinearLayout& buffers = layout.members[i];
  to.m = call.m;
  to.accumulate_bias = of.accumulate_bias != 0;
  to.scales = ScaleSlots::of(of.scales);
  to.ranks = call.ranks;
  to.set(Slot::kX, call.x, call.ld_x);
  to.set(Slot::kW, of.w, of.ld_w);
  to.set(Slot::kY, of.y, of.ld_y);
  to.set(Slot::kDy, of.dy, of.ld_dy);
  to.set(Slot::kDx, call.dx, call.ld_dx);
  to.set(Slot::kDw, of.dw, of.ld_dw);
  to.set(Slot::kBias, of.bias);
  to.set(Slot::kDb, of.db);
  to.set(Slot::kSaved, call.saved);
  to.set(Slot::kWorkspace, workspace);
  to.set(Slot::kAmax, call.evaluate != 0 ? nullptr : to.scales.amax);
  to.set(Slot::kScale, to.scales.scale);
  to.set(Slot::kCounters, of.counters);
  bind_refs(fp8_refs(kernels.of(Tensor::kInput), buffers.forward.x, with_qt), Slot::kInputQ, to);
  if (of.w_tensor != nullptr) {
    bind_tensor(*of.w_tensor, Slot::kWeightQ, to);
    to.weight_shards = std::max<int64_t>(of.w_tensor->qt_shards, 1);
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
