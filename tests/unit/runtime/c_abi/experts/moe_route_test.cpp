// Routing, combining and the gradient of scores through the public header, on an emulated device: the
// rows against a stable sort, the sums against sums, and what is refused in which words.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string_view>
#include <vector>

#include "recipes/dtype.hpp"
#include "tests/unit/runtime/c_abi/emulated_memory.hpp"

namespace {

using float8::testing::emulated;
using float8::testing::Memory;
using float8::testing::memory;
using float8::testing::says;

template <class Id>
struct RoutedPairs {
  int64_t top_k;
  int32_t experts;
  std::vector<Id> ids;

  [[nodiscard]] int64_t pairs() const { return static_cast<int64_t>(ids.size()); }
  [[nodiscard]] int64_t tokens() const { return pairs() / top_k; }
  [[nodiscard]] Id bucket(int64_t pair) const {
    const Id id = ids[static_cast<size_t>(pair)];
    return id >= 0 && id < experts ? id : experts;
  }
};

template <class Id>
RoutedPairs<Id> random_case(int64_t tokens, int64_t top_k, int32_t experts, int64_t low,
                            int64_t high) {
  std::mt19937_64 random(static_cast<uint64_t>(tokens * 7919 + top_k * 31 + experts));
  std::uniform_int_distribution<int64_t> id(low, high);
  RoutedPairs<Id> out{top_k, experts, std::vector<Id>(static_cast<size_t>(tokens * top_k))};
  for (Id& to : out.ids) to = static_cast<Id>(id(random));
  return out;
}

struct RoutedRows {
  std::vector<int32_t> index, position, offsets;
  std::vector<float> row_scores;
  bool operator==(const RoutedRows&) const = default;
};

template <class Id>
RoutedRows sorted(const RoutedPairs<Id>& of, const std::vector<float>& scores) {
  std::vector<int64_t> order(of.ids.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::ranges::stable_sort(order, {}, [&](int64_t pair) { return of.bucket(pair); });
  RoutedRows out;
  out.position.resize(of.ids.size());
  for (size_t row = 0; row < order.size(); ++row) {
    out.position[static_cast<size_t>(order[row])] = static_cast<int32_t>(row);
    out.index.push_back(static_cast<int32_t>(order[row] / of.top_k));
    const bool is_known = of.bucket(order[row]) < of.experts;
    out.row_scores.push_back(is_known ? scores[static_cast<size_t>(order[row])] : 0.0F);
  }
  for (int32_t e = 0; e < of.experts; ++e) {
    out.offsets.push_back(static_cast<int32_t>(
        std::ranges::count_if(order, [&](int64_t pair) { return of.bucket(pair) <= e; })));
  }
  return out;
}

class MoeRouteAbi : public ::testing::Test {
 protected:
  float8_moe_route_plan* route_plan(int64_t tokens_max, int64_t top_k, int32_t experts,
                                    bool long_ids = false) {
    const float8_moe_route_desc desc{.struct_size = sizeof desc,
                                     .tokens_max = tokens_max,
                                     .top_k = static_cast<int32_t>(top_k),
                                     .experts = experts,
                                     .long_ids = long_ids,
                                     .reserved = 0};
    float8_moe_route_plan* out = nullptr;
    status_ = float8_moe_route_plan_create(context_.get(), &desc, &out);
    return out;
  }
  float8_moe_combine_plan* combine_plan(int64_t tokens_max, int64_t cols, int64_t top_k,
                                        int32_t experts, float8_dtype y, float8_dtype out_type) {
    const float8_moe_combine_desc desc{.struct_size = sizeof desc,
                                       .tokens_max = tokens_max,
                                       .cols = cols,
                                       .top_k = static_cast<int32_t>(top_k),
                                       .experts = experts,
                                       .y_dtype = y,
                                       .out_dtype = out_type};
    float8_moe_combine_plan* out = nullptr;
    status_ = float8_moe_combine_plan_create(context_.get(), &desc, &out);
    return out;
  }
  // Routes with a plan of `more` tokens more.
  template <class Id>
  RoutedRows route(const RoutedPairs<Id>& of, const std::vector<float>& scores, int64_t more = 0) {
    float8_moe_route_plan* plan = route_plan(std::max<int64_t>(of.tokens() + more, 1), of.top_k,
                                             of.experts, sizeof(Id) == sizeof(int64_t));
    EXPECT_NE(plan, nullptr) << float8_last_error();
    const size_t bytes = float8_moe_route_workspace_bytes(plan);
    const Memory workspace = memory(bytes);
    RoutedRows out{std::vector<int32_t>(of.ids.size(), -1), std::vector<int32_t>(of.ids.size(), -1),
                   std::vector<int32_t>(static_cast<size_t>(of.experts), -1),
                   std::vector<float>(of.ids.size(), -1)};
    const float8_moe_route_args args{.tokens = of.tokens(),
                                     .topk_ids = of.ids.data(),
                                     .index = out.index.data(),
                                     .position = out.position.data(),
                                     .offsets = out.offsets.data(),
                                     .scores = scores.data(),
                                     .row_scores = out.row_scores.data(),
                                     .workspace = {workspace.get(), bytes}};
    EXPECT_EQ(float8_moe_route(plan, &args, nullptr), FLOAT8_OK) << float8_last_error();
    float8_moe_route_plan_destroy(plan);
    return out;
  }
  template <class Id>
  void check(const RoutedPairs<Id>& of, int64_t more = 0) {
    std::vector<float> scores(of.ids.size());
    for (size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(i % 97) / 16 + 1;
    EXPECT_EQ(route(of, scores, more), sorted(of, scores))
        << of.tokens() << " tokens, top_k " << of.top_k << ", experts " << of.experts;
  }
  float8::Context context_ = emulated();
  float8_status status_ = FLOAT8_OK;
};

TEST_F(MoeRouteAbi, RowsAreThoseOfAStableSort) {
  for (const int64_t tokens : {0, 1, 2, 3, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025, 5000}) {
    check(random_case<int32_t>(tokens, 3, 7, -1, 8));
    check(random_case<int64_t>(tokens, 8, 128, 0, 127), 300);
  }
  check(random_case<int32_t>(500, 2, 1, 0, 0));
  check(random_case<int64_t>(500, 2, 1024, -40, 1100));
  check(random_case<int32_t>(40000, 5, 16, 0, 15));  // chunks of more than the least
}

TEST_F(MoeRouteAbi, OneExpertMayHaveAllPairsOrNone) {
  check(random_case<int32_t>(1000, 4, 9, 5, 5));
  check(random_case<int32_t>(1000, 4, 9, 9, 9));
  check(random_case<int64_t>(1000, 4, 9, std::numeric_limits<int64_t>::max() - 1,
                             std::numeric_limits<int64_t>::max()));
  check(random_case<int64_t>(100, 1, 9, (int64_t{1} << 32) + 1, (int64_t{1} << 32) + 3));
}

float moe_element(const void* at, size_t i, f8::Dtype type) {
  return f8::load_element(at, static_cast<int64_t>(i), type);
}
float8_dtype abi_type(f8::Dtype type) {
  return type == f8::Dtype::kF32 ? FLOAT8_F32 : type == f8::Dtype::kF16 ? FLOAT8_F16 : FLOAT8_BF16;
}

struct MoeSums : MoeRouteAbi,
                 ::testing::WithParamInterface<std::tuple<f8::Dtype, f8::Dtype, int64_t>> {
  static constexpr int64_t kTokens = 21, kTopK = 3;
  static constexpr int32_t kExperts = 4;
  Memory matrix(int64_t rows, f8::Dtype type, uint64_t seed) const {
    Memory out = memory(static_cast<size_t>(rows * cols_) * f8::size_bytes(type));
    std::mt19937_64 random(seed);
    std::normal_distribution<float> value;
    for (int64_t i = 0; i < rows * cols_; ++i) f8::store_element(out.get(), i, value(random), type);
    return out;
  }
  const f8::Dtype y_ = std::get<0>(GetParam()), out_ = std::get<1>(GetParam());
  const int64_t cols_ = std::get<2>(GetParam());
};

// RoutedRows of dropped pairs hold NaN.
TEST_P(MoeSums, AreThoseOfTheRowsByTheirScores) {
  if (cols_ % 8 != 0 && (y_ != f8::Dtype::kF32 || out_ != f8::Dtype::kF32)) {
    EXPECT_EQ(combine_plan(1, cols_, 1, 1, abi_type(y_), abi_type(out_)), nullptr);
    EXPECT_TRUE(says("rows of 16-bit elements have a multiple of 8"));
    return;
  }
  const RoutedPairs<int32_t> of = random_case<int32_t>(kTokens, kTopK, kExperts, -1, kExperts);
  std::vector<float> scores(of.ids.size());
  for (size_t i = 0; i < scores.size(); ++i) scores[i] = 1.0F / static_cast<float>(i % 13 + 1);
  const RoutedRows rows = route(of, scores);
  const Memory y = matrix(of.pairs(), y_, 1), dout = matrix(kTokens, out_, 2);
  for (int64_t i = rows.offsets.back() * cols_; i < of.pairs() * cols_; ++i) {
    f8::store_element(y.get(), i, std::numeric_limits<float>::quiet_NaN(), y_);
  }
  float8_moe_combine_plan* plan =
      combine_plan(kTokens + 5, cols_, kTopK, kExperts, abi_type(y_), abi_type(out_));
  ASSERT_NE(plan, nullptr) << float8_last_error();
  const Memory out = matrix(kTokens, out_, 3);
  for (const bool scored : {true, false}) {
    const float8_moe_combine_args args{.tokens = kTokens,
                                       .y = y.get(),
                                       .scores = scored ? scores.data() : nullptr,
                                       .position = rows.position.data(),
                                       .offsets = rows.offsets.data(),
                                       .out = out.get()};
    ASSERT_EQ(float8_moe_combine(plan, &args, nullptr), FLOAT8_OK) << float8_last_error();
    for (size_t t = 0; t < kTokens; ++t) {
      for (size_t c = 0; c < static_cast<size_t>(cols_); ++c) {
        float sum = 0;
        for (size_t pair = t * kTopK; pair < (t + 1) * kTopK; ++pair) {
          if (of.bucket(static_cast<int64_t>(pair)) == kExperts) continue;
          const auto row = static_cast<size_t>(rows.position[pair]);
          const float product = moe_element(y.get(), row * static_cast<size_t>(cols_) + c, y_) *
                                (scored ? scores[pair] : 1.0F);
          sum += product;
        }
        uint32_t rounded = 0;
        f8::store_element(&rounded, 0, sum, out_);
        ASSERT_EQ(moe_element(out.get(), t * static_cast<size_t>(cols_) + c, out_),
                  moe_element(&rounded, 0, out_))
            << t << ", " << c;
      }
    }
  }
  std::vector<float> dscores(of.ids.size(), -1);
  const float8_moe_score_gradient_args args{.tokens = kTokens,
                                            .dout = dout.get(),
                                            .y = y.get(),
                                            .position = rows.position.data(),
                                            .offsets = rows.offsets.data(),
                                            .dscores = dscores.data()};
  ASSERT_EQ(float8_moe_score_gradient(plan, &args, nullptr), FLOAT8_OK) << float8_last_error();
  for (size_t pair = 0; pair < dscores.size(); ++pair) {
    const auto row = static_cast<size_t>(rows.position[pair]);
    double dot = 0, size = 0;
    if (of.bucket(static_cast<int64_t>(pair)) < kExperts) {
      for (size_t c = 0; c < static_cast<size_t>(cols_); ++c) {
        const double product =
            double{moe_element(dout.get(), pair / kTopK * static_cast<size_t>(cols_) + c, out_)} *
            double{moe_element(y.get(), row * static_cast<size_t>(cols_) + c, y_)};
        dot += product;
        size += std::abs(product);
      }
    }
    EXPECT_NEAR(dscores[pair], dot, 1e-6 * size) << pair;
  }
  float8_moe_combine_plan_destroy(plan);
}

INSTANTIATE_TEST_SUITE_P(
    Types, MoeSums,
    ::testing::Combine(::testing::Values(f8::Dtype::kBf16, f8::Dtype::kF16, f8::Dtype::kF32),
                       ::testing::Values(f8::Dtype::kBf16, f8::Dtype::kF16, f8::Dtype::kF32),
                       ::testing::Values(8, 37, 520)));

TEST_F(MoeRouteAbi, RefusesSizes) {
  EXPECT_EQ(route_plan(0, 2, 4), nullptr);
  EXPECT_EQ(status_, FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("tokens_max is 0 and top_k 2"));
  EXPECT_EQ(route_plan((int64_t{1} << 29) + 1, 2, 4), nullptr);
  EXPECT_EQ(route_plan(1, 0, 4), nullptr);
  EXPECT_TRUE(says("top_k is 0"));
  EXPECT_EQ(route_plan(1, 1, 1025), nullptr);
  EXPECT_TRUE(says("experts is 1025; it is 1 to 1024"));
  EXPECT_EQ(combine_plan(1, 0, 1, 1, FLOAT8_BF16, FLOAT8_BF16), nullptr);
  EXPECT_TRUE(says("cols is 0"));
  float8_moe_route_plan* largest = route_plan(int64_t{1} << 30, 1, 1024);
  EXPECT_EQ(float8_moe_route_workspace_bytes(largest), size_t{128} * 1025 * 4);
  float8_moe_route_plan_destroy(largest);
  EXPECT_EQ(float8_moe_route_workspace_bytes(nullptr), 0U);
  float8_moe_route_plan_destroy(nullptr);
  float8_moe_combine_plan_destroy(nullptr);
}

TEST_F(MoeRouteAbi, RefusesCalls) {
  float8_moe_route_plan* plan = route_plan(10, 2, 4);
  const size_t bytes = float8_moe_route_workspace_bytes(plan);
  const Memory workspace = memory(bytes);
  std::vector<int32_t> ids(20), index(20), position(20), offsets(4);
  std::vector<float> scores(20);
  const auto refuses = [&](const auto& change, std::string_view words) {
    float8_moe_route_args args{.tokens = 10,
                               .topk_ids = ids.data(),
                               .index = index.data(),
                               .position = position.data(),
                               .offsets = offsets.data(),
                               .workspace = {workspace.get(), bytes}};
    EXPECT_EQ(float8_moe_route(plan, &args, nullptr), FLOAT8_OK) << float8_last_error();
    change(args);
    EXPECT_EQ(float8_moe_route(plan, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
    EXPECT_TRUE(says(words)) << float8_last_error();
  };
  refuses([](auto& a) { a.tokens = 11; }, "tokens is 11; the plan was made for 0 to 10");
  refuses([](auto& a) { a.topk_ids = nullptr; }, "topk_ids is NULL");
  refuses([](auto& a) { a.offsets = nullptr; }, "offsets is NULL");
  refuses([](auto& a) { a.workspace = {}; }, "workspace.data is NULL");
  refuses([](auto& a) { a.workspace.bytes = 1; }, "workspace.bytes is 1");
  refuses([](auto& a) { a.index = a.position; }, "overlap");
  refuses([&](auto& a) { a.scores = scores.data(); }, "scores and row_scores: give both");
  refuses([](auto& a) { a.topk_ids = reinterpret_cast<const char*>(a.topk_ids) + 2; },
          "not aligned to 4 bytes");
  float8_moe_route_plan_destroy(plan);
}

TEST_F(MoeRouteAbi, RefusesCombinations) {
  float8_moe_combine_plan* plan = combine_plan(10, 16, 2, 4, FLOAT8_BF16, FLOAT8_F32);
  const Memory y = memory(20 * 16 * 2), out = memory(10 * 16 * 4);
  std::vector<int32_t> position(20), offsets(4);
  std::vector<float> dscores(20);
  const auto combines = [&](const auto& change, std::string_view words) {
    float8_moe_combine_args args{.tokens = 10,
                                 .y = y.get(),
                                 .position = position.data(),
                                 .offsets = offsets.data(),
                                 .out = out.get()};
    EXPECT_EQ(float8_moe_combine(plan, &args, nullptr), FLOAT8_OK) << float8_last_error();
    change(args);
    EXPECT_EQ(float8_moe_combine(plan, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
    EXPECT_TRUE(says(words)) << float8_last_error();
  };
  combines([](auto& a) { a.tokens = -1; }, "tokens is -1");
  combines([](auto& a) { a.y = nullptr; }, "y is NULL");
  combines([](auto& a) { a.out = nullptr; }, "out is NULL");
  combines([](auto& a) { a.position = nullptr; }, "position is NULL");
  combines([](auto& a) { a.out = const_cast<void*>(a.y); }, "overlap");
  combines([](auto& a) { a.y = static_cast<const char*>(a.y) + 8; }, "not aligned to 16 bytes");
  float8_moe_score_gradient_args args{.tokens = 10,
                                      .dout = out.get(),
                                      .y = y.get(),
                                      .position = position.data(),
                                      .offsets = offsets.data(),
                                      .dscores = dscores.data()};
  EXPECT_EQ(float8_moe_score_gradient(plan, &args, nullptr), FLOAT8_OK) << float8_last_error();
  args.dscores = nullptr;
  EXPECT_EQ(float8_moe_score_gradient(plan, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("dscores is NULL"));
  args = {.tokens = 0};
  EXPECT_EQ(float8_moe_score_gradient(plan, &args, nullptr), FLOAT8_OK) << float8_last_error();
  float8_moe_combine_plan_destroy(plan);
}

}  // namespace
