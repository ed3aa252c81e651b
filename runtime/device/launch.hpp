// The launch of a loaded kernel. Nothing here allocates; the only cost is the driver's own.
#pragma once

#include "runtime/device/context.hpp"
#include "runtime/device/driver.hpp"

namespace f8::runtime {

// The dynamic shared memory with which no more than `blocks_per_sm` blocks of a kernel fit an SM.
[[nodiscard]] int occupancy_limited_smem_bytes(const Kernel& kernel, int64_t blocks_per_sm);

// Enqueues `blocks` blocks in x. `parameters` are pointers to the kernel's parameters, in order.
// `blocks_beside` counts the blocks of another launch that may run at the same time. With
// `programmatic` the launch is overlapped with its predecessor's end by programmatic dependent
// launch (PDL): our kernels wait for the predecessor themselves (griddepcontrol.wait) before they
// touch global memory.
[[nodiscard]] Status launch(const Driver& driver, const Kernel& kernel, int64_t blocks,
                            void** parameters, bool programmatic, Stream stream,
                            int64_t blocks_beside = 0);
// Launches a kernel whose only parameter is `args`.
template <class Args>
[[nodiscard]] Status launch_with(const Args& args, const Driver& driver, const Kernel& kernel,
                                 int64_t blocks, bool programmatic, Stream stream,
                                 int64_t blocks_beside = 0) {
  void* parameters[] = {const_cast<Args*>(&args)};
  return launch(driver, kernel, blocks, parameters, programmatic, stream, blocks_beside);
}

}  // namespace f8::runtime
