// The device as the driver shows it, and kernels loaded for real.
#include "runtime/device/context.hpp"

#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

class ContextTest : public GpuTest {};

TEST_F(ContextTest, DeviceInfoIsPlausible) {
  const DeviceInfo& device = context().device();
  EXPECT_EQ(device.cc, 90);
  EXPECT_FALSE(device.name.empty());
  EXPECT_EQ(device.uuid.size(), 32U);
  EXPECT_GE(device.sm_count, 10);
  EXPECT_GE(device.l2_bytes, int64_t{1} << 20);
  EXPECT_GE(device.mem_bytes, int64_t{1} << 30);
  EXPECT_GT(device.mem_clock_mhz, 100);
  EXPECT_GT(device.sm_clock_max_mhz, 100);
  EXPECT_GE(device.driver_version, 13000);
}

TEST_F(ContextTest, EveryKernelOfALinearLoads) {
  codegen::GemmSpec gemm;
  gemm.config = codegen::gemm_candidates(gemm).front();
  for (const codegen::KernelSpec& spec :
       {codegen::KernelSpec(codegen::AmaxSpec{}), codegen::KernelSpec(codegen::CastSpec{}),
        codegen::KernelSpec(gemm)}) {
    SCOPED_TRACE(codegen::key(spec));
    const auto kernel = context().kernel(spec);
    F8_ASSERT_OK(kernel);
    EXPECT_NE((*kernel)->function, nullptr);
    EXPECT_EQ((*kernel)->spill_bytes, 0);
    EXPECT_GE((*kernel)->resident_clusters, 1);
    EXPECT_EQ(context().kernel(spec).value(), *kernel);
  }
}

TEST_F(ContextTest, ASecondContextSharesTheDevice) {
  const auto second = Context::create(0);
  F8_ASSERT_OK(second);
  F8_ASSERT_OK((*second)->kernel(codegen::AmaxSpec{}));
  EXPECT_EQ((*second)->device().uuid, context().device().uuid);
}

}  // namespace
}  // namespace f8::runtime::gpu
