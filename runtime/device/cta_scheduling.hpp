// CTA-to-SM scheduling: the order in which a device places the CTAs of a grid on its SMs, and the
// remap of clusters of two that makes up for it. Single CTAs fill one GPC, then the next one;
// clusters go to all GPCs in turn. Neighbours in a GEMM's grid read the same tiles at the same time,
// and what several SMs of a GPC request from L2 at once seems to be sent to them once
// (docs/kernels.md). So a cluster takes the index that single CTAs on its SMs would have.
//
// The remap affects time alone. The GPC that a device begins with changes from launch to launch, so
// the remap is right for most clusters, not for all, and for none where a grid starts while its
// predecessor ends.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "codegen/kernels/kernel_args.cuh"
#include "runtime/device/driver.hpp"

namespace f8::runtime {

// A permutation of cluster indices: what the cluster of an index works as.
using ClusterRemap = std::array<kernels::u8, kernels::kMaxRemappedClusters>;

[[nodiscard]] ClusterRemap identity_remap();  // 0, 1, 2, ...
// The remap of a grid of `clusters` clusters: the first of `remap`, ranked in its order.
[[nodiscard]] ClusterRemap remap_of_first(const ClusterRemap& remap, size_t clusters);

// The remap of a device that places the single CTAs of a grid (one an SM) and the first CTAs of a
// grid of clusters of two on these SMs, by index. Nothing where these are not every SM once, with
// the SMs 2i and 2i + 1 of a TPC side by side, and every TPC once.
[[nodiscard]] std::optional<ClusterRemap> cluster_remap(std::span<const uint32_t> blocks,
                                                        std::span<const uint32_t> clusters);

// Tells whether two grids of single CTAs were placed alike: most CTAs follow the same SM. A busy
// device places CTAs as SMs become free.
[[nodiscard]] bool scheduled_alike(std::span<const uint32_t> blocks,
                                   std::span<const uint32_t> others);

// Probes the current context's device by a few launches of some microseconds on a stream of its own
// and waits for them. The result is identity_remap() where the device is busy or places CTAs in
// another way.
[[nodiscard]] ClusterRemap probe_cluster_remap(const Driver& driver, int sm_count);

}  // namespace f8::runtime
