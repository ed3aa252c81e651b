// Calls from the host's side: what they do to the caller's thread, several threads at once, and the
// time that they take of it.
#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "runtime/device/launch.hpp"
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
  const Status forward = (*linear)->forward(t.forward(), t.workspace.as(), nullptr);
  CUcontext after = nullptr;
  driver().ctx_get_current(&after);
  F8_ASSERT_OK(context().make_current());
  F8_ASSERT_OK(forward);
  EXPECT_EQ(after, nullptr);
  EXPECT_LE(reference::relative_error(reference::matmul(t.x, t.w), t.y.bf16()), 0.06);
}

// The time of the calling thread for a call on a prepared plan, the driver's launches included. A
// stream that is full would make the host wait, so it is emptied between calls now and then. What
// else the machine does makes calls longer, never shorter: the limits are for the fastest tenth.
// How much of it is the driver's, a launch of a kernel that does nothing tells.
TEST_P(LinearHostTest, TimeOfACall) {
  const int calls = by_device(2000, 4);
  constexpr int kCallsInFlight = 100;
  struct Times {
    double fast, median;  // us; a tenth is not slower than `fast`
  };
  const auto times_of = [&](const auto& call) {
    std::vector<double> us;
    for (int i = 0; i < calls; ++i) {
      if (i % kCallsInFlight == 0) {
        EXPECT_EQ(driver().ctx_synchronize(), CUDA_SUCCESS);
        EXPECT_TRUE(call());  // the first behind an idle device wakes it
      }
      const auto begin = std::chrono::steady_clock::now();
      const Status status = call();
      const std::chrono::duration<double, std::micro> taken =
          std::chrono::steady_clock::now() - begin;
      EXPECT_TRUE(status) << status.error().message;
      us.push_back(taken.count());
    }
    std::ranges::sort(us);
    return Times{us[us.size() / 10], us[us.size() / 2]};
  };
  const auto idle = context().kernel(codegen::ScaleUpdateSpec{});
  F8_ASSERT_OK(idle);
  const DeviceStream stream(context());
  const auto bare_launch = [&] {
    kernels::ScaleUpdateArgs none{};
    void* parameters[] = {&none};
    return launch(driver(), **idle, 1, parameters, true, stream.get());
  };
  const Times bare = kEmulated ? Times{} : times_of(bare_launch);
  // Tensors that one launch quantizes, and some that take two.
  for (const Shape shape : {by_device<Shape>({1024, 1024, 1024}, {64, 48, 80}),
                            by_device<Shape>({4096, 4096, 2048}, {300, 208, 592})}) {
    const auto linear = plan(describe(GetParam(), shape));
    ASSERT_NE(linear, nullptr);
    Tensors t(context(), *linear, shape.m, 5);
    F8_ASSERT_OK(run(*linear, t));
    t.first_step = false;
    const Times forward =
        times_of([&] { return linear->forward(t.forward(), t.workspace.as(), stream.get()); });
    const Times backward =
        times_of([&] { return linear->backward(t.backward(), t.workspace.as(), stream.get()); });
    stream.synchronize();
    const size_t forward_steps = linear->forward_steps(t.forward(), t.workspace.as()).size();
    const size_t backward_steps = linear->backward_steps(t.backward(), t.workspace.as()).size();
    fmt::print(
        "{} {}: forward {:.2f} us of the host in {} launches, backward {:.2f} us in {} (fastest "
        "tenth of {} calls; medians {:.2f} and {:.2f}; a launch alone {:.2f})\n",
        GetParam(), to_string(shape), forward.fast, forward_steps, backward.fast, backward_steps,
        calls, forward.median, backward.median, bare.fast);
    EXPECT_LE(forward_steps, 6U);
    EXPECT_LE(backward_steps, 8U);
    if (kEmulated) continue;  // a launch is the work itself
    EXPECT_LE(forward.fast, 8) << to_string(shape);
    EXPECT_LE(backward.fast, 15) << to_string(shape);
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
