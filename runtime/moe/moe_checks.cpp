// A call of the MLP of experts is checked here, before anything is launched.
#include <algorithm>
#include <tuple>
#include <type_traits>

#include "runtime/linear/plan/call_arguments.hpp"
#include "runtime/moe/moe.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kForward = "float8_moe_forward";
constexpr const char* kForwardArgs = "float8_moe_forward_args";
constexpr const char* kBackward = "float8_moe_backward";
constexpr const char* kBackwardArgs = "float8_moe_backward_args";
constexpr const char* kCallNames[] = {"FLOAT8_MOE_BACKWARD", "FLOAT8_MOE_GRAD_HIDDEN",
                                      "FLOAT8_MOE_GRAD_GATE_UP", "FLOAT8_MOE_GRAD_INPUT",
                                      "FLOAT8_MOE_GRAD_WEIGHT"};

constexpr unsigned bit(int32_t buffer) {
  return 1U << static_cast<unsigned>(buffer);
}
constexpr unsigned kSaved =
    bit(FLOAT8_MOE_GATE_UP) | bit(FLOAT8_MOE_SAVED_OF_W13) | bit(FLOAT8_MOE_SAVED_OF_W2);
constexpr unsigned kGateUpGrads = bit(FLOAT8_MOE_GATE_UP_GRAD_Q) | bit(FLOAT8_MOE_GATE_UP_GRAD_QT);

// What a backward reads and writes, by its part.
struct PartMemory {
  bool tokens = false, dy = false, w13 = false,
       w2 = false;  // x by its index; dy; w where it is cast again
  bool dx = false, dw13 = false, dw2 = false;
  unsigned needed = 0, read = 0, written = 0;  // buffers; those that are read where they are given
};
constexpr PartMemory kParts[] = {
    {.tokens = true,
     .dy = true,
     .w13 = true,
     .w2 = true,
     .dx = true,
     .dw13 = true,
     .dw2 = true,
     .needed = kSaved},
    {.dy = true,
     .w2 = true,
     .dw2 = true,
     .needed = bit(FLOAT8_MOE_SAVED_OF_W2),
     .written = bit(FLOAT8_MOE_HIDDEN_GRAD)},
    {.needed = bit(FLOAT8_MOE_GATE_UP) | bit(FLOAT8_MOE_HIDDEN_GRAD), .written = kGateUpGrads},
    {.w13 = true,
     .dx = true,
     .needed = bit(FLOAT8_MOE_GATE_UP_GRAD_Q) | bit(FLOAT8_MOE_SAVED_OF_W13),
     .read = bit(FLOAT8_MOE_GATE_UP_GRAD_QT)},
    {.tokens = true, .dw13 = true, .needed = bit(FLOAT8_MOE_GATE_UP_GRAD_QT)}};

bool has_any(const float8_moe_buffers& buffers) {
  return std::ranges::any_of(
      kMoeBuffers, [&](const MoeBuffer& buffer) { return (buffers.*buffer.at).data != nullptr; });
}

const PartMemory& memory_of(const MoeBackwardCall& call) {
  return kParts[call.part];
}

}  // namespace

bool Moe::reads_w13(const MoeBackwardCall& call) const {
  return desc_.recompute_weight && memory_of(call).w13;
}

bool Moe::reads_w2(const MoeBackwardCall& call) const {
  const bool computes_hidden_grad =
      call.part == FLOAT8_MOE_BACKWARD || call.buffers.hidden_grad.data != nullptr;
  return desc_.recompute_weight && memory_of(call).w2 && computes_hidden_grad;
}

template <class Call>
Status Moe::check_common(const char* args, const Call& call, bool reads_x, bool reads_w13,
                         bool reads_w2) const {
  constexpr bool forward = std::is_same_v<Call, MoeForwardCall>;
  if (call.m < 0 || call.m > desc_.m_max) {
    return fail(ErrorCode::kInvalidArgument, "{}.m is {}, the plan was made for 0 to {}", args,
                call.m, desc_.m_max);
  }
  if (desc_.rows_in_place ? call.tokens != call.m : call.tokens <= 0 && call.m > 0) {
    return fail(ErrorCode::kInvalidArgument, "{}.tokens is {}; it is {}", args, call.tokens,
                desc_.rows_in_place ? "m with float8_moe_desc.rows_in_place" : "the rows of x");
  }
  if (call.m == 0) return {};
  if (reads_x) F8_TRY(need(args, "x.data", call.x.data));
  if (reads_x && !desc_.rows_in_place) F8_TRY(need(args, "index", call.index));
  const bool saves = call.saved.data != nullptr || call.buffers.gate_up.data != nullptr;
  for (const auto& [reads, weight, data, fp8, linear] :
       {std::tuple(reads_w13, &call.w13, "w13.data", "w13.fp8", w13_.get()),
        {reads_w2, &call.w2, "w2.data", "w2.fp8", w2_.get()}}) {
    if (!reads) continue;
    F8_TRY(weight->fp8 == nullptr ? need(args, data, weight->data)
                                  : linear->check_given(args, fp8, *weight->fp8, forward, saves));
  }
  if (reads_w13 && desc_.w3_apart && call.w13.fp8 == nullptr) {
    F8_TRY(need(args, "w3.data", call.w3.data));
  }
  F8_TRY(w13_->check_scales(args, "w13_scales", call.w13_scales, step_of(call)));
  F8_TRY(w2_->check_scales(args, "w2_scales", call.w2_scales, step_of(call)));
  F8_TRY(need(args, "layout.data", call.layout.data));
  return layout_of(call).bytes == 0 ? Status() : need(args, "workspace.data", call.workspace.data);
}

template <class Call>
void Moe::add_common(CallMemory& memory, const Call& call, bool reads_x, bool reads_w13,
                     bool reads_w2) const {
  constexpr bool forward = std::is_same_v<Call, MoeForwardCall>;
  const auto [dim, hidden, experts] = std::tuple(desc_.dim, desc_.hidden, desc_.experts);
  const int64_t rows_of_w13 = experts * w13_->weight_rows();
  const auto read = [&](const char* name, const float8_matrix& of, int64_t rows, int64_t cols) {
    memory.add_rows(name, of.data, rows, cols, of.ld, desc_.tensor_dtype, Access::kRead);
  };
  if (reads_x) read("x", call.x, call.tokens, dim);
  if (call.w13.fp8 == nullptr) read("w13", call.w13, rows_of_w13, dim);
  if (call.w13.fp8 == nullptr && desc_.w3_apart) read("w3", call.w3, rows_of_w13, dim);
  if (call.w2.fp8 == nullptr) read("w2", call.w2, experts * dim, hidden);
  if (reads_w13 && call.w13.fp8 != nullptr) {
    w13_->add_given(memory, "w13.fp8", *call.w13.fp8, forward);
  }
  if (reads_w2 && call.w2.fp8 != nullptr) {
    w2_->add_given(memory, "w2.fp8", *call.w2.fp8, forward);
  }
  w13_->add_scales(memory, call.w13_scales);
  w2_->add_scales(memory, call.w2_scales);
  memory.add("index", call.index, static_cast<size_t>(call.m) * sizeof(int32_t), Access::kRead,
             alignof(int32_t));
  memory.add("layout", call.layout.data, layout_bytes(), Access::kRead);
  memory.add("workspace", call.workspace.data, layout_of(call).bytes, Access::kWrite);
}

template <class Call>
Status Moe::add_buffers(CallMemory& memory, const char* args, const Call& call, unsigned needed,
                        unsigned read, unsigned written) const {
  const bool has_saved = call.saved.data != nullptr;
  if (needed == kSaved && !has_saved && !has_any(call.buffers))
    return need(args, "saved.data", nullptr);
  const Buffers buffers = buffers_of(call);
  for (int32_t i = 0; i < static_cast<int32_t>(buffers.size()); ++i) {
    const auto& [name, at] = kMoeBuffers[static_cast<size_t>(i)];
    const void* const given = (call.buffers.*at).data;
    const size_t bytes = buffer_bytes(i, call.m);
    const bool of_saved = has_saved && (kSaved & bit(i)) != 0;
    if (given != nullptr && i == FLOAT8_MOE_GATE_UP_GRAD_QT && !desc_.needs_grad_w13) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}.{} is given, the plan was made with float8_moe_desc.no_grad_w13; leave it "
                  "empty",
                  args, name);
    }
    if (given != nullptr && (of_saved || ((needed | read | written) & bit(i)) == 0)) {
      return fail(ErrorCode::kInvalidArgument, "{}.{} is given, {}; leave it empty", args, name,
                  of_saved ? "and so is saved, which has it" : "which the call does not use");
    }
    if ((needed & bit(i)) != 0 && bytes > 0) {
      F8_TRY(need(args, name, buffers[static_cast<size_t>(i)].data));
    }
    memory.add(name, given, bytes, (written & bit(i)) != 0 ? Access::kWrite : Access::kRead);
  }
  memory.add("saved", call.saved.data, saved_bytes_,
             std::is_same_v<Call, MoeForwardCall> ? Access::kWrite : Access::kRead);
  return {};
}

Status Moe::check(const MoeForwardCall& call, Stream stream) const {
  F8_TRY(check_common(kForwardArgs, call, true, true, true));
  if (call.m == 0) return {};
  F8_TRY(need(kForwardArgs, "y.data", call.y.data));
  CallMemory memory(kForwardArgs);
  add_common(memory, call, true, true, true);
  memory.add_rows("y", call.y.data, call.m, desc_.dim, call.y.ld, desc_.tensor_dtype,
                  Access::kWrite);
  const unsigned needed = has_any(call.buffers) ? kSaved : 0;
  F8_TRY(add_buffers(memory, kForwardArgs, call, needed, 0, kSaved));
  return memory.check(kForward, *context_, stream);
}

// The gradients that a call is given are those of its part, and may be added to where the plan adds.
Status Moe::check_results(const MoeBackwardCall& call) const {
  if (call.dw3.data != nullptr && !desc_.w3_apart) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.dw3 is given, and dw13 has the rows of both; set float8_moe_desc.w3_apart, or "
                "leave dw3 "
                "empty",
                kBackwardArgs);
  }
  const PartMemory& part = memory_of(call);
  const bool w13 = desc_.needs_grad_w13, w2 = desc_.needs_grad_w2;
  for (const auto& [name, result, computed, needed, frozen] :
       {std::tuple("dx", call.dx, part.dx, true, ""),
        {"dw13", call.dw13, part.dw13, w13, "no_grad_w13"},
        {"dw3", call.dw3, part.dw13, w13, "no_grad_w13"},
        {"dw2", call.dw2, part.dw2, w2, "no_grad_w2"}}) {
    if (result.data != nullptr && !needed) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}.{} is given, the plan was made with float8_moe_desc.{}", kBackwardArgs, name,
                  frozen);
    }
    if (result.data != nullptr && !computed) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}.{} is given, and part {} does not compute it; leave it empty", kBackwardArgs,
                  name, kCallNames[call.part]);
    }
    if (result.data != nullptr && result.accumulate != 0 && !desc_.accumulate_grad_weight) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}.{}.accumulate is set, the plan has no GEMM that adds; set "
                  "float8_moe_desc.accumulate_grad_weight",
                  kBackwardArgs, name);
    }
  }
  return {};
}

Status Moe::check(const MoeBackwardCall& call, Stream stream) const {
  const PartMemory& part = memory_of(call);
  const bool w13 = reads_w13(call), w2 = reads_w2(call);
  const bool reads_x = part.tokens && desc_.needs_grad_w13;
  F8_TRY(check_common(kBackwardArgs, call, reads_x, w13, w2));
  F8_TRY(check_results(call));
  CallMemory memory(kBackwardArgs);
  const auto [dim, hidden, experts] = std::tuple(desc_.dim, desc_.hidden, desc_.experts);
  memory.add_rows("dx", call.dx.data, call.m, dim, call.dx.ld, desc_.tensor_dtype, Access::kWrite);
  for (const auto& [name, result] : {std::pair("dw13", call.dw13), std::pair("dw3", call.dw3)}) {
    memory.add_rows(name, result.data, experts * w13_->weight_rows(), dim, result.ld,
                    desc_.grad_weight_dtype, Access::kWrite);
  }
  memory.add_rows("dw2", call.dw2.data, experts * dim, hidden, call.dw2.ld, desc_.grad_weight_dtype,
                  Access::kWrite);
  if (call.m == 0) return memory.check_alignment(kBackward);
  if (part.dy) F8_TRY(need(kBackwardArgs, "dy.data", call.dy.data));
  if (part.dy && !desc_.rows_in_place) {
    F8_TRY(need(kBackwardArgs, "index", call.index));
    F8_TRY(need(kBackwardArgs, "score", call.score));
  }
  F8_TRY(add_buffers(memory, kBackwardArgs, call, part.needed, part.read, part.written));
  add_common(memory, call, reads_x, w13, w2);
  memory.add_rows("dy", call.dy.data, call.tokens, dim, call.dy.ld, desc_.tensor_dtype,
                  Access::kRead);
  memory.add("score", call.score, static_cast<size_t>(call.m) * sizeof(float), Access::kRead,
             alignof(float));
  return memory.check(kBackward, *context_, stream);
}

}  // namespace f8::runtime
