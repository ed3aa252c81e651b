// Routing, combining and the gradient of scores on a GPU, bit for bit against the same on the host.
#include <cmath>
#include <limits>
#include <random>

#include "runtime/moe/combine.hpp"
#include "runtime/moe/route.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

struct MoeCase {
  int32_t tokens, top_k, experts;
  int64_t low, high;  // of the ids
};
constexpr MoeCase kMoeCases[] = {
    {0, 2, 5, 0, 4},          {1, 1, 1, 0, 0},           {1, 3, 7, -1, 8},
    {31, 1, 7, 0, 6},         {33, 3, 1024, 0, 1023},    {341, 3, 7, -2, 9},
    {513, 2, 9, 4, 4},        {500, 2, 9, 9, 9},         {8192, 8, 128, 0, 127},
    {8191, 8, 128, -20, 140}, {40001, 5, 1024, 0, 1100}, {300000, 2, 16, 0, 15},
};

struct HostRouting {
  std::vector<int64_t> ids;
  std::vector<float> scores, row_scores;
  std::vector<int32_t> index, position, offsets;
};

HostRouting host_routing(const MoeCase& of, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<int64_t> id(of.low, of.high);
  std::uniform_real_distribution<float> score(0, 1);
  HostRouting out;
  std::vector<std::vector<int32_t>> pairs(static_cast<size_t>(of.experts) + 1);
  for (int32_t pair = 0; pair < of.tokens * of.top_k; ++pair) {
    out.ids.push_back(id(random));
    out.scores.push_back(score(random));
    const bool is_known = out.ids.back() >= 0 && out.ids.back() < of.experts;
    pairs[static_cast<size_t>(is_known ? out.ids.back() : of.experts)].push_back(pair);
  }
  out.position.resize(out.ids.size());
  for (const auto& of_expert : pairs) {
    for (const int32_t pair : of_expert) {
      const auto at = static_cast<size_t>(pair);
      out.position[at] = static_cast<int32_t>(out.index.size());
      out.index.push_back(pair / of.top_k);
      out.row_scores.push_back(&of_expert == &pairs.back() ? 0.0F : out.scores[at]);
    }
    if (&of_expert != &pairs.back()) out.offsets.push_back(static_cast<int32_t>(out.index.size()));
  }
  return out;
}

class MoeTest : public GpuTest {
 protected:
  template <class T>
  [[nodiscard]] DeviceBuffer buffer(const std::vector<T>& values) const {
    return {context(), values.empty() ? std::vector<T>(4) : values};
  }
  template <class T>
  static std::vector<T> front(const DeviceBuffer& of, size_t count) {
    std::vector<T> values = of.download<T>();
    values.resize(count);
    return values;
  }
  template <class Id>
  void check_routing(const MoeCase& of) {
    const HostRouting host = host_routing(of, static_cast<uint64_t>(of.tokens));
    const auto plan = RoutePlan::create(context_, {.tokens_max = of.tokens + 1,
                                                   .top_k = of.top_k,
                                                   .experts = of.experts,
                                                   .long_ids = sizeof(Id) == sizeof(int64_t)});
    F8_ASSERT_OK(plan);
    const DeviceBuffer ids = buffer(std::vector<Id>(host.ids.begin(), host.ids.end()));
    const DeviceBuffer scores = buffer(host.scores);
    const std::vector<int32_t> blank(host.ids.size(), -7);
    const DeviceBuffer index = buffer(blank), position = buffer(blank), row_scores = buffer(blank);
    const DeviceBuffer offsets = buffer(std::vector<int32_t>(host.offsets.size(), -7));
    const DeviceBuffer workspace(context(), std::vector<uint8_t>(plan->workspace_bytes(), 0xa5));
    F8_ASSERT_OK(plan->run({.tokens = of.tokens,
                            .topk_ids = ids.as(),
                            .index = index.as<int32_t>(),
                            .position = position.as<int32_t>(),
                            .offsets = offsets.as<int32_t>(),
                            .scores = scores.as<float>(),
                            .row_scores = row_scores.as<float>(),
                            .workspace = {workspace.as(), plan->workspace_bytes()}},
                           nullptr));
    F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));
    EXPECT_EQ(front<int32_t>(index, blank.size()), host.index) << of.tokens;
    EXPECT_EQ(front<int32_t>(position, blank.size()), host.position) << of.tokens;
    EXPECT_EQ(offsets.download<int32_t>(), host.offsets) << of.tokens;
    EXPECT_EQ(front<float>(row_scores, blank.size()), host.row_scores) << of.tokens;
    for (const DeviceBuffer* each : {&index, &position, &offsets, &row_scores, &workspace}) {
      EXPECT_TRUE(each->guards_are_whole()) << of.tokens;
    }
  }
  void check_sums(const MoeCase& of, int64_t cols, Dtype y_type, Dtype out_type);
};

TEST_F(MoeTest, RoutesInTheOrderOfExpertsAndPairs) {
  for (const MoeCase& of : kMoeCases) {
    check_routing<int32_t>(of);
    check_routing<int64_t>(of);
  }
}

std::vector<uint8_t> random_elements(int64_t count, Dtype type, uint64_t seed) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count) * size_bytes(type));
  std::mt19937_64 random(seed);
  std::normal_distribution<float> value;
  for (int64_t i = 0; i < count; ++i) store_element(bytes.data(), i, value(random), type);
  return bytes;
}

// The dot product of a warp, as combine.cuh orders it.
float host_dot(const uint8_t* a, int64_t a0, Dtype a_type, const uint8_t* b, int64_t b0,
               Dtype b_type, int64_t cols) {
  float sums[32] = {};
  for (int64_t c = 0; c < cols; ++c) {
    float& sum = sums[c / (cols % 8 == 0 ? 8 : 1) % 32];
    sum = std::fma(load_element(a, a0 + c, a_type), load_element(b, b0 + c, b_type), sum);
  }
  for (int step = 16; step > 0; step /= 2) {
    for (int lane = 0; lane < step; ++lane) sums[lane] += sums[lane + step];
  }
  return sums[0];
}

// Rows of dropped pairs hold NaN.
void MoeTest::check_sums(const MoeCase& of, int64_t cols, Dtype y_type, Dtype out_type) {
  const HostRouting host = host_routing(of, static_cast<uint64_t>(cols));
  const auto pairs = static_cast<int64_t>(host.ids.size());
  std::vector<uint8_t> y = random_elements(pairs * cols, y_type, 1);
  for (int64_t i = host.offsets.back() * cols; i < pairs * cols; ++i) {
    store_element(y.data(), i, std::numeric_limits<float>::quiet_NaN(), y_type);
  }
  const std::vector<uint8_t> dout = random_elements(of.tokens * cols, out_type, 2);
  const auto plan = CombinePlan::create(context_, {.tokens_max = of.tokens,
                                                   .cols = cols,
                                                   .top_k = of.top_k,
                                                   .experts = of.experts,
                                                   .y = y_type,
                                                   .out = out_type});
  F8_ASSERT_OK(plan);
  const DeviceBuffer ys = buffer(y), douts = buffer(dout), outs = buffer(dout);
  const DeviceBuffer scores = buffer(host.scores), position = buffer(host.position);
  const DeviceBuffer offsets = buffer(host.offsets), dscores = buffer(host.scores);
  std::vector<float> expected_dscores;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t row = host.position[static_cast<size_t>(pair)];
    const bool is_known = row < host.offsets.back();
    expected_dscores.push_back(is_known ? host_dot(dout.data(), pair / of.top_k * cols, out_type,
                                                   y.data(), row * cols, y_type, cols)
                                        : 0.0F);
  }
  for (const bool scored : {true, false}) {
    F8_ASSERT_OK(plan->run(CombineCall{.tokens = of.tokens,
                                       .y = ys.as(),
                                       .scores = scored ? scores.as<float>() : nullptr,
                                       .position = position.as<int32_t>(),
                                       .offsets = offsets.as<int32_t>(),
                                       .out = outs.as()},
                           nullptr));
    F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));
    std::vector<uint8_t> expected(dout.size());
    for (int64_t i = 0; i < of.tokens * cols; ++i) {
      float sum = 0;
      for (int64_t pair = i / cols * of.top_k; pair < (i / cols + 1) * of.top_k; ++pair) {
        const int64_t row = host.position[static_cast<size_t>(pair)];
        float product = 0;
        if (row < host.offsets.back()) {
          product = load_element(y.data(), row * cols + i % cols, y_type) *
                    (scored ? host.scores[static_cast<size_t>(pair)] : 1.0F);
        }
        sum = pair % of.top_k == 0 ? product : sum + product;
      }
      store_element(expected.data(), i, sum, out_type);
    }
    EXPECT_EQ(outs.download<uint8_t>(), expected) << of.tokens << ", " << cols;
  }
  F8_ASSERT_OK(plan->run(ScoreGradientCall{.tokens = of.tokens,
                                           .dout = douts.as(),
                                           .y = ys.as(),
                                           .position = position.as<int32_t>(),
                                           .offsets = offsets.as<int32_t>(),
                                           .dscores = dscores.as<float>()},
                         nullptr));
  F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));
  EXPECT_EQ(dscores.download<float>(), expected_dscores) << of.tokens << ", " << cols;
  EXPECT_TRUE(outs.guards_are_whole() && dscores.guards_are_whole());
}

TEST_F(MoeTest, AddsUpTheRowsOfEachToken) {
  for (const Dtype y : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const Dtype out : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      check_sums({50, 3, 7, -1, 8}, 8, y, out);
      check_sums({37, 9, 16, 0, 15}, 2056, y, out);
      check_sums({129, 1, 4, 0, 4}, 520, y, out);
    }
  }
  for (const int64_t cols : {1, 7, 37, 300}) {
    check_sums({50, 3, 7, -1, 8}, cols, Dtype::kF32, Dtype::kF32);
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
