// The checks of a call's arguments, and their way to the launches. Errors name the field of the C
// interface, as a caller writes it.
#include "runtime/linear/state.hpp"

#include "runtime/gemm/provider.hpp"
#include "runtime/linear/tensors/fp8_tensor.hpp"

namespace f8::runtime {
namespace {

Status check_given(const char* name, const void* pointer) {
  if (pointer == nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{} is NULL", name);
  }
  return {};
}

// Refuses what the plan was not made for.
Status refuse_if(bool bad, const char* why) {
  if (bad) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}", why);
  }
  return {};
}

Status check_m(const char* name, int64_t m, int64_t planned) {
  if (m < 0 || m > planned) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{} is {}, the plan was made for 0 to {}", name, m,
                planned);
  }
  return {};
}

Status check_memory(const char* call, const CallMemory& memory) {
  F8_TRY(memory.check_alignment(call));
  return memory.check_overlaps(call);
}

// Gives the name of a call's struct in the C interface.
constexpr const char* args_name(const ForwardCall&) {
  return "float8_forward_args";
}
constexpr const char* args_name(const BackwardCall&) {
  return "float8_backward_args";
}

}  // namespace

template <class Call>
Status Linear::State::check_counters(const Call& call) const {
  if (call.counters == nullptr || desc.count) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}.counters is given, the plan's casts do not count; set float8_linear_desc.count",
              args_name(call));
}

// The call takes its first scales from all ranks' tensors, and so writes them.
template <class Call>
static bool over_ranks(const Call& call) {
  if constexpr (requires { step_of(call).evaluate; }) {
    if (step_of(call).evaluate != 0) return false;
  }
  return step_of(call).first_step != 0 && step_of(call).ranks != nullptr;
}

template <class Call>
Status Linear::State::check_scales(const Call& call) const {
  if (kernels.slots.empty()) return {};
  const auto [amax, scale, format] = ScaleSlots::of(call.scales);
  if (amax == nullptr || scale == nullptr || (over_ranks(call) && format == nullptr)) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.scales is empty; recipe {} has delayed scaling, see float8_scales_slots",
                args_name(call), desc.recipe.name);
  }
  return {};
}

// The backward reads dy itself.
bool Linear::State::reads_dy(const BackwardCall& call) const {
  return call.dy.fp8 == nullptr || call.db.data != nullptr ||
         (call.dx.data != nullptr && !is_fp8(Gemm::kGradInput)) ||
         (call.dw.data != nullptr && !is_fp8(Gemm::kGradWeight));
}

Linear::State::DyCopies Linear::State::copies_of_dy(const BackwardCall& call) const {
  if (call.dy.fp8 == nullptr) return {};
  return {.q = call.dx.data != nullptr && is_fp8(Gemm::kGradInput),
          .qt = call.dw.data != nullptr && is_fp8(Gemm::kGradWeight)};
}

// Checks the tensors that a call is given in fp8, whose copies it reads: q in forward, else qt.
template <class Call>
Status Linear::State::check_tensors(const Call& call, bool q) const {
  const auto [m, n, k] = Shape{call.m, desc.shape.n, desc.shape.k};
  if (call.x.fp8 != nullptr) {
    const bool again = casts_x_tensor(call);
    F8_TRY(check_tensor(args_name(call), "x.fp8", *call.x.fp8, m, k,
                        again ? Copies() : kernels.of(Tensor::kInput), q));
    if (again && kernels.keeps_scale(Tensor::kInput)) {
      F8_TRY(
          check_given("float8_backward_args.x.fp8.q_inverse_scale", call.x.fp8->q_inverse_scale));
    }
  }
  if (call.w.fp8 != nullptr) {
    F8_TRY(check_tensor(args_name(call), "w.fp8", *call.w.fp8, n, k, kernels.of(Tensor::kWeight), q,
                        desc.weight_shards));
  }
  return {};
}

Status Linear::State::check_arguments(const ForwardCall& call) const {
  F8_TRY(check_m("float8_forward_args.m", call.m, desc.shape.m));
  if (call.m == 0) return {};
  if (call.x.fp8 == nullptr || !is_fp8(Gemm::kOutput)) {
    F8_TRY(check_given("float8_forward_args.x.data", call.x.data));
  }
  if (call.w.fp8 == nullptr || !is_fp8(Gemm::kOutput)) {
    F8_TRY(check_given("float8_forward_args.w.data", call.w.data));
  }
  if (is_fp8(Gemm::kOutput)) F8_TRY(check_tensors(call, true));
  F8_TRY(check_given("float8_forward_args.y.data", call.y.data));
  if (desc.bias) F8_TRY(check_given("float8_forward_args.bias", call.bias));
  F8_TRY(refuse_if(!desc.bias && call.bias != nullptr,
                   "float8_forward_args.bias is given, the plan has none; set "
                   "float8_linear_desc.bias"));
  F8_TRY(check_scales(call));
  return check_counters(call);
}

Status Linear::State::check(const ForwardCall& call) const {
  F8_TRY(check_arguments(call));
  if (call.m == 0) return {};
  F8_TRY(check_given("float8_forward_args.workspace.data", call.workspace.data));
  return check_memory("float8_linear_forward", memory(call));
}

Status Linear::State::check_arguments(const BackwardCall& call) const {
  F8_TRY(check_m("float8_backward_args.m", call.m, desc.shape.m));
  const bool dx = call.dx.data != nullptr;
  const bool dw = call.dw.data != nullptr;
  F8_TRY(refuse_if(
      dw && call.dw.accumulate != 0 && !(desc.accumulate_grad_weight && desc.needs_grad_weight),
      "float8_backward_args.dw.accumulate is set, the plan has no GEMM that adds; set "
      "float8_linear_desc.accumulate_grad_weight"));
  F8_TRY(refuse_if(
      dx && call.dx.accumulate != 0 && !(desc.accumulate_grad_input && desc.needs_grad_input),
      "float8_backward_args.dx.accumulate is set, the plan has no GEMM that adds; set "
      "float8_linear_desc.accumulate_grad_input"));
  F8_TRY(refuse_if(dx && !desc.needs_grad_input,
                   "float8_backward_args.dx is given, the plan was made with "
                   "float8_linear_desc.no_grad_input"));
  F8_TRY(refuse_if(dw && !desc.needs_grad_weight,
                   "float8_backward_args.dw is given, the plan was made with "
                   "float8_linear_desc.no_grad_weight"));
  F8_TRY(refuse_if(call.db.data != nullptr && !desc.bias_grad,
                   "float8_backward_args.db is given, the plan has no gradient of a bias; set "
                   "float8_linear_desc.bias_grad"));
  if (call.m == 0 || (!dx && !dw && call.db.data == nullptr)) return {};
  if (reads_dy(call) && call.dy.fp8 != nullptr && call.dy.data == nullptr) [[unlikely]] {
    return fail(
        ErrorCode::kInvalidArgument,
        "float8_backward_args.dy.data is NULL; beside dy.fp8, db and gradients in high precision "
        "are computed from it");
  }
  if (call.dy.fp8 == nullptr) F8_TRY(check_given("float8_backward_args.dy.data", call.dy.data));
  // A gradient needs a copy of the weight or of the input that the call does not have.
  const bool casts_weight = dx && is_fp8(Gemm::kGradInput) && call.w.fp8 == nullptr;
  const bool casts_input =
      dw && is_fp8(Gemm::kGradWeight) && (call.x.fp8 == nullptr || casts_x_tensor(call));
  F8_TRY(refuse_if(call.dy.fp8 != nullptr && desc.recompute && casts_input,
                   "float8_backward_args.dy.fp8 is given, and float8_linear_desc.recompute casts "
                   "x again beside dy; give x in fp8 too, or dy.data alone"));
  const bool reads_saved = (casts_weight && layout.saved_bytes > layout.saved_input_bytes) ||
                           (dw && call.x.fp8 == nullptr && layout.saved_input_bytes > 0);
  if (reads_saved) F8_TRY(check_given("float8_backward_args.saved.data", call.saved.data));
  const auto check_source = [&](const char* name, const void* pointer, Gemm gemm) -> Status {
    if (pointer == nullptr) [[unlikely]] {
      return fail(ErrorCode::kInvalidArgument, "{} is NULL; {} is computed from it: {}", name,
                  to_string(gemm),
                  is_fp8(gemm)
                      ? std::string("float8_linear_desc.recompute casts it again")
                      : f8::format("recipe {} has the GEMM in high precision", desc.recipe.name));
    }
    return {};
  };
  if (dx && (!is_fp8(Gemm::kGradInput) || (desc.recompute && casts_weight))) {
    F8_TRY(check_source("float8_backward_args.w.data", call.w.data, Gemm::kGradInput));
  }
  if (dw && (!is_fp8(Gemm::kGradWeight) || (desc.recompute && casts_input))) {
    F8_TRY(check_source("float8_backward_args.x.data", call.x.data, Gemm::kGradWeight));
  }
  F8_TRY(check_tensors(call, false));
  const auto [q, qt] = copies_of_dy(call);
  for (const bool copy : {true, false}) {
    if (!(copy ? q : qt)) continue;
    F8_TRY(check_tensor(args_name(call), "dy.fp8", *call.dy.fp8, call.m, desc.shape.n,
                        kernels.of(Tensor::kGradOutput), copy));
  }
  F8_TRY(check_scales(call));
  return check_counters(call);
}

Status Linear::State::check(const BackwardCall& call) const {
  F8_TRY(check_arguments(call));
  if (call.dx.data == nullptr && call.dw.data == nullptr && call.db.data == nullptr) return {};
  if (call.m == 0) return memory(call).check_alignment("float8_linear_backward");
  F8_TRY(check_given("float8_backward_args.workspace.data", call.workspace.data));
  return check_memory("float8_linear_backward", memory(call));
}

Status Linear::State::check_records(const ForwardCall& call) const {
  F8_TRY(check_fresh_scales(call));
  if (call.saved.data != nullptr && !desc.recompute) {
    context->state().records.set_forward(call.saved.data, {this, call.m, call.w.fp8 != nullptr});
  }
  return {};
}

Status Linear::State::check_records(const BackwardCall& call) const {
  F8_TRY(check_fresh_scales(call));
  if (call.saved.data == nullptr || desc.recompute) return {};
  const CallRecords::Forward forward = context->state().records.forward(call.saved.data);
  if (forward.linear != this) return {};  // unknown: the buffer may have been moved
  if (forward.m != call.m) {
    return fail(ErrorCode::kInvalidArgument,
                "float8_backward_args.m is {}, the forward that filled "
                "`saved` had an m of {}",
                call.m, forward.m);
  }
  const bool given = call.w.fp8 != nullptr;
  const Copies& weight = kernels.of(Tensor::kWeight);
  if (forward.weight_given != given && (weight.q || weight.qt)) {
    return fail(ErrorCode::kInvalidArgument,
                "float8_backward_args.w.fp8 is {}, the forward that "
                "filled `saved` had {}; give it to both or to neither",
                given ? "given" : "NULL", given ? "none" : "one");
  }
  return {};
}

template <class Call>
Status Linear::State::check_fresh_scales(const Call& call) const {
  if (kernels.slots.empty() || step_of(call).first_step != 0) return {};
  return check_not_fresh(*context, call.scales);
}

template Status Linear::State::check_fresh_scales(const ForwardCall& call) const;
template Status Linear::State::check_fresh_scales(const BackwardCall& call) const;

template <class Call>
CallMemory Linear::State::common_memory(const Call& call) const {
  CallMemory memory(args_name(call));
  memory.add("counters", call.counters, kCountersOfLinear * sizeof(CastCounters), Access::kWrite,
             alignof(CastCounters));
  memory.add("workspace", call.workspace.data, workspace_bytes(call), Access::kWrite);
  memory.add_beside("float8_step.launch_counts", step_of(call).launch_counts.data,
                    quantize_sync_bytes(context->device().sm_count), Access::kWrite);
  const size_t count = kernels.slots.size();
  const auto [amax, scale, format] = ScaleSlots::of(call.scales);
  memory.add_beside("float8_scale_slots (amax)", amax, count * sizeof(uint32_t), Access::kWrite,
                    alignof(uint32_t));
  memory.add_beside("float8_scale_slots (scale)", scale,
                    count * kernels::kScaleStride * sizeof(float),
                    over_ranks(call) ? Access::kWrite : Access::kRead, alignof(float));
  if (over_ranks(call)) {
    memory.add_beside("float8_scale_slots (format)", format, count * sizeof(uint32_t),
                      Access::kRead, alignof(uint32_t));
  }
  return memory;
}

// What forward and backward share. `q`: of the tensors they read q, else qt.
template <class Call>
void Linear::State::add_copies(CallMemory& memory, const Call& call, Access saved, bool q) const {
  memory.add("saved", call.saved.data,
             layout.saved_bytes_of(call.x.fp8 != nullptr, call.w.fp8 != nullptr), saved);
  if (call.x.fp8 != nullptr && casts_x_tensor(call)) {
    memory.add("x.fp8", call.x.fp8->q_inverse_scale, sizeof(float), Access::kRead, sizeof(float));
  } else if (call.x.fp8 != nullptr) {
    add_tensor(memory, "x.fp8", *call.x.fp8, kernels.of(Tensor::kInput), q);
  }
  if (call.w.fp8 != nullptr) {
    add_tensor(memory, "w.fp8", *call.w.fp8, kernels.of(Tensor::kWeight), q);
  }
}

CallMemory Linear::State::memory(const ForwardCall& call) const {
  const auto [m, n, k] = Shape{call.m, desc.shape.n, desc.shape.k};
  const Dtype type = desc.tensor_dtype;
  CallMemory memory = common_memory(call);
  memory.add_rows("x", call.x.data, m, k, call.x.ld, type, Access::kRead);
  memory.add_rows("w", call.w.data, n, k, call.w.ld, type, Access::kRead);
  memory.add_rows("y", call.y.data, m, n, call.y.ld, type, Access::kWrite);
  memory.add_rows("bias", call.bias, 1, n, 0, type, Access::kRead);
  add_copies(memory, call, Access::kWrite, true);
  return memory;
}

// x and w count as far as they are read: a trainer that needs the input no more may put dx in its
// place. The weight itself must outlive every call.
CallMemory Linear::State::memory(const BackwardCall& call) const {
  const auto [m, n, k] = Shape{call.m, desc.shape.n, desc.shape.k};
  const Dtype type = desc.tensor_dtype;
  const bool casts_input = desc.recompute && (call.x.fp8 == nullptr || casts_x_tensor(call));
  const bool reads_input = call.dw.data != nullptr && (casts_input || !is_fp8(Gemm::kGradWeight));
  CallMemory memory = common_memory(call);
  memory.add_rows("dy", call.dy.data, m, n, call.dy.ld, type,
                  reads_dy(call) ? Access::kRead : Access::kNone);
  const auto [q, qt] = copies_of_dy(call);
  const Copies& copies = kernels.of(Tensor::kGradOutput);
  if (q) add_tensor(memory, "dy.fp8", *call.dy.fp8, copies, true);
  if (qt) add_tensor(memory, "dy.fp8", *call.dy.fp8, copies, false);
  memory.add_rows("dx", call.dx.data, m, k, call.dx.ld, type, Access::kWrite);
  memory.add_rows("dw", call.dw.data, n, k, call.dw.ld, desc.grad_weight_dtype, Access::kWrite);
  memory.add_rows("db", call.db.data, 1, n, 0, desc.bias_grad_dtype, Access::kWrite);
  memory.add_rows("x", call.x.data, m, k, call.x.ld, type,
                  reads_input ? Access::kRead : Access::kNone);
  memory.add_rows("w", call.w.data, n, k, call.w.ld, type, Access::kRead);
  add_copies(memory, call, Access::kRead, false);
  return memory;
}

// Binds x, w and `saved`, which holds nothing of what the call is given in fp8. Where x is not given,
// the copies of w in `saved` follow those of x.
template <class Call>
CallKind Linear::State::bind_inputs(const Call& call, CallArguments& to) const {
  to.m = call.m;
  to.set(Slot::kX, call.x.data, call.x.ld);
  to.set(Slot::kW, call.w.data, call.w.ld);
  const bool shifted = call.saved.data != nullptr && call.x.fp8 != nullptr;
  to.set(Slot::kSaved, shifted ? shifted_saved(call.saved.data) : call.saved.data);
  CallKind kind = 0;
  to.set(Slot::kInputScale, to.at<void>(layout.forward.x.kept_scale));
  to.set(Slot::kWeightScale, to.at<void>(layout.forward.w.kept_scale));
  if (call.x.fp8 != nullptr) {
    kind |= kGivenX;
    bind_tensor(*call.x.fp8, Slot::kInputQ, to);
  }
  if (call.w.fp8 != nullptr) {
    kind |= kGivenW;
    bind_tensor(*call.w.fp8, Slot::kWeightQ, to);
    to.weight_shards = std::max<int64_t>(call.w.fp8->qt_shards, 1);
  }
  return kind;
}

CallLaunches Linear::State::bind(const ForwardCall& call, CallArguments& to) const {
  set_common(call, to);
  to.set(Slot::kY, call.y.data, call.y.ld);
  to.set(Slot::kBias, call.bias);
  const CallKind given = bind_inputs(call, to);
  const bool saves = call.saved.data != nullptr;
  if ((given & kGivenX) == 0) bind_refs(layout.forward_x[saves], Slot::kInputQ, to);
  if ((given & kGivenW) == 0) bind_refs(layout.forward_w[saves], Slot::kWeightQ, to);
  CallKind kind = given | step_kind(step_of(call).first_step != 0, to);
  if (step_of(call).evaluate != 0) {
    to.set(Slot::kAmax, nullptr);
    kind &= ~kOverRanks;
  }
  if (saves) kind |= kForwardSaved;
  return {&launches.forward_casts[kind], &launches.output};
}

CallLaunches Linear::State::bind(const BackwardCall& call, CallArguments& to) const {
  set_common(call, to);
  to.accumulate_bias = call.db.accumulate != 0;
  to.set(Slot::kDy, call.dy.data, call.dy.ld);
  to.set(Slot::kDx, call.dx.data, call.dx.ld);
  to.set(Slot::kDw, call.dw.data, call.dw.ld);
  to.set(Slot::kDb, call.db.data);
  CallKind given = bind_inputs(call, to);
  if (casts_x_tensor(call)) {
    given &= ~kGivenX;
    // A tensor's inverse scale follows its scale.
    if (kernels.keeps_scale(Tensor::kInput)) {
      to.set(Slot::kInputScale, call.x.fp8->q_inverse_scale - kernels::kInverse);
    }
  }
  if ((given & kGivenX) == 0) bind_refs(layout.backward_x, Slot::kInputQ, to);
  if ((given & kGivenW) == 0) bind_refs(layout.backward_w, Slot::kWeightQ, to);
  Results results = 0;
  if (call.dx.data != nullptr) results |= kDx | (call.dx.accumulate != 0 ? kAddDx : 0);
  if (call.dw.data != nullptr) results |= kDw | (call.dw.accumulate != 0 ? kAddDw : 0);
  if (call.db.data != nullptr) results |= kDb;
  CallKind kind = 0;
  const CallKind step = step_kind(step_of(call).first_step != 0, to);
  if (call.dy.fp8 != nullptr) {
    bind_tensor(*call.dy.fp8, Slot::kGradOutputQ, to);
    const bool again = desc.recompute && call.dx.data != nullptr && is_fp8(Gemm::kGradInput);
    if (again && (given & kGivenW) == 0) kind = kWeightAlone | step;
  } else {
    if (call.dx.data != nullptr && is_fp8(Gemm::kGradInput)) kind |= kGradOutputQ;
    if (call.dw.data != nullptr && is_fp8(Gemm::kGradWeight)) kind |= kGradOutputQt;
    bind_refs(layout.backward_dy[(kind & kGradOutputQt) != 0], Slot::kGradOutputQ, to);
    if (kind != 0) kind |= (desc.recompute ? given : 0) | step;
  }
  if (call.db.data != nullptr) kind |= kGradOutputSums;
  return {&launches.backward_casts[kind], &launches.gradients[results]};
}

}  // namespace f8::runtime
