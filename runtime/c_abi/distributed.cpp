// Several devices: communicators, the gather of tensors in fp8, collectives.
#include "runtime/c_abi/common.hpp"
#include "runtime/distributed/communicators.hpp"
#include "runtime/distributed/gather.hpp"
#include "runtime/distributed/scale_sync.hpp"

using namespace f8::c_abi;
using f8::ErrorCode;
using f8::runtime::Collective;

namespace {

f8::Result<std::chrono::milliseconds> timeout_of(int32_t timeout_ms) {
  if (timeout_ms == 0) return f8::runtime::kRankTimeout;
  if (timeout_ms > 0) return std::chrono::milliseconds{timeout_ms};
  return f8::fail(ErrorCode::kInvalidArgument, "timeout_ms is {}; it is a time, or 0 for {} ms",
                  timeout_ms, f8::runtime::kRankTimeout.count());
}

float8_status collective(Collective what, const void* from, void* to, size_t count, int32_t dtype,
                         float8_nccl_comm communicator, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(communicator, "communicator"));
    if (count > 0) {
      F8_TRY(need(from, "from"));
      F8_TRY(need(to, "to"));
    }
    const f8::Dtype type = F8_TRY(dtype_of("dtype", dtype));
    return f8::runtime::run_collective(what, from, to, count, type, communicator, stream);
  });
}

}  // namespace

float8_status float8_comms_create(float8_context* const* contexts, size_t count, int32_t timeout_ms,
                                  float8_nccl_comm* out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    std::fill_n(out, count, nullptr);
    F8_TRY(need(contexts, "contexts"));
    if (count == 0) return f8::fail(ErrorCode::kInvalidArgument, "count is 0; there is a rank");
    std::vector<f8::runtime::Context*> all;
    for (size_t i = 0; i < count; ++i) {
      if (contexts[i] == nullptr) {
        return f8::fail(ErrorCode::kInvalidArgument, "contexts[{}] is NULL", i);
      }
      all.push_back(contexts[i]->context.get());
    }
    const auto timeout = F8_TRY(timeout_of(timeout_ms));
    const auto made = F8_TRY(f8::runtime::make_communicators(all, timeout));
    std::ranges::copy(made, out);
    return {};
  });
}

void float8_comm_destroy(float8_nccl_comm communicator) {
  if (communicator != nullptr) f8::runtime::destroy_communicator(communicator);
}

void float8_comm_abort(float8_nccl_comm communicator) {
  if (communicator != nullptr) f8::runtime::abort_communicator(communicator);
}

float8_status float8_comm_wait(float8_context* context, float8_nccl_comm communicator,
                               const char* operation, int32_t timeout_ms, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(context, "context"));
    F8_TRY(need(communicator, "communicator"));
    F8_TRY(need(operation, "operation"));
    const auto timeout = F8_TRY(timeout_of(timeout_ms));
    return f8::runtime::wait_for_ranks(*context->context, communicator, operation, timeout, stream);
  });
}

float8_status float8_amax_sync(uint32_t* amax_bits, size_t count, float8_nccl_comm communicator,
                               float8_stream stream) {
  return guarded([&] { return f8::runtime::sync_amax(amax_bits, count, communicator, stream); });
}

float8_status float8_gather_tensor(float8_context* context, const float8_gather_args* args,
                                   float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(context, "context"));
    float8_gather_args known;
    F8_TRY(read_struct(args, "float8_gather_args", known));
    F8_TRY(need(known.communicator, "float8_gather_args.communicator"));
    F8_TRY(f8::runtime::check_communicator(*context->context, "float8_gather_args.communicator",
                                           known.communicator));
    f8::runtime::GatherCall call;
    call.communicator = known.communicator;
    call.shard_rows = known.shard_rows;
    call.workspace = known.workspace;
    F8_TRY(need(known.shard, "float8_gather_args.shard"));
    F8_TRY(need(known.whole, "float8_gather_args.whole"));
    F8_TRY(read_tensor("float8_gather_args.shard", known.shard, call.shard));
    F8_TRY(read_tensor("float8_gather_args.whole", known.whole, call.whole));
    return f8::runtime::gather(*context->context, call, stream);
  });
}

size_t float8_gather_workspace_bytes(const float8_tensor* whole, int64_t shard_rows,
                                     int32_t ranks) {
  float8_tensor known;
  if (!read_struct(whole, "whole", known)) return 0;
  return f8::runtime::gather_workspace_bytes(known, shard_rows, ranks);
}

float8_status float8_all_gather(const void* from, void* to, size_t count, int32_t dtype,
                                float8_nccl_comm communicator, float8_stream stream) {
  return collective(Collective::kAllGather, from, to, count, dtype, communicator, stream);
}

float8_status float8_reduce_scatter(const void* from, void* to, size_t count, int32_t dtype,
                                    float8_nccl_comm communicator, float8_stream stream) {
  return collective(Collective::kReduceScatter, from, to, count, dtype, communicator, stream);
}

float8_status float8_all_reduce(const void* from, void* to, size_t count, int32_t dtype,
                                float8_nccl_comm communicator, float8_stream stream) {
  return collective(Collective::kAllReduce, from, to, count, dtype, communicator, stream);
}
