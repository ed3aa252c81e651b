// Calls from the host's side: what they do to the caller's thread, and several threads at once.
#include <memory>
#include <thread>

#include "tests/gpu/gemm_operands.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

class LinearHostTest : public RecipeTest {};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearHostTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

// One plan, a stream and buffers for each thread.
TEST_P(LinearHostTest, FromSeveralThreadsOnSeveralStreams) {
  constexpr size_t kThreads = 4;
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  struct Worker {
    Worker(const Context& context, const Linear& linear, uint64_t seed)
        : tensors(context, linear, 300, seed), stream(context) {}
    Tensors tensors;
    DeviceStream stream;
    Bits alone;
    Status status;
  };
  std::vector<std::unique_ptr<Worker>> workers;
  for (size_t i = 0; i < kThreads; ++i) {
    workers.push_back(std::make_unique<Worker>(context(), *linear, 10 * i + 5));
    Worker& worker = *workers.back();
    F8_ASSERT_OK(run(*linear, worker.tensors));
    worker.alone = results(worker.tensors);
    worker.tensors.poison_results();
  }
  F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));
  {
    std::vector<std::jthread> threads;
    for (const auto& worker : workers) {
      threads.emplace_back([&, worker = worker.get()] {
        for (int i = 0; i < repeats(50) && worker->status; ++i) {
          worker->status = run(*linear, worker->tensors, worker->stream.get());
        }
      });
    }
  }
  for (const auto& worker : workers) {
    F8_ASSERT_OK(worker->status);
    worker->stream.synchronize();
    EXPECT_EQ(results(worker->tensors), worker->alone);
    worker->tensors.expect_whole_guards();
  }
}

// The caller's current context, whatever it is, is the same after a call.
TEST_F(GpuTest, RunsFromAThreadWithoutAContext) {
  const auto linear = Linear::plan(context_, describe("tensorwise", {64, 48, 80}));
  F8_ASSERT_OK(linear);
  const Tensors t(context(), **linear, 64, 5);
  F8_ASSERT_OK(driver().check(driver().ctx_set_current(nullptr), "cuCtxSetCurrent"));
  const Status forward = (*linear)->forward(t.forward(), nullptr);
  CUcontext after = nullptr;
  driver().ctx_get_current(&after);
  F8_ASSERT_OK(context().make_current());
  F8_ASSERT_OK(forward);
  EXPECT_EQ(after, nullptr);
  EXPECT_LE(reference::relative_error(reference::matmul(t.x, t.w), t.y.bf16()), 0.06);
}

// The launches of a call, for tensors that one launch quantizes and for some that take two.
TEST_P(LinearHostTest, ACallHasFewLaunches) {
  for (const Shape shape :
       {Shape{64, 48, 80}, by_device<Shape>({4096, 4096, 2048}, {300, 208, 592})}) {
    const auto linear = plan(describe(GetParam(), shape));
    ASSERT_NE(linear, nullptr);
    const Tensors t(context(), *linear, shape.m, 5);
    EXPECT_LE(linear->forward_steps(t.forward()).size(), 6U);
    EXPECT_LE(linear->backward_steps(t.backward()).size(), 8U);
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
