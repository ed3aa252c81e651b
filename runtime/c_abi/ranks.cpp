#include "runtime/c_abi/ranks.hpp"

#include "runtime/distributed/scale_sync.hpp"

namespace f8::c_abi {
namespace {

Status no_ranks(uint32_t*, size_t, float8_nccl_comm, float8_stream) {
  return fail(ErrorCode::kInternal, "an emulated device was asked to reduce over ranks");
}

}  // namespace

Result<runtime::AmaxReducer> amax_reducer(const runtime::Context& context, const char* field,
                                          float8_nccl_comm ranks, bool reduces) {
  if (!context.options().emulate) [[likely]] {
    return runtime::sync_amax;
  }
  if (ranks != nullptr && reduces) {
    return fail(ErrorCode::kInvalidArgument,
                "{} is given, and an emulated device is in no communicator; pass NULL, and reduce "
                "the amaxes of the scale state yourself if there are ranks",
                field);
  }
  return no_ranks;
}

}  // namespace f8::c_abi
