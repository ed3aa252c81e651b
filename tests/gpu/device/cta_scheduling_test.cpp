// The CTA-to-SM scheduling of this device, and the cluster remap that reaches the kernels.
#include "runtime/device/cta_scheduling.hpp"

#include <algorithm>

#include "runtime/device/context_state.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

class CtaSchedulingTest : public GpuTest {};

TEST_F(CtaSchedulingTest, TheRemapIsAPermutationAndNotTheIdentityOnAnIdleDevice) {
  Context::State& state = context_->state();
  F8_ASSERT_OK(context_->make_current());
  ASSERT_EQ(state.driver.ctx_synchronize(), CUDA_SUCCESS);
  const ClusterRemap remap = probe_cluster_remap(state.driver, state.info.sm_count);
  ClusterRemap sorted = remap;
  std::ranges::sort(sorted);
  EXPECT_EQ(sorted, identity_remap());
  EXPECT_NE(remap, identity_remap());
}

TEST_F(CtaSchedulingTest, AKernelOfClustersOfTwoBringsIt) {
  codegen::GemmSpec spec;
  spec.config = {.tile_m = 128,
                 .tile_n = 128,
                 .stages = 6,
                 .cluster_m = 1,
                 .cluster_n = 2,
                 .warpgroups = 2,
                 .pingpong = true,
                 .raster_group = 8};
  F8_ASSERT_OK(context_->kernel(spec));
  EXPECT_TRUE(context_->state().cluster_remap);
}

}  // namespace
}  // namespace f8::runtime::gpu
