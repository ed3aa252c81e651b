// The layout of a routing against the reference, word for word: good routings, and offsets that fall,
// are negative or lie beyond m.
#include "runtime/experts/group_layout.hpp"

#include "recipes/reference/groups.hpp"
#include "tests/gpu/experts/routings.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

using kernels::GroupLayout;

// The words that a layout of these offsets has; those that nothing is written to are 0.
std::vector<int32_t> expected_words(const GroupLayout& layout, const Routing& routing) {
  const reference::Groups groups = reference::groups(routing.ends, routing.m);
  std::vector<int32_t> words(static_cast<size_t>(layout.words()));
  const auto put = [&](int64_t at, const std::vector<int32_t>& values) {
    std::ranges::copy(values, words.begin() + at);
  };
  put(kernels::kGroupError, {static_cast<int32_t>(groups.error)});
  put(kernels::kBadExpert, {groups.bad_expert});
  put(kernels::kGroupRows, {groups.rows});
  put(kernels::kGroupsInUse, {groups.in_use()});
  put(layout.at_starts(), groups.starts);
  put(layout.at_lengths(), groups.lengths);
  put(layout.at_blocks(), groups.blocks);
  put(layout.at_scales(), groups.scales);
  put(layout.at_order(), groups.order);
  for (int32_t table = 0; table < kernels::kRowTileTables; ++table) {
    const auto tiles = reference::row_tiles(groups, (table + 1) * kernels::kRowTileStep);
    put(kernels::kRowTileCounts + table, {static_cast<int32_t>(tiles.size())});
    EXPECT_LE(static_cast<int64_t>(tiles.size()), layout.row_tiles(table));
    int64_t at = layout.at_row_tiles(table);
    for (int64_t i = 0; i < layout.row_tiles(table); ++i, at += 4) put(at, {-1, 0, 0, 0});
    at = layout.at_row_tiles(table);
    for (const auto& [group, row, end, scale_row] : tiles) {
      put(at, {group, row, end, scale_row});
      at += 4;
    }
  }
  return words;
}

class GroupLayoutTest : public GpuTest {
 protected:
  GroupLayoutPlan plan(int64_t m_max, size_t experts) const {
    return GroupLayoutPlan::create(context_, m_max, static_cast<int64_t>(experts)).value();
  }
  [[nodiscard]] DeviceBuffer zeros(size_t bytes) const {
    return {context(), std::vector<uint8_t>(bytes)};
  }
  void check(const Routing& routing, int64_t m_max) {
    const GroupLayoutPlan layouts = plan(m_max, routing.ends.size());
    const GroupLayout layout{.experts = static_cast<int32_t>(routing.ends.size()),
                             .m_max = static_cast<int32_t>(m_max)};
    const DeviceBuffer offsets(context(), routing.ends);
    const DeviceBuffer words = zeros(layouts.bytes());
    F8_ASSERT_OK(layouts.run(
        {.offsets = offsets.as<int32_t>(), .m = routing.m, .layout = {words.as(), layouts.bytes()}},
        nullptr));
    const std::vector<int32_t> expected = expected_words(layout, routing);
    EXPECT_EQ(words.download<int32_t>(), expected) << routing.name;
    EXPECT_TRUE(words.guards_are_whole()) << routing.name;
    const auto error = layouts.take_error(words.as(), nullptr);
    F8_ASSERT_OK(error);
    EXPECT_EQ(error->code, expected[kernels::kGroupError]);
    EXPECT_EQ(error->expert,
              error->code == FLOAT8_NO_GROUP_ERROR ? -1 : expected[kernels::kBadExpert]);
  }
};

TEST_F(GroupLayoutTest, GivesEachGroupItsPlace) {
  for (const Routing& routing : routings(by_device(4096, 256))) {
    check(routing, std::max(routing.m, 1));
    check(routing, routing.m + 1000);  // of a larger plan
  }
}

TEST_F(GroupLayoutTest, ClampsBadOffsets) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const Routing routing = bad_routing(seed);
    check(routing, std::max(routing.m, 1));
  }
}

// The error of the first bad offsets stays until it is asked for, whatever follows.
TEST_F(GroupLayoutTest, KeepsTheFirstErrorUntilItIsAskedFor) {
  const GroupLayoutPlan layouts = plan(100, 3);
  const DeviceBuffer words = zeros(layouts.bytes());
  const auto run = [&](const std::vector<int32_t>& ends) {
    const DeviceBuffer offsets(context(), ends);
    F8_ASSERT_OK(layouts.run(
        {.offsets = offsets.as<int32_t>(), .m = 100, .layout = {words.as(), layouts.bytes()}},
        nullptr));
    F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));
  };
  run({10, 5, 200});
  run({10, -7, 20});
  run({10, 20, 30});
  auto error = layouts.take_error(words.as(), nullptr);
  F8_ASSERT_OK(error);
  EXPECT_EQ(error->code, FLOAT8_FALLING_END);
  EXPECT_EQ(error->expert, 1);
  error = layouts.take_error(words.as(), nullptr);
  F8_ASSERT_OK(error);
  EXPECT_EQ(error->code, FLOAT8_NO_GROUP_ERROR);
  run({10, 20, 101});
  error = layouts.take_error(words.as(), nullptr);
  F8_ASSERT_OK(error);
  EXPECT_EQ(error->code, FLOAT8_END_BEYOND_M);
  EXPECT_EQ(error->expert, 2);
}

// A graph reads the offsets of each replay.
TEST_F(GroupLayoutTest, AGraphReadsNewOffsets) {
  const GroupLayoutPlan layouts = plan(500, 5);
  const GroupLayout layout{.experts = 5, .m_max = 500};
  DeviceBuffer offsets = zeros(5 * sizeof(int32_t));
  DeviceBuffer words = zeros(layouts.bytes());
  const DeviceStream stream(context());
  const DeviceGraph graph(context(), stream, [&] {
    return layouts.run(
        {.offsets = offsets.as<int32_t>(), .m = 500, .layout = {words.as(), layouts.bytes()}},
        stream.get());
  });
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Routing routing = random_routing("graph", std::vector<double>(5, 1.0), 400, seed);
    routing.m = 500;
    offsets.upload(routing.ends.data(), offsets.bytes());
    graph.replay();
    EXPECT_EQ(words.download<int32_t>(), expected_words(layout, routing));
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
