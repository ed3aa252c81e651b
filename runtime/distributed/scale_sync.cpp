#include "runtime/distributed/scale_sync.hpp"

#include "runtime/distributed/flight_recorder.hpp"
#include "runtime/distributed/nccl_api.hpp"

namespace f8::runtime {

Status sync_amax(uint32_t* amax_bits, size_t count, ncclComm* communicator, CUstream_st* stream) {
  if (communicator == nullptr) {
    return fail(ErrorCode::kInvalidArgument, "float8_amax_sync: communicator is NULL");
  }
  if (amax_bits == nullptr && count > 0) {
    return fail(ErrorCode::kInvalidArgument, "float8_amax_sync: amax_bits is NULL, count is {}",
                count);
  }
  const Nccl* library = F8_TRY(nccl_of(communicator));
  record_call(communicator, {CollectiveKind::kAllReduce, count, ncclUint32, ncclMax});
  return library->check(
      library->all_reduce(amax_bits, amax_bits, count, ncclUint32, ncclMax, communicator, stream),
      "ncclAllReduce");
}

}  // namespace f8::runtime
