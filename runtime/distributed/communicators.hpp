// The communicators of a process that drives all of its devices, and what calls ask of one.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include "recipes/dtype.hpp"
#include "runtime/device/context.hpp"

struct ncclComm;

namespace f8::runtime {

inline constexpr std::chrono::milliseconds kRankTimeout{60'000};

// One communicator for each context: NCCL's for GPUs, emulated ones for emulated devices.
[[nodiscard]] Result<std::vector<ncclComm*>> make_communicators(std::span<Context* const> contexts,
                                                                std::chrono::milliseconds timeout);
void destroy_communicator(ncclComm* communicator);
void abort_communicator(ncclComm* communicator);

// Refuses an emulated device's call with a communicator of NCCL, whose ranks do not know host memory,
// and a GPU's with an emulated one. `name` is the argument's.
[[nodiscard]] Status check_communicator(const Context& context, const char* name,
                                        const ncclComm* communicator);

[[nodiscard]] Status wait_for_ranks(Context& context, ncclComm* communicator, const char* operation,
                                    std::chrono::milliseconds timeout, Stream stream);

enum class Collective { kAllGather, kReduceScatter, kAllReduce };
// Reductions are sums. `count` is as NCCL counts.
[[nodiscard]] Status run_collective(Collective what, const void* from, void* to, size_t count,
                                    Dtype type, ncclComm* communicator, Stream stream);

}  // namespace f8::runtime
