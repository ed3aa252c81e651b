// The fit of the ranking of cuBLASLt's suggestions: known coefficients are found again, and a table
// that is no table is refused by its line.
#include "tools/tuner/fit/suggestion_fit.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

namespace f8::tuner {
namespace {

using runtime::CostModel;
using runtime::Suggestion;

CostModel true_model() {
  CostModel model;
  model.suggestions = {0.2, 0.05, 0.1, 0.15, -0.01, -0.15, 0.15, -0.02, 0.03, 0.05, 0.25, -0.06};
  return model;
}

// Times that the true model has, but for a deviation of so much.
std::vector<SuggestedGemm> gemms_of(double noise) {
  constexpr std::pair<int, int> kTiles[] = {{64, 64},   {128, 64},  {64, 256}, {128, 128},
                                            {128, 256}, {192, 160}, {64, 512}};
  std::vector<SuggestedGemm> gemms;
  for (const int64_t m : {5, 64, 700, 4096, 30000}) {
    for (const int64_t n : {256, 1536, 6144, 14336}) {
      for (const int64_t k : {512, 2304, 8192}) {
        SuggestedGemm gemm{.device = "a device", .sm_count = 132, .linear = {m, n, k}, .timed = {}};
        for (const auto& [tile_m, tile_n] : kTiles) {
          for (const int split : {1, 4}) {
            const Suggestion s{.algorithm = runtime::kTiledAlgorithm,
                               .tile_m = tile_m,
                               .tile_n = tile_n,
                               .cluster_m = 1,
                               .cluster_n = 1,
                               .split_k = split};
            const auto terms = runtime::suggestion_terms(s, gemm.shape(), gemm.sm_count);
            const auto& of = true_model().suggestions;
            const double lag = std::inner_product(terms.begin(), terms.end(), of.begin(), 0.0);
            const double wave = std::sin(static_cast<double>(7 * gemm.timed.size() + gemms.size()));
            // Only a small lag is fitted to, whatever its size.
            gemm.timed.push_back({s, 50 * std::exp(0.1 * lag + noise * wave)});
          }
        }
        gemms.push_back(gemm);
      }
    }
  }
  return gemms;
}

TEST(SuggestionFit, FindsTheCoefficientsOfSyntheticTimes) {
  const CostModel fitted = fit_suggestions(gemms_of(0), CostModel{}).value();
  for (size_t i = 0; i < CostModel::kSuggestionTerms; ++i) {
    EXPECT_NEAR(fitted.suggestions[i], 0.1 * true_model().suggestions[i], 2e-3) << i;
  }
  EXPECT_LT(regret_of_ranked(gemms_of(0), fitted).p95, 1e-3);
  EXPECT_GT(regret_of_first(gemms_of(0)).mean, 5 * regret_of_ranked(gemms_of(0), fitted).mean);
}

TEST(SuggestionFit, LayersHeldOutAreRankedAsWell) {
  const auto noisy = gemms_of(0.002);
  const SuggestionRegret held_out = cross_validate_suggestions(noisy, CostModel{}, 4).value();
  EXPECT_EQ(held_out.gemms, 60);
  EXPECT_LT(held_out.p95, 0.02);
  EXPECT_GT(held_out.p95, 0);
}

TEST(SuggestionFit, AFewSuggestionsAreNoFit) {
  auto few = gemms_of(0);
  few.resize(8);
  const auto fitted = fit_suggestions(few, true_model());
  ASSERT_FALSE(fitted);
  EXPECT_NE(fitted.error().message.find("112 ranked suggestions of 8 GEMMs"), std::string::npos)
      << fitted.error().message;
  auto layer = gemms_of(0);
  std::erase_if(layer,
                [](const SuggestedGemm& g) { return g.linear.n != 256 || g.linear.k != 512; });
  std::vector<SuggestedGemm> often;
  for (int i = 0; i < 10; ++i) often.insert(often.end(), layer.begin(), layer.end());
  EXPECT_TRUE(fit_suggestions(often, true_model()));
  EXPECT_FALSE(cross_validate_suggestions(often, true_model(), 4))
      << "the fold without it has none";
}

TEST(SuggestionFit, ATestIsOfOtherLayers) {
  const auto all = gemms_of(0);
  std::vector<SuggestedGemm> seen = {all.front()};
  EXPECT_EQ(of_other_layers(all, seen).size(), all.size() - 5) << "five M of one layer";
}

constexpr std::string_view kCsvHeader =
    "device,sms,d,m,n,k,heuristic,algorithm,tile_m,tile_n,cluster_m,cluster_n,split_k,us\n";

TEST(SuggestionFit, ReadsWhatTheBenchmarkWrites) {
  const auto gemms = parse_suggestions(std::string(kCsvHeader) +
                                       "NVIDIA H200,132,bf16,16,4096,1024,0,66,128,256,1,2,1,9.25\n"
                                       "NVIDIA H200,132,bf16,16,4096,1024,1,66,0,0,1,1,3,8.5\n"
                                       "NVIDIA H200,132,bf16,16,4096,1024,1,66,0,0,0,0,1,8\n"
                                       "NVIDIA H200,132,f32,16,4096,1024,0,66,64,64,1,1,1,12\n");
  ASSERT_TRUE(gemms) << gemms.error().message;
  ASSERT_EQ(gemms->size(), 3) << "the second was measured again";
  const SuggestedGemm& first = gemms->front();
  EXPECT_EQ(first.linear, (Shape{16, 4096, 1024}));
  EXPECT_EQ(first.shape(), (Shape{4096, 1024, 16}));
  ASSERT_EQ(first.timed.size(), 2);
  EXPECT_EQ(
      first.timed[0].suggestion,
      (Suggestion{.algorithm = 66, .tile_m = 128, .tile_n = 256, .cluster_m = 1, .cluster_n = 2}));
  EXPECT_EQ(first.timed[1].suggestion.split_k, 3);
  EXPECT_EQ(first.fastest_us(), 8.5);
  EXPECT_EQ(gemms->back().d, Dtype::kF32);
}

TEST(SuggestionFit, SaysWhichLineIsWrong) {
  const auto expect_refused = [](const std::string& csv, std::string_view words) {
    const auto parsed = parse_suggestions(csv);
    ASSERT_FALSE(parsed) << words;
    EXPECT_NE(parsed.error().message.find(words), std::string::npos) << parsed.error().message;
  };
  const std::string header(kCsvHeader);
  expect_refused("m,n,k\n1,2,3\n", "line 1: no column device");
  expect_refused(header + "x,132,bf16,16,16,16,0,66,64,64,1,1,1,\n", "line 2: column us is ''");
  expect_refused(header + "x,132,bf16,16,16,-16,0,66,64,64,1,1,1,2\n", "line 2: column k is '-16'");
  expect_refused(header + "\nx,132,bf16,16,16,16,0,66,64,64,1,1,1,0\n", "line 3: column us is '0'");
  for (const char* time : {"nan", "inf", "1e300", "2x"}) {
    expect_refused(header + "x,132,bf16,16,16,16,0,66,64,64,1,1,1," + time + "\n", "column us is");
  }
  expect_refused(header + "x,132,bf16,16,16,16,0,66,64,0,1,1,1,2\n", "column tile_n is '0'");
  expect_refused(header + "x,132,bf16,16,16,16,0,66,64,64,9999999,1,1,2\n", "column cluster_m");
  expect_refused(header + "x,132,half,16,16,16,0,66,64,64,1,1,1,2\n", "line 2: column d is 'half'");
  expect_refused(header + "x,132,e4m3,16,16,16,0,66,64,64,1,1,1,2\n", "line 2: column d is 'e4m3'");
  EXPECT_TRUE(parse_suggestions("")->empty());
}

}  // namespace
}  // namespace f8::tuner
