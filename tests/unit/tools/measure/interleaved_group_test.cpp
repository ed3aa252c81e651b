#include "tools/tuner/measure/interleaved_group.hpp"

#include <gtest/gtest.h>

namespace f8::tuner {
namespace {

TEST(StopRule, StopsWhenTheIntervalIsNarrow) {
  const StopRule rule{.target = 0.005, .min_s = 0.2, .max_s = 2, .min_blocks = 5};
  EXPECT_TRUE(should_stop(rule, 0.3, 10, 0.004).stop);
  EXPECT_FALSE(should_stop(rule, 0.3, 10, 0.004).noisy);
  EXPECT_FALSE(should_stop(rule, 0.1, 10, 0.004).stop) << "before the least time";
  EXPECT_FALSE(should_stop(rule, 0.3, 4, 0.004).stop) << "too few blocks to know the spread";
  EXPECT_FALSE(should_stop(rule, 0.3, 10, 0.006).stop);
}

TEST(StopRule, NamesTheCriterionThatWasNotMet) {
  const StopRule rule{.target = 0.005, .min_s = 0.2, .max_s = 2, .min_blocks = 5};
  const Stop wide = should_stop(rule, 2.1, 40, 0.012);
  EXPECT_TRUE(wide.stop);
  EXPECT_TRUE(wide.noisy);
  EXPECT_NE(wide.unmet.find("half-width 1.20 % > 0.50 %"), std::string::npos) << wide.unmet;
  const Stop few = should_stop(rule, 2.1, 3, 0.001);
  EXPECT_TRUE(few.noisy);
  EXPECT_NE(few.unmet.find("3 blocks < 5"), std::string::npos) << few.unmet;
  const Stop good = should_stop(rule, 2.1, 40, 0.001);
  EXPECT_TRUE(good.stop);
  EXPECT_FALSE(good.noisy);
}

}  // namespace
}  // namespace f8::tuner
