// The reserved bytes at the front of a workspace, which one-launch casts share from call to call:
// an emulated device tells when somebody else wrote to them in between.
//
// All of them set to one value, as by a memset, are a new workspace. So are those in memory that
// was freed, or whose last launch was one of a context that is gone.
#pragma once

#include <cstddef>

#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {

struct ReservedBytes {
  const void* begin = nullptr;
  size_t count = 0;
};
// The reserved bytes of a launch's workspace, on a device of `sm_count` SMs.
[[nodiscard]] ReservedBytes reserved_bytes(const kernels::QuantizeArgs& args, int sm_count);

// Nobody else has written to them since `remember`, as far as that is known.
[[nodiscard]] bool are_untouched(ReservedBytes bytes);
void remember(ReservedBytes bytes, const Module* owner);

void forget_memory(const void* begin, size_t bytes);
void forget_owner(const Module* owner);

}  // namespace f8::runtime::emulation
