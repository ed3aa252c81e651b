// Launching a loaded kernel. Nothing here allocates; the only cost is the driver's own.
#pragma once

#include "runtime/device/context.hpp"
#include "runtime/device/driver.hpp"

namespace f8::runtime {

// Dynamic shared memory with which no more than `blocks_per_sm` blocks of a kernel fit an SM.
[[nodiscard]] int even_smem_bytes(const Kernel& kernel, int64_t blocks_per_sm);

// Enqueues `blocks` blocks in x. `parameters` are pointers to the kernel's parameters, in order.
// `blocks_beside` are those of another launch that may run at the same time. With `programmatic`
// the kernel may start before its predecessor on the stream ends: ours wait for it themselves
// (griddepcontrol.wait) before they touch global memory.
[[nodiscard]] Status launch(const Driver& driver, const Kernel& kernel, int64_t blocks,
                            void** parameters, bool programmatic, Stream stream,
                            int64_t blocks_beside = 0);

}  // namespace f8::runtime
