// The table of the NCCL functions that are used, filled from libnccl at first need.
#pragma once

#include <nccl.h>

#include "base/error.hpp"

namespace f8::runtime {

#define F8_NCCL_FUNCTIONS(X)              \
  X(all_reduce, ncclAllReduce)            \
  X(comm_init_all, ncclCommInitAll)       \
  X(comm_destroy, ncclCommDestroy)        \
  X(group_start, ncclGroupStart)          \
  X(group_end, ncclGroupEnd)              \
  X(get_error_string, ncclGetErrorString) \
  X(get_version, ncclGetVersion)

struct Nccl {
#define F8_NCCL_FIELD(field, function) decltype(&::function) field = nullptr;
  F8_NCCL_FUNCTIONS(F8_NCCL_FIELD)
#undef F8_NCCL_FIELD

  [[nodiscard]] Status check(ncclResult_t result, const char* call) const;
};

// kEnvironment where libnccl.so.2 cannot be opened.
[[nodiscard]] Result<const Nccl*> nccl();
// Puts `table` in the library's place; null puts the real one back. For tests alone.
void set_nccl_for_testing(const Nccl* table);

}  // namespace f8::runtime
