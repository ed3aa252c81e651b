// The CTA-to-SM scheduling of this device, and the cluster remap that reaches the kernels.
#include "runtime/device/cta_scheduling.hpp"

#include <algorithm>

#include "runtime/device/context_state.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

class DealingTest : public GpuTest {};

TEST_F(DealingTest, PlacesAreAPermutationAndOfAnIdleDeviceNotAsDealt) {
  Context::State& state = context_->state();
  F8_ASSERT_OK(context_->make_current());
  ASSERT_EQ(state.driver.ctx_synchronize(), CUDA_SUCCESS);
  const PairPlaces places = find_pair_places(state.driver, state.info.sm_count);
  PairPlaces sorted = places;
  std::ranges::sort(sorted);
  EXPECT_EQ(sorted, places_as_dealt());
  EXPECT_NE(places, places_as_dealt());
}

TEST_F(DealingTest, AKernelOfClustersOfTwoBringsThem) {
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
  EXPECT_TRUE(context_->state().pair_places);
}

}  // namespace
}  // namespace f8::runtime::gpu
