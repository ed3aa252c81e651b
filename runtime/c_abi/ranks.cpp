#include "runtime/c_abi/ranks.hpp"

#include "runtime/distributed/communicators.hpp"
#include "runtime/distributed/scale_sync.hpp"

namespace f8::c_abi {

Result<runtime::AmaxReducer> amax_reducer(const runtime::Context& context, const char* field,
                                          float8_nccl_comm ranks, bool reduces) {
  if (ranks != nullptr && reduces) {
    F8_TRY(runtime::check_communicator(context, field, ranks));
  }
  return runtime::sync_amax;
}

}  // namespace f8::c_abi
