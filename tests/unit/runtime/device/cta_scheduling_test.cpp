// The remap of clusters of two, from the CTA-to-SM scheduling of a device.
#include "runtime/device/cta_scheduling.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace f8::runtime {
namespace {

// A device whose GPCs have these TPCs. Single blocks fill GPC after GPC, clusters of two go to one
// after the other that has room; both begin with GPC `first`.
struct Device {
  std::vector<std::vector<uint32_t>> gpcs;

  [[nodiscard]] std::vector<uint32_t> blocks(size_t first) const {
    std::vector<uint32_t> sms;
    for (size_t i = 0; i < gpcs.size(); ++i) {
      for (const uint32_t tpc : gpcs[(first + i) % gpcs.size()]) {
        sms.push_back(2 * tpc);
        sms.push_back(2 * tpc + 1);
      }
    }
    return sms;
  }
  [[nodiscard]] std::vector<uint32_t> clusters(size_t first) const {
    std::vector<uint32_t> sms;
    for (size_t turn = 0; turn < 9; ++turn) {
      for (size_t i = 0; i < gpcs.size(); ++i) {
        const auto& gpc = gpcs[(first + i) % gpcs.size()];
        if (turn < gpc.size()) sms.push_back(2 * gpc[turn]);
      }
    }
    return sms;
  }
};

// 132 SMs: of 8 GPCs two have 9 TPCs, the others 8. TPCs are numbered across GPCs.
Device h100() {
  Device device;
  device.gpcs.resize(8);
  for (uint32_t tpc = 0; tpc < 66; ++tpc) device.gpcs[tpc % 8].push_back(tpc);
  return device;
}

bool is_permutation(const ClusterRemap& remap) {
  ClusterRemap sorted = remap;
  std::ranges::sort(sorted);
  return sorted == identity_remap();
}

TEST(CtaScheduling, ClustersOfAGpcTakeNeighbouringIndices) {
  const Device device = h100();
  const auto clusters = device.clusters(0);
  const auto remap = cluster_remap(device.blocks(0), clusters);
  ASSERT_TRUE(remap);
  EXPECT_TRUE(is_permutation(*remap));
  std::vector<uint32_t> gpc_at(66);
  for (size_t i = 0; i < 66; ++i) gpc_at[(*remap)[i]] = clusters[i] / 2 % 8;
  EXPECT_TRUE(std::ranges::is_sorted(gpc_at));
  EXPECT_NE(*remap, identity_remap());
}

TEST(CtaScheduling, MostClustersAreRightWhereTheDeviceBeginsWithAnotherGpc) {
  const Device device = h100();
  const auto remap = cluster_remap(device.blocks(3), device.clusters(3));
  ASSERT_TRUE(remap);
  const auto later = device.clusters(6);
  int neighbours = 0;
  std::vector<uint32_t> gpc_at(66);
  for (size_t i = 0; i < 66; ++i) gpc_at[(*remap)[i]] = later[i] / 2 % 8;
  for (size_t i = 0; i + 1 < 66; ++i) neighbours += gpc_at[i] == gpc_at[i + 1] ? 1 : 0;
  EXPECT_GE(neighbours, 50);  // of 58
}

TEST(CtaScheduling, ASmallerGridKeepsTheOrder) {
  const Device device = h100();
  const auto clusters = device.clusters(0);
  const ClusterRemap all = cluster_remap(device.blocks(0), clusters).value();
  for (const size_t pairs : {0, 1, 2, 33, 64, 65, 66}) {
    const ClusterRemap remap = remap_of_first(all, pairs);
    EXPECT_TRUE(is_permutation(remap)) << pairs;
    std::vector<uint32_t> gpc_at(pairs, 99);
    for (size_t i = 0; i < pairs; ++i) {
      ASSERT_LT(remap[i], pairs);
      gpc_at[remap[i]] = clusters[i] / 2 % 8;
    }
    EXPECT_TRUE(std::ranges::is_sorted(gpc_at)) << pairs;
  }
  EXPECT_EQ(remap_of_first(all, 66), all);
}

TEST(CtaScheduling, AScheduleOfABusyDeviceGivesNoRemap) {
  const Device device = h100();
  const auto blocks = device.blocks(0);
  const auto clusters = device.clusters(0);
  const auto refused = [](std::vector<uint32_t> b, std::vector<uint32_t> c) {
    return !cluster_remap(b, c).has_value();
  };
  auto bad = blocks;
  bad[0] = bad[2];  // an SM twice
  EXPECT_TRUE(refused(bad, clusters));
  bad = blocks;
  std::swap(bad[1], bad[3]);  // the SMs of a TPC apart
  EXPECT_TRUE(refused(bad, clusters));
  bad = blocks;
  bad[0] = bad[1] = 1000;  // no SM of this device
  EXPECT_TRUE(refused(bad, clusters));
  bad = clusters;
  bad[5] = bad[6];  // a TPC twice
  EXPECT_TRUE(refused(blocks, bad));
  bad = clusters;
  bad[5] = 1000;
  EXPECT_TRUE(refused(blocks, bad));
  bad = clusters;
  bad.pop_back();
  EXPECT_TRUE(refused(blocks, bad));
  EXPECT_TRUE(refused(std::vector<uint32_t>(200), std::vector<uint32_t>(100))) << "too many";
  EXPECT_FALSE(refused({}, {}));
}

TEST(CtaScheduling, TwoSchedulesAreAlikeWhateverGpcTheyBeginWith) {
  const Device device = h100();
  EXPECT_TRUE(scheduled_alike(device.blocks(0), device.blocks(0)));
  EXPECT_TRUE(scheduled_alike(device.blocks(0), device.blocks(5)));
  auto random = device.blocks(0);
  std::shuffle(random.begin(), random.end(), std::mt19937(7));
  EXPECT_FALSE(scheduled_alike(device.blocks(0), random));
  EXPECT_FALSE(scheduled_alike(random, device.blocks(0)));
  EXPECT_FALSE(scheduled_alike({}, {}));
  random.pop_back();
  EXPECT_FALSE(scheduled_alike(device.blocks(0), random));
  random = device.blocks(0);
  random[9] = 1000;
  EXPECT_FALSE(scheduled_alike(random, device.blocks(0)));
  EXPECT_FALSE(scheduled_alike(device.blocks(0), random));
}

}  // namespace
}  // namespace f8::runtime
