// What ranks send for a layer, what of it is exposed, and what that does to its speedup.
#include "tuning_db/estimate/wire_cost.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "tuning_db/estimate/builtin_tables.hpp"
#include "tuning_db/estimate/filter.hpp"

namespace f8::tuning_db {
namespace {

// No latency and no error, so that bytes are all: 1 us for 100 kB.
WireModel plain() {
  WireModel m;
  m.nvlink = {.step_us = 0, .gb_per_s = 100};
  m.network = {.step_us = 0, .gb_per_s = 10};
  m.cast_gb_per_s = 2780;
  m.measured = {{2, 1}, {4, 1}, {8, 1}};
  return m;
}

constexpr int64_t kTokens = 8192;
constexpr SpeedupInterval kSpeedup = {.speedup = 1.25, .lo = 1.2, .hi = 1.3};
const std::vector<NamedLinear> kBlock = {
    {"layers.0.attention.wq", 4096, 4096, 1},     {"layers.0.attention.wk", 4096, 1024, 1},
    {"layers.0.attention.wv", 4096, 1024, 1},     {"layers.0.attention.wo", 4096, 4096, 1},
    {"layers.0.feed_forward.w2", 14336, 4096, 1}, {"layers.0.router", 4096, 64, 1}};

WireCost cost(std::string_view recipe, const Parallelism& parallel, const WireModel& model,
              const std::vector<NamedLinear>& layers = kBlock) {
  auto made = WireCost::create(layers, kTokens, recipe_of_label(recipe), parallel, model);
  EXPECT_TRUE(made) << (made ? "" : made.error().message);
  return *std::move(made);
}

WiredSpeedup ask(const WireCost& cost, size_t i, double bf16_us) {
  return cost.speedup(i, kSpeedup, Evidence::kMeasured, bf16_us * 1e3);
}

TEST(WireCost, FsdpGathersTwiceAndReducesOnce) {
  const WireCost two = cost("tensorwise", {.fsdp = 2}, plain());
  const double elements = 4096 * 4096;
  const WireShare share = ask(two, 0, 1e6).share;
  // Half of the weight twice at 2 bytes, half of the gradient at 4.
  EXPECT_NEAR(share.bf16_us, elements * (2 + 2 + 4) / 2 / 100e3, 1e-6);
  const double amax_us = share.fp8_us - elements * (1 + 1 + 4) / 2 / 100e3;
  EXPECT_NEAR(amax_us, 4e-5, 1e-9) << "a word";
  EXPECT_EQ(share.bf16_exposed_us, 0) << "GEMMs of a second hide it";
  EXPECT_NEAR(share.fp8_exposed_us, amax_us, 1e-9) << "nothing hides the all-reduce";
  // Delayed scaling gathers bf16.
  const WireShare delayed = ask(cost("delayed", {.fsdp = 2}, plain()), 0, 1e6).share;
  EXPECT_NEAR(delayed.fp8_us, delayed.bf16_us, 1e-9);
}

TEST(WireCost, ExposedIsWhatGemmsDoNotHide) {
  const WireCost two = cost("tensorwise", {.fsdp = 2}, plain());
  const double gather = 4096.0 * 4096 * 2 / 2 / 100e3;  // bf16; a gradient is twice that
  const double bf16_us = 300;                           // 100 in forward, 200 in backward
  const WireShare share = ask(two, 0, bf16_us).share;
  EXPECT_NEAR(share.bf16_exposed_us, (gather - 100) + (3 * gather - 200), 1e-6);
  EXPECT_GT(share.bf16_exposed_us, share.fp8_exposed_us);
  double before = share.bf16_exposed_us;
  for (const double longer : {400.0, 500.0, 600.0}) {
    const WireShare next = ask(two, 0, longer).share;
    EXPECT_LT(next.bf16_exposed_us, before);
    before = next.bf16_exposed_us;
  }
  EXPECT_EQ(ask(two, 0, 2000).share.bf16_exposed_us, 0);
}

// Bytes that are exposed make fp8 pay more, and a cast of a shard alone too.
TEST(WireCost, SpeedupsRiseWithFsdpsWire) {
  const double hidden = ask(cost("tensorwise", {.fsdp = 8}, plain()), 0, 1e4).speedup.speedup;
  EXPECT_GT(hidden, kSpeedup.speedup) << "seven of eight casts of the weight";
  EXPECT_LT(hidden, kSpeedup.speedup * 1.01);
  const double cast_us = 4096.0 * 4096 * 4 / 2780e3 * 7 / 8;
  EXPECT_NEAR(hidden, 1e4 / (8000 - cast_us + 4e-5), 1e-6);
  const WiredSpeedup delayed = ask(cost("delayed", {.fsdp = 8}, plain()), 0, 1e4);
  EXPECT_DOUBLE_EQ(delayed.speedup.speedup, kSpeedup.speedup);
  const WiredSpeedup network = ask(cost("tensorwise", {.fsdp = 8, .hosts = 8}, plain()), 0, 300);
  EXPECT_GT(network.speedup.speedup, 1.3);
  EXPECT_LT(network.speedup.speedup, 8.0 / 6) << "the gradients are the same";
  EXPECT_GT(network.bf16_ns, 300e3);
}

TEST(WireCost, RanksThatLackRowsSendPadding) {
  const std::vector<NamedLinear> one = {{"w", 4096, 1024, 1}};
  const auto us = [&](int64_t ranks) {
    return ask(cost("delayed", {.fsdp = ranks, .hosts = 1}, plain(), one), 0, 1e6).share.bf16_us;
  };
  EXPECT_NEAR(us(1024), 4096.0 * 1024 * 8 * 1023 / 1024 / 100e3, 1e-6);
  EXPECT_NEAR(us(4096), 4096.0 * 4096 * 8 * 4095 / 4096 / 100e3, 1e-6);
}

// Column-wise: x, which three linears read; row-wise: dy. Nothing hides either.
TEST(WireCost, TensorParallelLinearsShareTheGatherOfX) {
  const double k = 4096;
  const double us = kTokens * k * 3 / 4 / 100e3;  // one byte an element to one of four ranks
  const WireCost four = cost("tensorwise", {.tp = 4}, plain());
  const WireShare wq = ask(four, 0, 1e6).share;
  EXPECT_NEAR(wq.bf16_us, (2 + 2) * us / 3, 1e-6) << "x, and the sum of dx";
  EXPECT_NEAR(wq.fp8_us, (1 + 1 + 2) * us / 3, 1e-3) << "x again in backward";
  EXPECT_EQ(wq.bf16_exposed_us, wq.bf16_us);
  const WireShare w2 = ask(four, 4, 1e6).share;
  EXPECT_NEAR(w2.bf16_us, (2 + 2) * us, 1e-6);
  EXPECT_NEAR(w2.fp8_us, (1 + 2) * us, 1e-3);
  const WireShare rowwise = ask(cost("rowwise", {.tp = 4}, plain()), 4, 1e6).share;
  EXPECT_NEAR(rowwise.fp8_us, (2 + 2) * us, 2.5) << "q and qt of dy, and words";
  EXPECT_GT(rowwise.fp8_us, (2 + 2) * us);
  const WireShare router = ask(four, 5, 1e6).share;
  EXPECT_EQ(router.bf16_us, 0) << "every rank has all of it";
}

TEST(WireCost, TheIntervalHoldsTheModelsError) {
  WireModel m = plain();
  const WiredSpeedup sure = ask(cost("tensorwise", {.fsdp = 8, .hosts = 8}, m), 0, 300);
  m.error = 0.1;
  const WiredSpeedup unsure = ask(cost("tensorwise", {.fsdp = 8, .hosts = 8}, m), 0, 300);
  EXPECT_EQ(sure.speedup.speedup, unsure.speedup.speedup);
  EXPECT_LT(unsure.speedup.lo, sure.speedup.lo);
  EXPECT_GT(unsure.speedup.hi, sure.speedup.hi);
  // Where nothing is saved, the wire is the same for both, whatever it takes.
  const WiredSpeedup delayed = ask(cost("delayed", {.fsdp = 8}, m), 0, 1e6);
  EXPECT_DOUBLE_EQ(delayed.speedup.lo, kSpeedup.lo);
  EXPECT_DOUBLE_EQ(delayed.speedup.hi, kSpeedup.hi);
}

TEST(WireCost, RanksFillHostsWithTensorParallelOnesFirst) {
  const auto layout = [](const Parallelism& p) { return layout_ranks(p).value(); };
  EXPECT_EQ(layout({.fsdp = 8}).hosts, 1);
  EXPECT_EQ(layout({.fsdp = 64}).hosts, 8);
  EXPECT_EQ(layout({.fsdp = 12}).hosts, 2);
  const RankLayout both = layout({.fsdp = 16, .tp = 8});
  EXPECT_EQ(both.hosts, 16);
  EXPECT_EQ(both.tp, (RankGroup{8, 1}));
  EXPECT_EQ(both.fsdp, (RankGroup{16, 16}));
  const RankLayout wide = layout({.fsdp = 4, .tp = 16, .hosts = 8});
  EXPECT_EQ(wide.tp, (RankGroup{16, 2}));
  EXPECT_EQ(wide.fsdp, (RankGroup{4, 4}));
  EXPECT_EQ(layout({.fsdp = 32, .tp = 2, .hosts = 8}).fsdp, (RankGroup{32, 8}));
}

TEST(WireCost, OtherRanksHostsOrNetworksThanMeasuredArePredictions) {
  EXPECT_FALSE(cost("rowwise", {.fsdp = 8}, plain()).is_prediction());
  EXPECT_FALSE(cost("rowwise", {.fsdp = 2, .tp = 4}, plain()).is_prediction());
  EXPECT_TRUE(cost("rowwise", {.fsdp = 16, .hosts = 1}, plain()).is_prediction());
  EXPECT_TRUE(cost("rowwise", {.fsdp = 8, .hosts = 2}, plain()).is_prediction());
  WireModel m = plain();
  m.measured.push_back({8, 2});
  EXPECT_FALSE(cost("rowwise", {.fsdp = 8, .hosts = 2}, m).is_prediction());
  EXPECT_TRUE(cost("rowwise", {.fsdp = 8, .hosts = 2, .network_gbit = 200}, m).is_prediction());
  const std::string words = cost("rowwise", {.fsdp = 512, .tp = 8}, plain()).describe();
  EXPECT_EQ(words, "predicted for fsdp 512 and tp 8 on 512 hosts, wire times within 0 %");
}

// 16 ranks have 64 rows each of 1024, and reduce the maxima of its 8 x 32 blocks; 8 have whole blocks.
TEST(WireCost, RanksOfFsdpThatShareBlocksReduceTheirMaxima) {
  const std::vector<NamedLinear> one = {{"wk", 4096, 1024, 1}};
  const auto sent = [&](const char* recipe, int64_t ranks) {
    const WireCost c = cost(recipe, {.fsdp = ranks, .hosts = 1}, plain(), one);
    EXPECT_EQ(c.kept(0), "");
    return ask(c, 0, 1e6).share;
  };
  const auto words_us = [](double words, double ranks) {
    return words * 4 / 100e3 * (ranks - 1) / ranks;
  };
  for (const int64_t ranks : {8, 16}) {
    const double weight_us =
        sent("tensorwise", ranks).fp8_us - 2 * words_us(1, static_cast<double>(ranks));
    const double more_us = sent("blockwise", ranks).fp8_us - weight_us;
    const double scales = words_us(1024, static_cast<double>(ranks));
    const double maxima = 2 * words_us(8.0 * 32, static_cast<double>(ranks));
    EXPECT_NEAR(more_us, ranks == 8 ? scales : maxima, 1e-6) << ranks;
  }
}

TEST(WireCost, BlocksWantWholeBlocksOnEachRankOfTensorParallelism) {
  const std::vector<NamedLinear> slices = {{"wk", 4096, 64, 1}, {"wq", 4096, 512, 1}};
  const WireCost tp = cost("blockwise", {.tp = 8}, plain(), slices);
  EXPECT_NE(tp.kept(0).find("leaves a rank 64 of its out_features"), std::string::npos);
  EXPECT_EQ(tp.kept(1), "");
}

TEST(WireCost, BadInputSaysWhatToDo) {
  const auto refused = [](const Parallelism& p, std::string_view words) {
    const auto made = WireCost::create(kBlock, kTokens, recipe_of_label("rowwise"), p);
    ASSERT_FALSE(made) << words;
    EXPECT_NE(made.error().message.find(words), std::string::npos) << made.error().message;
  };
  refused({.fsdp = 0}, "fsdp is 0");
  refused({.tp = -1}, "tp is -1");
  refused({.fsdp = 1 << 20, .tp = 2}, "more than 1048576 ranks");
  refused({.fsdp = 4, .hosts = 8}, "choose 1 to 4");
  refused({.fsdp = 4, .hosts = -1}, "hosts is -1");
  refused({.fsdp = 4, .hosts = 3}, "hosts 3");
  refused({.fsdp = 3, .tp = 4, .hosts = 2}, "tp 4");
  refused({.fsdp = 4, .network_gbit = -1}, "the network has -1 Gbit/s");
}

// Through the filter: what the wire turns, and that one rank has none.
TEST(WireCost, TheFilterDecidesWithIt) {
  const TuningTable& table = builtin_tables().front();
  const Estimator estimator(table, "rowwise");
  FilterOptions options{.tokens = 2048, .automatic = true};
  const std::vector<NamedLinear> one = {{"layers.0.feed_forward.w1", 4096, 14336, 1}};
  const auto decide = [&](const Parallelism& parallel) {
    options.parallel = parallel;
    return filter(one, options, estimator).value();
  };
  const FilterResult alone = decide({});
  EXPECT_FALSE(alone.wire);
  EXPECT_FALSE(decide({.hosts = 1}).wire);
  EXPECT_EQ(decide({.hosts = 1}).decisions[0].reason, alone.decisions[0].reason);
  const FilterResult shared = decide({.fsdp = 64, .hosts = 64});
  ASSERT_TRUE(shared.wire);
  const FilterDecision& d = shared.decisions[0];
  ASSERT_TRUE(d.wire);
  EXPECT_EQ(d.evidence, Evidence::kModelled);
  EXPECT_EQ(d.wire->compute.speedup, alone.decisions[0].speedup);
  EXPECT_GT(d.wire->bf16_exposed_us, d.wire->fp8_exposed_us);
  EXPECT_GT(d.bf16_ns, alone.decisions[0].bf16_ns);
  EXPECT_LT(d.lo, d.speedup);
  for (const char* part : {"without the wire", "predicted for fsdp 64 and tp 1 on 64 hosts"}) {
    EXPECT_NE(d.reason.find(part), std::string::npos) << d.reason;
  }
  EXPECT_NEAR(shared.estimated_model_speedup, d.convert ? d.speedup : 1, 1e-3);
}

// Latency of a ring through thousands of ranks is all, in both types.
TEST(WireCost, ThousandsOfRanksLeaveNothingToSave) {
  const TuningTable& table = builtin_tables().front();
  const Estimator estimator(table, "tensorwise");
  const std::vector<NamedLinear> one = {{"layers.0.feed_forward.w1", 4096, 14336, 1}};
  FilterOptions options{.tokens = 8192, .automatic = true, .parallel = {.fsdp = 16384}};
  const FilterDecision d = filter(one, options, estimator).value().decisions[0];
  EXPECT_LT(d.speedup, 1.1);
  EXPECT_GT(d.wire->bf16_exposed_us, 10'000);
}

}  // namespace
}  // namespace f8::tuning_db
