// Scales that every rank agrees on: the maxima of a sharded tensor, reduced over the ranks that
// hold its shards.
//
// A maximum is kept as the bits of |x| as fp32. Without a sign bit, those bits as unsigned integers
// have the order of the magnitudes, with infinity above every finite number and NaN above infinity.
// So an integer MAX over ranks gives exactly the amax that one device holding the whole tensor
// would have computed, NaN included, whatever the order of the reduction. A scale, and its rounding
// to a power of two, is computed after it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/error.hpp"

struct CUstream_st;
struct ncclComm;

namespace f8::runtime {

// Replaces `amax_bits[0, count)` (device memory, contiguous: the amaxes of all layers and operands)
// by their maxima over the ranks of `communicator`, in ONE all-reduce enqueued on `stream`. All
// ranks call it with the same count, in the same order. The communicator is the caller's and stays
// so. kEnvironment where libnccl.so.2 cannot be opened.
[[nodiscard]] Status sync_amax(uint32_t* amax_bits, size_t count, ncclComm* communicator,
                               CUstream_st* stream);

}  // namespace f8::runtime
