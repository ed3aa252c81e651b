// In which order a device deals the blocks of a grid to its SMs, and which places clusters of two
// take for it. Single blocks fill one GPC, then the next one; clusters go to all GPCs in turn.
// Neighbours in a matmul's grid read the same tiles at the same time, and what several SMs of a GPC
// ask L2 for at once seems to be sent to them once (docs/kernels.md): so clusters take the places
// that single blocks would have.
//
// Only time depends on places. With which GPC a device begins changes from launch to launch, so
// they are right for most clusters, not for all; for none where a grid starts while its predecessor
// ends.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "codegen/kernels/kernel_args.cuh"
#include "runtime/device/driver.hpp"

namespace f8::runtime {

// A permutation: the place of the cluster of an index.
using PairPlaces = std::array<kernels::u8, kernels::kMaxRemappedClusters>;

[[nodiscard]] PairPlaces places_as_dealt();  // 0, 1, 2, ...
// Of the first `pairs` clusters, in the order in which `places` has them: what a smaller grid
// takes.
[[nodiscard]] PairPlaces places_of_first(const PairPlaces& places, size_t pairs);

// SMs by index: of the blocks of a grid of one block an SM, and of the first blocks of a grid of
// clusters of two. Nothing where these are not every SM once, the SMs 2i and 2i + 1 of a TPC side
// by side, and every TPC once.
[[nodiscard]] std::optional<PairPlaces> pair_places(std::span<const uint32_t> blocks,
                                                    std::span<const uint32_t> clusters);

// Whether two grids of single blocks were dealt alike: most blocks went next to the same SM. A
// device that was busy deals to SMs as they become free.
[[nodiscard]] bool dealt_alike(std::span<const uint32_t> blocks, std::span<const uint32_t> others);

// Asks the current context's device by a few launches of some microseconds on a stream of their
// own, and waits for them. places_as_dealt() where the device is busy or does not deal as above.
[[nodiscard]] PairPlaces find_pair_places(const Driver& driver, int sm_count);

}  // namespace f8::runtime
