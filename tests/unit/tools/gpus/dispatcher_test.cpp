#include "tools/tuner/gpus/dispatcher.hpp"

#include <gtest/gtest.h>

#include "tests/unit/tools/fake_backend.hpp"

namespace f8::tuner {
namespace {

// A plan of two recipes for each M; a linear takes as long as its M says.
class DispatcherTest : public ::testing::Test {
 protected:
  Dispatcher deal(const std::vector<int64_t>& ms, size_t gpus) {
    std::set<std::string> wanted;
    for (const int64_t m : ms) {
      for (const char* recipe : {"tensorwise", "rowwise"}) {
        PlannedLinear linear;
        linear.problem = test_problem(Op::kLinear, recipe, {m, 512, 256});
        linear.predicted_s = static_cast<double>(m);
        wanted.insert(linear.problem.key());
        plan_.linears.push_back(std::move(linear));
      }
    }
    return Dispatcher(plan_, wanted, gpus);
  }
  static bool ended() { return true; }  // of a GPU that must not wait

  SweepPlan plan_;
};

TEST_F(DispatcherTest, TheLongestShapeGoesFirstAndStaysTogether) {
  Dispatcher dispatcher = deal({16, 32, 64}, 2);
  EXPECT_EQ(dispatcher.order(), (std::vector<size_t>{4, 5, 2, 3, 0, 1}));
  EXPECT_EQ(dispatcher.next(0, ended), 4u);
  EXPECT_EQ(dispatcher.next(1, ended), 2u);
  dispatcher.measured(1, false);
  EXPECT_EQ(dispatcher.next(1, ended), 3u);
  dispatcher.measured(0, false);
  EXPECT_EQ(dispatcher.next(0, ended), 5u);
}

TEST_F(DispatcherTest, AnIdleGpuTakesFromTheOneWithTheMostLeft) {
  Dispatcher dispatcher = deal({64}, 2);
  EXPECT_EQ(dispatcher.next(0, ended), 0u);
  EXPECT_EQ(dispatcher.next(1, ended), 1u);
  EXPECT_EQ(dispatcher.next(1, ended), std::nullopt);
}

TEST_F(DispatcherTest, TheOthersTakeOverWhatALostGpuHad) {
  Dispatcher dispatcher = deal({32, 64}, 2);
  EXPECT_EQ(dispatcher.next(0, ended), 2u);
  dispatcher.measured(0, true);  // a failure just before the GPU is lost is the GPU's
  EXPECT_EQ(dispatcher.next(0, ended), 3u);
  EXPECT_EQ(dispatcher.lose(0), std::vector<size_t>{2});
  EXPECT_EQ(dispatcher.left().linears, 4u);
  std::set<size_t> assigned;
  while (const auto linear = dispatcher.next(1, ended)) {
    assigned.insert(*linear);
    dispatcher.measured(1, false);
  }
  EXPECT_EQ(assigned, (std::set<size_t>{0, 1, 2, 3}));
  EXPECT_EQ(dispatcher.left().linears, 0u);
}

TEST_F(DispatcherTest, ALinearThatCostsTwoGpusIsGivenUp) {
  Dispatcher dispatcher = deal({32}, 3);
  for (const size_t gpu : {size_t{0}, size_t{1}}) {
    EXPECT_EQ(dispatcher.next(gpu, ended), 0u);
    (void)dispatcher.lose(gpu);
  }
  EXPECT_EQ(dispatcher.next(2, ended), 1u);
  dispatcher.measured(2, false);
  EXPECT_EQ(dispatcher.next(2, ended), std::nullopt);
  EXPECT_EQ(dispatcher.left().linears, 1u);
}

}  // namespace
}  // namespace f8::tuner
