// Blocks of a workspace: those that live at once never share a byte.
#include "runtime/device/interval_arena.hpp"

#include <gtest/gtest.h>

#include <random>

namespace {

using f8::runtime::IntervalArena;
using f8::runtime::kAlign;

struct Block {
  size_t bytes;
  int first, last;
};

void expect_apart(const IntervalArena& arena, const std::vector<Block>& blocks) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto& [bytes, first, last] = blocks[i];
    EXPECT_EQ(arena.at(i) % kAlign, 0U);
    EXPECT_LE(arena.at(i) + bytes, arena.size());
    for (size_t j = 0; j < i; ++j) {
      const Block& other = blocks[j];
      const bool live_at_once = first <= other.last && other.first <= last;
      const bool overlap =
          arena.at(i) < arena.at(j) + other.bytes && arena.at(j) < arena.at(i) + bytes;
      EXPECT_FALSE(live_at_once && overlap) << i << " and " << j;
    }
  }
}

TEST(IntervalArena, BlocksOfOtherTimesShareAddresses) {
  IntervalArena arena;
  const size_t a = arena.add(1000, 0, 1), b = arena.add(600, 1, 2), c = arena.add(900, 2, 3);
  arena.place();
  EXPECT_EQ(arena.at(a), arena.at(c));
  EXPECT_EQ(arena.at(b), 1024U);
  EXPECT_EQ(arena.size(), 1024U + 768U);
  EXPECT_EQ(arena.floor(), arena.size());
}

TEST(IntervalArena, NothingTakesNothing) {
  IntervalArena arena;
  arena.add(0, 0, 5);
  arena.place();
  EXPECT_EQ(arena.size(), 0U);
  EXPECT_EQ(arena.floor(), 0U);
}

TEST(IntervalArena, RandomLifetimesNeverShareAByte) {
  std::mt19937 random(7);
  const auto below = [&](int limit) { return std::uniform_int_distribution(0, limit - 1)(random); };
  for (int round = 0; round < 2000; ++round) {
    const int launches = 1 + below(12);
    std::vector<Block> blocks;
    IntervalArena arena;
    size_t sum = 0;
    for (int count = below(25); count > 0; --count) {
      const int first = below(launches);
      const Block block{static_cast<size_t>(below(8) == 0 ? 0 : below(5000)), first,
                        first + below(launches - first)};
      EXPECT_EQ(arena.add(block.bytes, block.first, block.last), blocks.size());
      blocks.push_back(block);
      sum += (block.bytes + kAlign - 1) / kAlign * kAlign;
    }
    arena.place();
    EXPECT_GE(arena.size(), arena.floor());
    EXPECT_LE(arena.size(), sum);
    expect_apart(arena, blocks);
    if (HasFailure()) return;
  }
}

}  // namespace
