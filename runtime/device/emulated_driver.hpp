// A device in host memory: the driver's table with functions that compute on the CPU, so that the
// whole runtime above it (plans, checks, layouts, launches) runs unchanged on a machine without a
// GPU. A context is emulated where ContextOptions::emulate asks for it, never of itself. runtime/emulation holds the
// functions; they are declared here because a context picks its driver.
//
//   memory    host memory; a caller may give any pointer of its own as a device pointer
//   streams   in order and synchronous: a launch has done its work when the call returns
//   graphs    launches, copies and memsets are recorded with their parameters and replayed
//   kernels   the loops of kernels.hpp over the very arguments that a device would get
//   events    order nothing that is not in order already; they have no times
// Arguments that a device would choke on make the launch fail, and the error says which.
#pragma once

#include "codegen/cubin_cache.hpp"
#include "runtime/device/driver.hpp"

namespace f8::runtime::emulation {

inline constexpr int kDevices = 8;  // ordinals 0 to 7, all of them the host's memory

[[nodiscard]] const Driver& driver();

// The stand-in for a compiled kernel: loading it finds the spec again.
[[nodiscard]] codegen::Cubin cubin(const codegen::KernelSpec& spec);

}  // namespace f8::runtime::emulation
