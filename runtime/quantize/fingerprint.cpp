#include "runtime/quantize/fingerprint.hpp"

#include <algorithm>
#include <limits>

#include "codegen/kernels/cast/fingerprint_args.cuh"
#include "recipes/fp8_layout.hpp"
#include "recipes/problem.hpp"
#include "runtime/device/calls/call_memory.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"
#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kCall = "float8_weights_compare";
constexpr int64_t kChunkBytes = 16;
constexpr int64_t kChunksOfBlock =
    int64_t{kernels::kTileThreads} * 4;  // what its threads load at once
constexpr int64_t kFingerprintBlocksPerSm = 6;

static_assert(sizeof(kernels::FingerprintState) == FLOAT8_FINGERPRINT_BYTES);

size_t element_bytes(const FingerprintCall& call) {
  return call.dtype == FLOAT8_F32 ? sizeof(float) : sizeof(uint16_t);
}

int64_t chunks_of(const kernels::FingerprintWeight& w) {
  return ceil_div(w.row_bytes, kChunkBytes) * w.rows;
}

Status check(const FingerprintCall& call) {
  for (const auto& [field, pointer] : {std::pair<const char*, const void*>{"w.data", call.w.data},
                                       {"fingerprint", call.fingerprint},
                                       {"noop_flag", call.noop_flag}}) {
    if (pointer == nullptr) [[unlikely]] {
      return fail(ErrorCode::kInvalidArgument, "float8_fingerprint_args.{} is NULL", field);
    }
  }
  for (const auto& [field, size] : {std::pair{"n", call.n}, {"k", call.k}}) {
    if (size < 1 || size > kMaxDim) [[unlikely]] {
      return fail(ErrorCode::kInvalidArgument, "float8_fingerprint_args.{} is {}; it is 1 to {}",
                  field, size, kMaxDim);
    }
  }
  if (call.w.ld != 0 && call.w.ld < call.k) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "float8_fingerprint_args.w.ld is {}; a row has {} elements, and 0 stands for dense "
                "rows",
                call.w.ld, call.k);
  }
  return {};
}

CallMemory memory_of(const FingerprintCall& call) {
  const size_t row = static_cast<size_t>(call.k) * element_bytes(call);
  const size_t pitch = call.w.ld == 0 ? row : static_cast<size_t>(call.w.ld) * element_bytes(call);
  CallMemory memory("float8_fingerprint_args");
  memory.add("w", call.w.data, static_cast<size_t>(call.n - 1) * pitch + row, Access::kRead,
             static_cast<uint32_t>(element_bytes(call)));
  memory.add("fingerprint", call.fingerprint, FLOAT8_FINGERPRINT_BYTES, Access::kWrite);
  memory.add("noop_flag", call.noop_flag, sizeof(uint32_t), Access::kWrite, alignof(uint32_t));
  return memory;
}

// All but the blocks.
kernels::FingerprintWeight weight_of(const FingerprintCall& call) {
  const auto element = static_cast<int64_t>(element_bytes(call));
  const bool dense = call.w.ld == 0 || call.w.ld == call.k || call.n == 1;
  return {.w = static_cast<const kernels::u8*>(call.w.data),
          .pitch = (dense ? call.n * call.k : call.w.ld) * element,
          .row_bytes = (dense ? call.n * call.k : call.k) * element,
          .seed = call.seed,
          .state = static_cast<kernels::FingerprintState*>(call.fingerprint),
          .valid = call.noop_flag,
          .rows = dense ? 1 : static_cast<kernels::u32>(call.n),
          .first_block = 0,
          .blocks = 0,
          .padding = 0};
}

// Weights of a launch share the device by their bytes. Returns the launch's blocks.
int64_t set_blocks(kernels::FingerprintArgs& args, int sm_count) {
  const std::span weights(args.tensors, static_cast<size_t>(args.count));
  int64_t all = 0;
  for (const kernels::FingerprintWeight& w : weights) all += chunks_of(w);
  const int64_t resident = kFingerprintBlocksPerSm * sm_count;
  int32_t first = 0;
  for (kernels::FingerprintWeight& w : weights) {
    const int64_t chunks = chunks_of(w);
    const auto share = static_cast<int64_t>(static_cast<double>(chunks) / static_cast<double>(all) *
                                            static_cast<double>(resident));
    w.first_block = first;
    w.blocks = static_cast<int32_t>(
        std::clamp<int64_t>(ceil_div(chunks, kChunksOfBlock), 1, std::max<int64_t>(share, 1)));
    first += w.blocks;
  }
  return first;
}

Status check_all(Context& context, const FingerprintCalls& calls, Stream stream) {
  for (size_t i = 0; i < calls.count; ++i) {
    const FingerprintCall call = calls.at(i);
    Status good = check(call);
    if (good) {
      const CallMemory memory = memory_of(call);
      good = memory.check(kCall, context, stream);
    }
    if (good && chunks_of(weight_of(call)) > std::numeric_limits<uint32_t>::max()) [[unlikely]] {
      good = fail(ErrorCode::kUnsupported, "{}: a weight of {} x {} has more than 64 GiB", kCall,
                  call.n, call.k);
    }
    for (size_t other = 0; good && other < i; ++other) {
      if (calls.at(other).fingerprint != call.fingerprint) continue;
      good =
          fail(ErrorCode::kInvalidArgument,
               "float8_fingerprint_args.fingerprint is that of args[{}]; each weight has its own",
               other);
    }
    if (!good) [[unlikely]] {
      good.error().message = f8::format("args[{}]: {}", i, good.error().message);
      return good;
    }
  }
  return {};
}

}  // namespace

Status compare_weights(Context& context, const FingerprintCalls& calls, Stream stream) {
  F8_TRY(check_all(context, calls, stream));
  Context::State& state = context.state();
  const Kernel* kernel =
      F8_TRY(kept_kernel(context, state.fingerprint_kernel, codegen::FingerprintSpec{}));
  if (calls.count == 0) return {};
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  for (size_t first = 0; first < calls.count; first += kernels::kMaxFingerprints) {
    kernels::FingerprintArgs args;
    args.count =
        static_cast<int32_t>(std::min<size_t>(calls.count - first, kernels::kMaxFingerprints));
    args.padding = 0;
    for (int32_t i = 0; i < args.count; ++i) {
      args.tensors[i] = weight_of(calls.at(first + static_cast<size_t>(i)));
    }
    const int64_t blocks = set_blocks(args, state.info.sm_count);
    F8_TRY(launch_with(args, state.driver, *kernel, blocks, state.options.programmatic_launch,
                       stream));
  }
  return {};
}

}  // namespace f8::runtime
