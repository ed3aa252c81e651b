// Where the rows of each expert are: by hand, and what holds for any offsets.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "recipes/reference/groups.hpp"

namespace f8::reference {
namespace {

using Words = std::vector<int32_t>;

TEST(Groups, HaveTheirPlaces) {
  const Groups g = groups(Words{130, 130, 131, 300}, 310);
  EXPECT_EQ(g.error, GroupError::kNone);
  EXPECT_EQ(g.rows, 300);
  EXPECT_EQ(g.starts, (Words{0, 130, 130, 131}));
  EXPECT_EQ(g.lengths, (Words{130, 0, 1, 169}));
  EXPECT_EQ(g.blocks, (Words{0, 2, 2, 3}));
  EXPECT_EQ(g.scales, (Words{0, 132, 132, 136}));
  EXPECT_EQ(g.order, (Words{3, 0, 2, 1}));
  EXPECT_EQ(row_tiles(g, 128), (std::vector<RowTile>{{0, 0, 130, 0},
                                                     {0, 128, 130, 128},
                                                     {2, 130, 131, 132},
                                                     {3, 131, 300, 136},
                                                     {3, 259, 300, 264}}));
}

TEST(Groups, EqualOnesKeepTheirOrder) {
  EXPECT_EQ(groups(Words{5, 5, 10, 17, 22}, 22).order, (Words{3, 0, 2, 4, 1}));
}

TEST(Groups, BadEndsAreClampedAndTheFirstIsNamed) {
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
  const struct {
    Words ends;
    GroupError error;
    int32_t expert;
    Words starts;
    int32_t rows;
  } cases[] = {
      {{10, 5, 20}, GroupError::kFalling, 1, {0, 10, 10}, 20},
      {{kLeast, 5, 20}, GroupError::kNegative, 0, {0, 0, 5}, 20},
      {{10, 41, 41}, GroupError::kBeyondM, 1, {0, 10, 40}, 40},
      {{10, 41, kLeast}, GroupError::kBeyondM, 1, {0, 10, 40}, 40},
      {{-1, -1, -1}, GroupError::kNegative, 0, {0, 0, 0}, 0},
  };
  for (const auto& c : cases) {
    const Groups g = groups(c.ends, 40);
    EXPECT_EQ(g.error, c.error);
    EXPECT_EQ(g.bad_expert, c.expert);
    EXPECT_EQ(g.starts, c.starts);
    EXPECT_EQ(g.rows, c.rows);
  }
}

TEST(Groups, AnyEndsGivePlacesInsideM) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const auto m = static_cast<int32_t>(random() % 500);
    Words ends(1 + random() % 30);
    for (int32_t& end : ends) {
      end =
          random() % 4 == 0 ? static_cast<int32_t>(random()) : static_cast<int32_t>(random() % 600);
    }
    const Groups g = groups(ends, m);
    int32_t at = 0;
    for (size_t e = 0; e < ends.size(); ++e) {
      ASSERT_EQ(g.starts[e], at);
      ASSERT_GE(g.lengths[e], 0);
      at += g.lengths[e];
    }
    ASSERT_EQ(at, g.rows);
    ASSERT_LE(at, m);
    for (const int32_t rows : {64, 128, 192, 256}) {
      ASSERT_LE(row_tiles(g, rows).size(), static_cast<size_t>(m / rows) + ends.size());
    }
  }
}

}  // namespace
}  // namespace f8::reference
