#include "runtime/device/driver.hpp"

#include <gtest/gtest-spi.h>

#include "runtime/device/launch.hpp"
#include "tests/golden.hpp"
#include "tests/unit/runtime/fake_cuda.hpp"

namespace f8::runtime {
namespace {

using testing::FakeCuda;

TEST(Driver, MissingLibraryIsOneClearError) {
  const auto table = load_driver("libcuda-that-is-not-there.so.1");
  ASSERT_FALSE(table);
  EXPECT_EQ(table.error().code, ErrorCode::kEnvironment);
  EXPECT_MESSAGE(table, "NVIDIA", "float8_context_options.emulate",
                 "libcuda-that-is-not-there.so.1");
  EXPECT_EQ(table.error().message.find('\n'), std::string::npos);
}

TEST(Driver, LibraryWithoutTheEntryPointIsNoDriver) {
  const auto table = load_driver("libm.so.6");
  ASSERT_FALSE(table);
  EXPECT_EQ(table.error().code, ErrorCode::kEnvironment);
  EXPECT_MESSAGE(table, "libm.so.6");
}

TEST(Driver, ErrorsCarryTheDriversWords) {
  FakeCuda cuda;
  const Status oom = cuda.table().check(CUDA_ERROR_OUT_OF_MEMORY, "cuMemAlloc");
  ASSERT_FALSE(oom);
  EXPECT_EQ(oom.error().code, ErrorCode::kOutOfMemory);
  EXPECT_MESSAGE(oom, "CUDA_ERROR_OUT_OF_MEMORY", "2");
}

TEST(Driver, UnknownErrorsAreStillNumbered) {
  FakeCuda cuda;
  const Status status = cuda.table().check(CUDA_ERROR_NOT_SUPPORTED, "cuCall");
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kCuda);
  EXPECT_MESSAGE(status, "801");
}

TEST(Driver, StickyErrorsAskForARestart) {
  FakeCuda cuda;
  const Status sticky = cuda.table().check(CUDA_ERROR_ILLEGAL_ADDRESS, "cuLaunchKernelEx");
  EXPECT_MESSAGE(sticky);
  const Status other = cuda.table().check(CUDA_ERROR_INVALID_VALUE, "cuLaunchKernelEx");
  EXPECT_EQ(other.error().message.find("restart the process"), std::string::npos);
  EXPECT_TRUE(is_sticky(CUDA_ERROR_LAUNCH_FAILED));
  EXPECT_TRUE(is_sticky(CUDA_ERROR_ECC_UNCORRECTABLE));
  EXPECT_FALSE(is_sticky(CUDA_ERROR_OUT_OF_MEMORY));
}

TEST(Driver, InitFailureIsReported) {
  FakeCuda cuda;
  cuda.init_result = CUDA_ERROR_OUT_OF_MEMORY;
  const auto table = driver();
  EXPECT_MESSAGE(table, "cuInit");
}

TEST(Driver, ScopedContextPutsThePreviousOneBack) {
  FakeCuda cuda;
  const auto mine = reinterpret_cast<CUcontext>(uintptr_t{0x1000});
  const auto theirs = reinterpret_cast<CUcontext>(uintptr_t{0x2000});
  cuda.current = theirs;
  {
    const ScopedContext scope(cuda.table(), mine);
    EXPECT_TRUE(scope.status());
    EXPECT_EQ(cuda.current, mine);
    const ScopedContext again(cuda.table(), mine);
    EXPECT_EQ(cuda.context_switches, 1) << "a current context is not set again";
  }
  EXPECT_EQ(cuda.current, theirs);
}

TEST(Device, CountAndInfo) {
  FakeCuda cuda;
  cuda.device_count = 2;
  EXPECT_EQ(device_count().value(), 2);
  const DeviceInfo info = device_info(1).value();
  EXPECT_EQ(info.ordinal, 1);
  EXPECT_EQ(info.name, "Fake H100");
  EXPECT_EQ(info.uuid, "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff");
  EXPECT_EQ(info.cc, 90);
  EXPECT_EQ(info.sm_count, 132);
  EXPECT_EQ(info.l2_bytes, int64_t{50} << 20);
  EXPECT_EQ(info.mem_clock_mhz, 2619);
  EXPECT_EQ(info.sm_clock_max_mhz, 1980);
  EXPECT_EQ(info.driver_version, 13000);
  EXPECT_FALSE(info.mig);
}

TEST(Device, DriverWithoutAGpu) {
  FakeCuda cuda;
  cuda.init_result = CUDA_ERROR_NO_DEVICE;
  cuda.device_count = 0;
  EXPECT_EQ(device_count().value(), 0);
  const auto info = device_info(0);
  ASSERT_FALSE(info);
  EXPECT_EQ(info.error().code, ErrorCode::kEnvironment);
}

TEST(Device, OrdinalOutOfRange) {
  FakeCuda cuda;
  for (const int ordinal : {-1, 1, 99}) {
    const auto info = device_info(ordinal);
    ASSERT_FALSE(info);
    EXPECT_EQ(info.error().code, ErrorCode::kInvalidArgument);
    EXPECT_MESSAGE(info, std::to_string(ordinal));
  }
}

// A launch that is not recorded would make a test blind.
TEST(FakeDriver, FailsTheTestBeyondItsRecord) {
  FakeCuda cuda;
  cuda.emulate = false;
  const auto context = cuda.context();
  const Kernel& kernel = *context->kernel(codegen::ScaleUpdateSpec{}).value();
  ASSERT_TRUE(context->make_current());
  const auto launched = [&] {
    kernels::ScaleUpdateArgs args{};
    void* parameters[] = {&args};
    return launch(cuda.table(), kernel, 1, parameters, true, nullptr).has_value();
  };
  const size_t most = cuda.launches.capacity();
  for (size_t i = 0; i < most; ++i) ASSERT_TRUE(launched());
  EXPECT_NONFATAL_FAILURE(EXPECT_FALSE(launched()), "clear FakeCuda::launches");
  cuda.launches.clear();
  EXPECT_TRUE(launched());
  EXPECT_EQ(cuda.launches.capacity(), most);
}

}  // namespace
}  // namespace f8::runtime
