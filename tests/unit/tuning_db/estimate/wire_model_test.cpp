// What collectives take: bytes, latency, hosts.
#include "tuning_db/estimate/wire_model.hpp"

#include <gtest/gtest.h>

namespace f8::tuning_db {
namespace {

constexpr double kMb = 1e6;

WireModel model() {
  WireModel m;
  m.launch_us = 10;
  m.nvlink = {.step_us = 2, .gb_per_s = 200};
  m.network = {.step_us = 8, .gb_per_s = 50};
  m.error = 0.1;
  m.measured = {{2, 1}, {8, 1}};
  return m;
}

TEST(WireModel, OneRankTakesNoTime) {
  for (const Collective c : kCollectives) EXPECT_EQ(model().us(c, {1, 1}, 100 * kMb), 0);
}

TEST(WireModel, ARingByItsTerms) {
  const WireModel m = model();
  // One step, and half of the bytes over NVLink.
  EXPECT_DOUBLE_EQ(m.us(Collective::kAllGather, {2, 1}, 100 * kMb), 10 + 2 + 50e6 / 200e3);
  EXPECT_DOUBLE_EQ(m.us(Collective::kReduceScatter, {2, 1}, 100 * kMb), 10 + 2 + 50e6 / 200e3);
  EXPECT_DOUBLE_EQ(m.us(Collective::kAllReduce, {2, 1}, 100 * kMb), 10 + 4 + 100e6 / 200e3);
  // Two hosts of two: two steps inside, one between; two cards are 100 GB/s.
  EXPECT_DOUBLE_EQ(m.us(Collective::kAllGather, {4, 2}, 100 * kMb), 10 + 4 + 8 + 75e6 / 100e3);
  // Eight cards are faster than NVLink, which then bounds.
  EXPECT_DOUBLE_EQ(m.us(Collective::kAllGather, {16, 2}, 160 * kMb), 10 + 28 + 8 + 150e6 / 200e3);
}

TEST(WireModel, MoreBytesTakeLonger) {
  for (const Collective c : kCollectives) {
    for (const RankGroup group : {RankGroup{2, 1}, {8, 1}, {64, 8}, {16384, 2048}, {32, 32}}) {
      double before = 0;
      for (double bytes = 4; bytes < 1e9; bytes *= 2) {
        const double us = model().us(c, group, bytes);
        EXPECT_GT(us, before) << to_string(c) << " " << group.ranks << " " << bytes;
        before = us;
      }
    }
  }
}

// Half of the bytes save nothing where latency is all, and half of the time where it is nothing.
TEST(WireModel, SmallSizesAreLatency) {
  const auto ratio = [](double bytes, RankGroup group) {
    return model().us(Collective::kAllGather, group, bytes) /
           model().us(Collective::kAllGather, group, bytes / 2);
  };
  EXPECT_LT(ratio(4096, {2, 1}), 1.01);
  EXPECT_GT(ratio(1000 * kMb, {2, 1}), 1.98);
  EXPECT_LT(ratio(100 * kMb, {16384, 2048}), ratio(100 * kMb, {8, 1}));
}

TEST(WireModel, CrossingHostsCostsStepsAndBandwidth) {
  const WireModel m = model();
  for (const Collective c : kCollectives) {
    EXPECT_GT(m.us(c, {2, 2}, 4), m.us(c, {2, 1}, 4)) << "latency";
    EXPECT_GT(m.us(c, {2, 2}, 100 * kMb), 3 * m.us(c, {2, 1}, 100 * kMb)) << "one card";
    EXPECT_GT(m.us(c, {8, 8}, 100 * kMb), m.us(c, {8, 2}, 100 * kMb)) << "fewer cards a host";
  }
  WireModel faster = m;
  faster.network.gb_per_s = 100;
  EXPECT_LT(faster.us(Collective::kAllGather, {8, 8}, 100 * kMb),
            m.us(Collective::kAllGather, {8, 8}, 100 * kMb));
  EXPECT_EQ(faster.us(Collective::kAllGather, {8, 1}, 100 * kMb),
            m.us(Collective::kAllGather, {8, 1}, 100 * kMb));
}

// A ring of words is 2 * (ranks - 1) steps, a tree of 1024 hosts 20 of the network's.
TEST(WireModel, AnAllReduceOfWordsClimbsATree) {
  const double us = model().us(Collective::kAllReduce, {8192, 1024}, 4);
  EXPECT_NEAR(us, 10 + 14 * 2 + 20 * 8, 0.01);
  EXPECT_NEAR(model().us(Collective::kAllReduce, {8192, 1024}, 100 * kMb),
              10 + 14 * 2 + 20 * 8 + 200e6 / 200e3, 1e-6);
}

TEST(WireModel, ItsIntervalIsTwiceTheErrorOfWhatWasMeasured) {
  EXPECT_DOUBLE_EQ(model().half_width(), 0.2);
  EXPECT_TRUE(model().is_measured({8, 1}));
  EXPECT_FALSE(model().is_measured({8, 2}));
  EXPECT_FALSE(model().is_measured({64, 8}));
}

// What a gather in bf16 takes over one in fp8, on two GPUs, as docs/lab/distributed.md has it.
TEST(WireModel, TheBuiltInConstantsGiveWhatWasMeasured) {
  const WireModel& m = WireModel::fitted();
  const auto ratio = [&](double n, double k) {
    return m.us(Collective::kAllGather, {2, 1}, 2 * n * k) /
           m.us(Collective::kAllGather, {2, 1}, n * k);
  };
  ASSERT_TRUE(m.is_measured({2, 1}));
  EXPECT_GT(m.error, 0);
  EXPECT_NEAR(ratio(1024, 4096), 1.3, 0.25);
  EXPECT_NEAR(ratio(4096, 4096), 1.5, 0.25);
  EXPECT_NEAR(ratio(14336, 4096), 1.75, 0.25);
  EXPECT_NEAR(ratio(28672, 8192), 1.86, 0.25);
}

}  // namespace
}  // namespace f8::tuning_db
