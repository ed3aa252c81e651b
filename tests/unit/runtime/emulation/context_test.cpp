// The emulated device itself: how a context comes to it, and what its driver does and refuses.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <float8/float8.hpp>

#include "recipes/reference/reference.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/emulated_driver.hpp"
#include "runtime/device/launch.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::says;

std::shared_ptr<Context> emulated() {
  return Context::create(0, {.emulate = true}).value();
}

TEST(EmulationTest, EveryFunctionOfTheTableIsThere) {
  const Driver& driver = emulation::driver();
#define F8_EXPECT_FIELD(field, function) EXPECT_NE(driver.field, nullptr) << #function;
  F8_DRIVER_FUNCTIONS(F8_EXPECT_FIELD)
#undef F8_EXPECT_FIELD
}

TEST(EmulationTest, TheDeviceSaysWhatItIs) {
  const auto context = emulated();
  const DeviceInfo& device = context->device();
  EXPECT_TRUE(device.emulated);
  EXPECT_NE(device.name.find("emulated"), std::string::npos);
  EXPECT_EQ(device.cc, 90);
  EXPECT_EQ(device.sm_count, 132);
  EXPECT_EQ(device.sm_clock_max_mhz, 0);
  EXPECT_EQ(device.power_limit_w, 0);
  EXPECT_EQ(device.driver_version, 0);
}

TEST(EmulationTest, IsNeverAFallback) {
  const Result<const Driver*> real = driver();
  if (real) GTEST_SKIP() << "there is a driver here";
  const auto context = Context::create(0);
  ASSERT_FALSE(context);
  EXPECT_EQ(context.error().code, ErrorCode::kEnvironment);
}

TEST(EmulationTest, RefusesADeviceThatIsNotThere) {
  for (const int ordinal : {-1, emulation::kDevices}) {
    const auto context = Context::create(ordinal, {.emulate = true});
    ASSERT_FALSE(context);
    EXPECT_EQ(context.error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_TRUE(Context::create(emulation::kDevices - 1, {.emulate = true}));
}

TEST(EmulationTest, KernelsNeedNoCompiler) {
  const auto context = emulated();
  const codegen::KernelSpec spec = codegen::CastSpec{};
  const Kernel* const kernel = context->kernel(spec).value();
  EXPECT_EQ(kernel->spec, spec);
  EXPECT_EQ(context->kernel(spec).value(), kernel);
  EXPECT_EQ(kernel->registers, 0);
  EXPECT_FALSE(context->kernel(codegen::CastSpec{.q = false, .qt = false}));
  EXPECT_FALSE(cublaslt_suggestions(*context, {.shape = {16, 16, 16}}));
}

TEST(EmulationTest, MemoryIsCountedAndPoisoned) {
  const Driver& driver = emulation::driver();
  size_t before = 0;
  size_t total = 0;
  ASSERT_EQ(driver.mem_get_info(&before, &total), CUDA_SUCCESS);
  CUdeviceptr p = 0;
  ASSERT_EQ(driver.mem_alloc(&p, 1000), CUDA_SUCCESS);
  EXPECT_EQ(p % 256, 0U);
  size_t now = 0;
  ASSERT_EQ(driver.mem_get_info(&now, &total), CUDA_SUCCESS);
  EXPECT_EQ(before - now, 1024U);
  EXPECT_EQ(*reinterpret_cast<uint32_t*>(p), 0xffffffffU);
  ASSERT_EQ(driver.mem_free(p), CUDA_SUCCESS);
  const Status freed = driver.check(driver.mem_free(p), "cuMemFree");
  ASSERT_FALSE(freed);
  EXPECT_TRUE(says(freed.error(), "no such allocation"));
  const Status all = driver.check(driver.mem_alloc(&p, total + 1), "cuMemAlloc");
  ASSERT_FALSE(all);
  EXPECT_EQ(all.error().code, ErrorCode::kOutOfMemory);
  EXPECT_EQ(driver.mem_alloc(&p, 0), CUDA_ERROR_INVALID_VALUE);
}

TEST(EmulationTest, RefusesForeignStreamsAndEvents) {
  const Driver& driver = emulation::driver();
  const auto foreign = reinterpret_cast<CUstream>(uintptr_t{0x2000});
  const Status set = driver.check(driver.memset_d8_async(0, 0, 0, foreign), "cuMemsetD8Async");
  ASSERT_FALSE(set);
  EXPECT_TRUE(says(set.error(), "not a stream of an emulated device"));
  CUstream stream = nullptr;
  ASSERT_EQ(driver.stream_create(&stream, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver.stream_destroy(stream), CUDA_SUCCESS);
  EXPECT_EQ(driver.stream_synchronize(stream), CUDA_ERROR_INVALID_HANDLE) << "destroyed";
  EXPECT_EQ(driver.event_record(reinterpret_cast<CUevent>(foreign), nullptr),
            CUDA_ERROR_INVALID_HANDLE);
}

TEST(EmulationTest, HasNoClock) {
  const Driver& driver = emulation::driver();
  CUevent a = nullptr;
  ASSERT_EQ(driver.event_create(&a, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver.event_record(a, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(driver.event_synchronize(a), CUDA_SUCCESS);
  float ms = 0;
  EXPECT_EQ(driver.event_elapsed_time(&ms, a, a), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(driver.event_destroy(a), CUDA_SUCCESS);
}

// The error names the argument that a device could not work with.
TEST(EmulationTest, ALaunchThatCannotBeSaysWhy) {
  const auto context = emulated();
  const Driver& driver = context->state().driver;
  ASSERT_TRUE(context->make_current());
  const Kernel& kernel = *context->kernel(codegen::AmaxSpec{}).value();
  alignas(16) std::array<uint16_t, 64> x{};
  uint32_t partials = 7;
  kernels::AmaxArgs args{};
  args.count = 1;
  args.tensors[0].x = x.data();
  args.tensors[0].ld = 16;
  args.tensors[0].rows = 4;
  args.tensors[0].cols = 16;
  args.tensors[0].partials = &partials;
  args.tensors[0].blocks = 1;
  const auto launched = [&](int64_t blocks) {
    void* parameters[] = {&args};
    return launch(driver, kernel, blocks, parameters, true, nullptr);
  };
  ASSERT_TRUE(launched(1));
  EXPECT_EQ(partials, 0U);
  EXPECT_TRUE(says(launched(2).error(), "grid 2 for 1 blocks"));
  args.tensors[0].x = x.data() + 1;
  EXPECT_TRUE(says(launched(1).error(), "x misaligned"));
  args.tensors[0].x = x.data();
  args.tensors[0].partials = nullptr;
  EXPECT_TRUE(says(launched(1).error(), "no partials"));
  driver.ctx_set_current(nullptr);
  EXPECT_TRUE(says(launched(1).error(), "not current"));
}

// The public header on host memory: a program's own test on a machine without a GPU. The recipe
// leaves one GEMM to cuBLASLt, which is not needed here.
TEST(EmulationTest, ThroughThePublicInterface) {
  constexpr int64_t kM = 24;
  constexpr int64_t kN = 32;
  constexpr int64_t kK = 48;
  const auto context = float8::Context::create(0, {.cache_dir = "", .emulate = true});
  ASSERT_TRUE(context) << context.error().message;
  float8::LinearDesc desc;
  desc.m_max = kM;
  desc.n = kN;
  desc.k = kK;
  desc.recipe = float8::Recipe::named("rowwise_with_gw_hp");
  const auto linear = float8::Linear::plan(context.value(), desc);
  ASSERT_TRUE(linear) << linear.error().message;
  const auto x = reference::random_matrix(kM, kK, 1);
  const auto w = reference::random_matrix(kN, kK, 2);
  const auto dy = reference::random_matrix(kM, kN, 3);
  testing::Buffer tx(x), tw(w), tdy(dy), y(kM * kN * 2), dx(kM * kK * 2), dw(kN * kK * 2);
  testing::Buffer workspace(linear.value().workspace_bytes()), saved(linear.value().saved_bytes());
  ASSERT_TRUE(linear.value().forward({.x = {tx.data()},
                                      .w = {tw.data()},
                                      .y = {y.data()},
                                      .saved = {saved.data()},
                                      .workspace = {workspace.data()}},
                                     nullptr));
  ASSERT_TRUE(linear.value().backward({.dy = {tdy.data()},
                                       .x = {tx.data()},
                                       .dx = {dx.data()},
                                       .dw = {dw.data()},
                                       .saved = {saved.data()},
                                       .workspace = {workspace.data()}},
                                      nullptr));
  const auto expected =
      reference::linear(find_recipe("rowwise_with_gw_hp").value(), x, w, dy).value();
  EXPECT_LT(reference::relative_error(expected.y, y.bf16()), 2.5e-3);
  EXPECT_LT(reference::relative_error(expected.dx, dx.bf16()), 2.5e-3);
  EXPECT_LT(reference::relative_error(expected.dw, dw.bf16()), 2.5e-3);
}

// --- graphs

class EmulatedGraph : public ::testing::Test {
 protected:
  void SetUp() override {
    for (CUstream* stream : {&stream_, &other_}) {
      ASSERT_EQ(driver_.stream_create(stream, 0), CUDA_SUCCESS);
    }
    ASSERT_EQ(driver_.event_create(&event_, 0), CUDA_SUCCESS);
  }
  void TearDown() override {
    driver_.event_destroy(event_);
    driver_.stream_destroy(stream_);
    driver_.stream_destroy(other_);
  }
  CUresult begin() {
    return driver_.stream_begin_capture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  }
  CUresult set(int& where, unsigned value, CUstream stream) {
    return driver_.memset_d32_async(reinterpret_cast<CUdeviceptr>(&where), value, 1, stream);
  }
  const Driver& driver_ = emulation::driver();
  CUstream stream_ = nullptr;
  CUstream other_ = nullptr;
  CUevent event_ = nullptr;
};

TEST_F(EmulatedGraph, RecordsAndReplaysInOrder) {
  int a = 1;
  int b = 0;
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  ASSERT_EQ(begin(), CUDA_SUCCESS);
  ASSERT_EQ(driver_.memcpy_dtod_async(reinterpret_cast<CUdeviceptr>(&b),
                                      reinterpret_cast<CUdeviceptr>(&a), sizeof a, stream_),
            CUDA_SUCCESS);
  ASSERT_EQ(set(a, 9, stream_), CUDA_SUCCESS);
  ASSERT_EQ(driver_.stream_end_capture(stream_, &graph), CUDA_SUCCESS);
  EXPECT_EQ(a, 1) << "captured work is not done";
  ASSERT_EQ(driver_.graph_instantiate(&exec, graph, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver_.graph_destroy(graph), CUDA_SUCCESS);
  for (const int value : {5, 6}) {
    a = value;
    ASSERT_EQ(driver_.graph_launch(exec, stream_), CUDA_SUCCESS);
    EXPECT_EQ(b, value);
    EXPECT_EQ(a, 9);
  }
  ASSERT_EQ(driver_.graph_exec_destroy(exec), CUDA_SUCCESS);
}

TEST_F(EmulatedGraph, AStreamThatWaitsForACaptureJoinsIt) {
  int a = 0;
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  ASSERT_EQ(begin(), CUDA_SUCCESS);
  ASSERT_EQ(driver_.event_record(event_, stream_), CUDA_SUCCESS);
  ASSERT_EQ(driver_.stream_wait_event(other_, event_, 0), CUDA_SUCCESS);
  ASSERT_EQ(set(a, 3, other_), CUDA_SUCCESS);
  EXPECT_EQ(driver_.stream_end_capture(other_, &graph), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  ASSERT_EQ(driver_.stream_end_capture(stream_, &graph), CUDA_SUCCESS);
  EXPECT_EQ(a, 0);
  ASSERT_EQ(driver_.graph_instantiate(&exec, graph, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver_.graph_launch(exec, other_), CUDA_SUCCESS) << "no longer captured";
  EXPECT_EQ(a, 3);
  // The capture is over: its event orders nothing any more.
  ASSERT_EQ(driver_.stream_wait_event(other_, event_, 0), CUDA_SUCCESS);
  ASSERT_EQ(set(a, 4, other_), CUDA_SUCCESS);
  EXPECT_EQ(a, 4);
  driver_.graph_exec_destroy(exec);
  driver_.graph_destroy(graph);
}

TEST_F(EmulatedGraph, Misuse) {
  CUgraph graph = nullptr;
  EXPECT_EQ(driver_.stream_begin_capture(nullptr, CU_STREAM_CAPTURE_MODE_GLOBAL),
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_EQ(driver_.stream_end_capture(stream_, &graph), CUDA_ERROR_ILLEGAL_STATE);
  ASSERT_EQ(begin(), CUDA_SUCCESS);
  EXPECT_EQ(begin(), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(driver_.stream_destroy(stream_), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_EQ(driver_.stream_synchronize(stream_), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_EQ(driver_.stream_end_capture(stream_, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(graph, nullptr);
  CUgraphExec exec = nullptr;
  EXPECT_EQ(driver_.graph_instantiate(&exec, nullptr, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver_.graph_launch(nullptr, stream_), CUDA_ERROR_INVALID_VALUE);
}

}  // namespace
}  // namespace f8::runtime
