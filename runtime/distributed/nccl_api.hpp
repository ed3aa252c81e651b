// The table of the NCCL functions that are used, filled from libnccl at first need. Communicators of
// emulated devices have a table of their own (emulated_ranks.hpp).
#pragma once

#include <nccl.h>

#include "base/error.hpp"

namespace f8::runtime {

#define F8_NCCL_FUNCTIONS(X)                 \
  X(all_reduce, ncclAllReduce)               \
  X(all_gather, ncclAllGather)               \
  X(reduce_scatter, ncclReduceScatter)       \
  X(broadcast, ncclBroadcast)                \
  X(comm_init_all, ncclCommInitAll)          \
  X(comm_destroy, ncclCommDestroy)           \
  X(comm_abort, ncclCommAbort)               \
  X(comm_count, ncclCommCount)               \
  X(comm_user_rank, ncclCommUserRank)        \
  X(comm_async_error, ncclCommGetAsyncError) \
  X(group_start, ncclGroupStart)             \
  X(group_end, ncclGroupEnd)                 \
  X(get_error_string, ncclGetErrorString)    \
  X(get_version, ncclGetVersion)

struct Nccl {
#define F8_NCCL_FIELD(field, function) decltype(&::function) field = nullptr;
  F8_NCCL_FUNCTIONS(F8_NCCL_FIELD)
#undef F8_NCCL_FIELD
  const char* hint = "; NCCL_DEBUG=WARN says more";  // ends the message of an error

  [[nodiscard]] Status check(ncclResult_t result, const char* call) const;
};

// kEnvironment where libnccl.so.2 cannot be opened.
[[nodiscard]] Result<const Nccl*> nccl();
// The table that serves this communicator, which is not null.
[[nodiscard]] Result<const Nccl*> nccl_of(const ncclComm* communicator);
// Puts `table` in the library's place; null puts the real one back. For tests alone.
void set_nccl_for_testing(const Nccl* table);

}  // namespace f8::runtime
