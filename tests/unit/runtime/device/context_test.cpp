#include "runtime/device/context.hpp"

#include <sys/stat.h>

#include <thread>

#include "tests/golden.hpp"
#include "tests/unit/runtime/fake_cuda.hpp"

namespace f8::runtime {
namespace {

using testing::FakeCuda;
using testing::says;
using testing::ScratchDirectory;

const codegen::KernelSpec kAmax = codegen::AmaxSpec{};

TEST(Context, RefusesAGpuThatIsNoHopper) {
  FakeCuda cuda;
  cuda.cc_major = 8;
  const ScratchDirectory directory;
  const auto context = Context::create(0, {.cache_dir = directory.path()});
  ASSERT_FALSE(context);
  EXPECT_EQ(context.error().code, ErrorCode::kUnsupported);
  EXPECT_MESSAGE(context, "A100", "8.0", "Hopper");
  EXPECT_EQ(cuda.retained, 0);
}

TEST(Context, RefusesADriverOlderThanTheCompiler) {
  FakeCuda cuda;
  cuda.driver_version = 12040;
  const ScratchDirectory directory;
  const auto context = Context::create(0, {.cache_dir = directory.path()});
  ASSERT_FALSE(context);
  EXPECT_EQ(context.error().code, ErrorCode::kEnvironment);
  EXPECT_MESSAGE(context, "CUDA", "12.4", "NVRTC", "13", "580");
}

TEST(Context, RefusesACacheThatOthersCanWrite) {
  FakeCuda cuda;
  const ScratchDirectory directory;
  ASSERT_EQ(::chmod(directory.path().c_str(), 0777), 0);
  const auto context = Context::create(0, {.cache_dir = directory.path()});
  EXPECT_MESSAGE(context, directory.path());
  EXPECT_EQ(cuda.retained, 0);
}

TEST(Context, RetainFailureIsReported) {
  FakeCuda cuda;
  cuda.retain_result = CUDA_ERROR_OUT_OF_MEMORY;
  const ScratchDirectory directory;
  const auto context = Context::create(0, {.cache_dir = directory.path()});
  ASSERT_FALSE(context);
  EXPECT_EQ(context.error().code, ErrorCode::kOutOfMemory);
}

TEST(Context, ReleasesWhatItRetained) {
  FakeCuda cuda;
  {
    const auto context = cuda.context();
    ASSERT_TRUE(context->kernel(kAmax));
    EXPECT_EQ(cuda.retained, 1);
  }
  EXPECT_EQ(cuda.retained, 0);
  EXPECT_EQ(cuda.modules_unloaded, 1);
  EXPECT_EQ(cuda.current, nullptr) << "the caller's context is current again";
}

TEST(Context, LoadsAKernelOnce) {
  FakeCuda cuda;
  const auto context = cuda.context();
  const Kernel* first = context->kernel(kAmax).value();
  EXPECT_EQ(context->kernel(kAmax).value(), first);
  EXPECT_EQ(cuda.modules_loaded, 1);
  EXPECT_EQ(first->threads, 256);
  EXPECT_EQ(first->cluster_size, 1);
  EXPECT_EQ(first->registers, 168);
}

TEST(Context, LoadsAKernelOnceFromManyThreads) {
  FakeCuda cuda;
  const auto context = cuda.context();
  std::vector<std::thread> threads;
  std::vector<const Kernel*> kernels(8);
  for (size_t i = 0; i < kernels.size(); ++i) {
    threads.emplace_back([&, i] { kernels[i] = context->kernel(kAmax).value(); });
  }
  for (auto& thread : threads) thread.join();
  for (const Kernel* kernel : kernels) EXPECT_EQ(kernel, kernels.front());
  EXPECT_EQ(cuda.modules_loaded, 1);
}

TEST(Context, GemmKernelsGetTheirSharedMemoryAndClusters) {
  FakeCuda cuda;
  cuda.active_clusters = 60;
  const auto context = cuda.context();
  codegen::GemmSpec spec;
  spec.config = parse_gemm_config("128x256s4c2x1w2g8").value();
  const Kernel* kernel = context->kernel(spec).value();
  EXPECT_EQ(kernel->cluster_size, 2);
  EXPECT_EQ(kernel->threads, 384);
  EXPECT_EQ(kernel->resident_clusters, 60);
  EXPECT_GT(kernel->smem_bytes, 48 << 10);
  EXPECT_EQ(cuda.modules.back()->max_dynamic_smem, kernel->smem_bytes);
}

TEST(Context, WithoutAnAnswerTheSmsLimitTheClusters) {
  FakeCuda cuda;
  cuda.sm_count = 133;
  const auto context = cuda.context();
  codegen::GemmSpec spec;
  spec.config = parse_gemm_config("128x256s4c2x1w2g8").value();
  EXPECT_EQ(context->kernel(spec).value()->resident_clusters, 66);
}

TEST(Context, OutOfMemoryOnLoadNamesTheKernelAndIsNotRemembered) {
  FakeCuda cuda;
  const auto context = cuda.context();
  cuda.load_result = CUDA_ERROR_OUT_OF_MEMORY;
  const auto failed = context->kernel(kAmax);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, ErrorCode::kOutOfMemory);
  EXPECT_MESSAGE(failed, "amax/bf16/tensor");
  cuda.load_result = CUDA_SUCCESS;
  EXPECT_TRUE(context->kernel(kAmax));
}

TEST(Context, RefusesAnIllegalSpec) {
  FakeCuda cuda;
  const auto context = cuda.context();
  codegen::GemmSpec spec;
  spec.config.stages = 1000;
  EXPECT_FALSE(context->kernel(spec));
  EXPECT_EQ(cuda.modules_loaded, 0);
}

TEST(Context, TableIsReplacedWhole) {
  FakeCuda cuda;
  const auto context = cuda.context();
  EXPECT_EQ(context->table(), nullptr);
  TuningTable table;
  table.devices = {{.name = "Fake H100"}};
  context->set_table(table);
  const auto held = context->table();
  context->set_table(TuningTable{});
  EXPECT_EQ(held->device_name(), "Fake H100") << "a plan being made keeps the table it began with";
  EXPECT_EQ(context->table()->device_name(), "");
}

}  // namespace
}  // namespace f8::runtime
