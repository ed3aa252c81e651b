// Communicators of emulated devices: the ranks are threads of one process, and a collective is a
// rendezvous of theirs in host memory. They are reached through a table of NCCL's functions, so that
// all code above it is the same for both.
//
//   order     reductions add ranks 0, 1, 2, ... in turn, rounded to the element type each time, so
//             results are the same bits in every run
//   errors    ranks that call different operations, counts or types, a rank that does not come
//             within the timeout, and a rank that leaves, are an error of all ranks, which names
//             the operation and the rank; after it the communicator is of no use
//   streams   a collective is done when the call returns; a stream under capture keeps it in its
//             graph, whose launch is then the call
//   threads   each rank has a thread of its own, or a thread brings several ranks in one group
#pragma once

#include <chrono>
#include <vector>

#include "runtime/distributed/nccl_api.hpp"

namespace f8::runtime {

inline constexpr int kMostEmulatedRanks = 64;

// Makes one communicator for each rank. A rank waits for `timeout` at most for another to come.
[[nodiscard]] Result<std::vector<ncclComm*>> make_emulated_ranks(int ranks,
                                                                 std::chrono::milliseconds timeout);
// True of the handles that it gives, also after they were destroyed.
[[nodiscard]] bool is_emulated(const ncclComm* communicator);
[[nodiscard]] const Nccl& emulated_nccl();

}  // namespace f8::runtime
