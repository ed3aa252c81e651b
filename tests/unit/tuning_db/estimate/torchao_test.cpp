// Policy `torchao`: its rule for every K and N around its limits, and the flag.
#include <gtest/gtest.h>

#include "tuning_db/estimate/filter.hpp"

namespace f8::tuning_db {
namespace {

// torchao's conditions as it writes them, for comparison with ours.
bool torchao_converts(const std::string& recipe, int64_t K, int64_t N) {
  if (recipe == "rowwise") {
    if (N <= 2048) return false;
    if (K <= 1024) return false;
    if (N <= 4096 && K <= 2048) return false;
    return true;
  }
  return !(K <= 4096 && N <= 1024);
}

FilterDecision decide(const char* recipe, const NamedLinear& layer, std::vector<std::string> fqns) {
  const FilterOptions options{
      .policy = FilterPolicy::kTorchao, .tokens = 8192, .filter_fqns = std::move(fqns)};
  const auto result = filter({&layer, 1}, options, Estimator(TuningTable{}, recipe));
  EXPECT_TRUE(result) << (result ? "" : result.error().message);
  return result ? result->decisions.at(0) : FilterDecision{};
}

TEST(TorchaoPolicy, FollowsItsTable) {
  const std::vector<int64_t> sizes = {16,   512,  1008, 1024, 1040, 2032, 2048,  2064,
                                      4080, 4096, 4112, 8192, 5120, 3072, 14336, 28672};
  for (const char* recipe : {"rowwise", "tensorwise"}) {
    for (const int64_t k : sizes) {
      for (const int64_t n : sizes) {
        const FilterDecision d = decide(recipe, {"layers.0.wq", k, n, 1}, {"auto_filter_small_kn"});
        EXPECT_EQ(d.convert, torchao_converts(recipe, k, n)) << recipe << " K=" << k << " N=" << n;
        EXPECT_EQ(d.evidence, Evidence::kRule);
        EXPECT_EQ(d.speedup, 1);
      }
    }
  }
}

TEST(TorchaoPolicy, NamedCells) {
  const auto converts = [](const char* recipe, int64_t k, int64_t n) {
    return decide(recipe, {"w", k, n, 1}, {"auto_filter_small_kn"}).convert;
  };
  EXPECT_FALSE(converts("rowwise", 8192, 2048));
  EXPECT_TRUE(converts("rowwise", 8192, 2064));
  EXPECT_FALSE(converts("rowwise", 1024, 28672));
  EXPECT_TRUE(converts("rowwise", 1040, 28672));
  EXPECT_FALSE(converts("rowwise", 2048, 4096));
  EXPECT_TRUE(converts("rowwise", 2064, 4096));
  EXPECT_TRUE(converts("rowwise", 2048, 4112));
  EXPECT_FALSE(converts("tensorwise", 4096, 1024));
  EXPECT_TRUE(converts("tensorwise", 4112, 1024));
  EXPECT_TRUE(converts("tensorwise", 4096, 1040));
  EXPECT_TRUE(converts("tensorwise", 16, 1040));
}

TEST(TorchaoPolicy, WithoutTheFlagOnlyNamesAndMultiplesCount) {
  EXPECT_TRUE(decide("rowwise", {"wk", 1024, 1024, 1}, {}).convert);
  EXPECT_TRUE(decide("rowwise", {"wk", 16, 16, 1}, {"wq"}).convert);
  EXPECT_FALSE(decide("rowwise", {"layers.1.wq", 8192, 8192, 1}, {"wq"}).convert);
  EXPECT_TRUE(decide("rowwise", {"layers.1.WQ", 8192, 8192, 1}, {"wq"}).convert);
  EXPECT_FALSE(decide("rowwise", {"wq", 8192, 8200, 1}, {}).convert);
  EXPECT_FALSE(decide("tensorwise", {"wq", 8200, 8192, 1}, {}).convert);
  // torchao has no rule for these, so without the flag there is nothing to ask.
  EXPECT_TRUE(decide("rowwise_with_gw_hp", {"wk", 1024, 1024, 1}, {}).convert);
}

TEST(TorchaoPolicy, TheFlagIsNoName) {
  EXPECT_TRUE(decide("rowwise", {"auto_filter_small_kn.w", 8192, 8192, 1}, {"auto_filter_small_kn"})
                  .convert);
  const FilterDecision named =
      decide("rowwise", {"output", 8192, 8192, 1}, {"output", "auto_filter_small_kn"});
  EXPECT_FALSE(named.convert);
  EXPECT_NE(named.reason.find("\"output\""), std::string::npos);
}

TEST(TorchaoPolicy, TheFlagNeedsARule) {
  const NamedLinear layer{"w", 8192, 8192, 1};
  for (const char* recipe : {"rowwise_with_gw_hp", "delayed", "blockwise"}) {
    const FilterOptions options{
        .policy = FilterPolicy::kTorchao, .tokens = 1, .filter_fqns = {"auto_filter_small_kn"}};
    const auto result = filter({&layer, 1}, options, Estimator(TuningTable{}, recipe));
    ASSERT_FALSE(result);
    EXPECT_NE(result.error().message.find(recipe), std::string::npos);
  }
}

TEST(Policies, ParseAndPrint) {
  EXPECT_EQ(parse_filter_policy("measured").value(), FilterPolicy::kMeasured);
  EXPECT_EQ(parse_filter_policy(to_string(FilterPolicy::kTorchao)).value(), FilterPolicy::kTorchao);
  EXPECT_FALSE(parse_filter_policy("Torchao"));
}

}  // namespace
}  // namespace f8::tuning_db
