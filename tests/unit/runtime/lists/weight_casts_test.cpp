// All weights of a model at once: the same caches as linear by linear.
#include "runtime/lists/weight_casts.hpp"

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>

#include "tests/unit/runtime/count_allocations.hpp"
#include "tests/unit/runtime/fake_cublaslt.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;
using testing::FakeCublasLt;
using testing::FakeCuda;
using testing::Fixture;
using testing::says;

class WeightCastsTest : public ::testing::Test {
 protected:
  // Linears of one context, of many shapes.
  void add(const char* recipe, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const auto n = static_cast<int64_t>(linears_.size());
      LinearDesc desc = testing::describe(recipe, {8, 16 * (1 + n * 5 % 9), 16 * (1 + n * 3 % 11)});
      for (auto& choice : desc.choices) {
        choice = GemmChoice{parse_gemm_kernel(Provider::kGenerated, "64x64s4c1x1w1g8").value()};
      }
      if (recipe == std::string_view("rowwise_with_gw_hp")) desc.choices[2].reset();
      add(desc);
    }
  }
  void add(const LinearDesc& desc) {
    const auto linear = Linear::plan(context_, desc).value();
    linears_.push_back(linear);
    weights_.push_back(std::make_unique<Buffer>(
        reference::random_matrix(desc.shape.n, desc.shape.k, linears_.size())));
    caches_.push_back(std::make_unique<Buffer>(linear->weight_cache_bytes()));
    states_.emplace_back(64, 2.0F);
    amaxes_.emplace_back(8, 0U);
  }
  std::vector<WeightCall> calls(bool first_step) {
    std::vector<WeightCall> out;
    for (size_t i = 0; i < linears_.size(); ++i) {
      out.push_back({.w = weights_[i]->data(),
                     .cache = caches_[i]->data(),
                     .scales = {amaxes_[i].data(), states_[i].data()},
                     .first_step = first_step});
    }
    return out;
  }
  // Everything at once, and then one by one into poisoned memory.
  void expect_the_same(bool first_step, size_t launches) {
    const WeightCasts casts = WeightCasts::plan(context_, linears_).value();
    Buffer workspace(casts.workspace_bytes());
    const size_t before = cuda_.launches.size();
    ASSERT_TRUE(casts.run(calls(first_step), workspace.data(), nullptr));
    EXPECT_EQ(cuda_.launches.size() - before, launches);
    EXPECT_TRUE(workspace.guard_is_whole());
    const auto amaxes = amaxes_;
    for (size_t i = 0; i < linears_.size(); ++i) {
      EXPECT_TRUE(caches_[i]->guard_is_whole()) << i;
      const auto together = bytes(*caches_[i]);
      std::fill_n(caches_[i]->data(), together.size(), testing::kPoison);
      std::ranges::fill(amaxes_[i], 0U);
      Buffer scratch(linears_[i]->workspace_bytes());
      ASSERT_TRUE(linears_[i]->cast_weight(calls(first_step)[i], scratch.data(), nullptr));
      EXPECT_EQ(together, bytes(*caches_[i])) << linears_[i]->desc().recipe.name << " " << i;
      EXPECT_EQ(amaxes[i], amaxes_[i]) << i;
    }
    EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
  }

  FakeCuda cuda_;
  FakeCublasLt library_;
  std::shared_ptr<Context> context_ = cuda_.context();
  std::vector<std::shared_ptr<const Linear>> linears_;
  std::vector<std::unique_ptr<Buffer>> weights_, caches_;
  std::vector<std::vector<float>> states_;
  std::vector<std::vector<uint32_t>> amaxes_;
};

TEST_F(WeightCastsTest, OnePairOfLaunchesForAModel) {
  add("tensorwise", 28);
  expect_the_same(false, 2);
}

TEST_F(WeightCastsTest, MoreThanALaunchTakes) {
  add("rowwise", 29);
  expect_the_same(false, 4);
}

TEST_F(WeightCastsTest, EveryRecipeBesideTheOthers) {
  for (const char* recipe :
       {"tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"}) {
    add(recipe, 2);
  }
  // amax and cast, three times; a cast with delayed scales, and one by blocks.
  expect_the_same(false, 8);
  // In a first step delayed scaling's weights are cast as tensorwise ones.
  expect_the_same(true, 7);
}

TEST_F(WeightCastsTest, RunDoesNotAllocate) {
  add("tensorwise", 31);
  const WeightCasts casts = WeightCasts::plan(context_, linears_).value();
  const auto given = calls(false);
  Buffer workspace(casts.workspace_bytes());
  cuda_.emulate = false;
  bool ok = false;
  int allocations = 0;
  {
    const testing::CountAllocations counting;
    ok = casts.run(given, workspace.data(), nullptr).has_value();
    allocations = counting.count();
  }
  EXPECT_TRUE(ok);
  EXPECT_EQ(allocations, 0);
}

// The calls of a run may not write each other's memory either.
TEST_F(WeightCastsTest, OverlapsBetweenCallsAreFound) {
  add("tensorwise", 200);
  add("delayed", 2);
  for (auto& linear : linears_) ASSERT_GT(linear->weight_cache_bytes(), 0u);
  // A cache that lies there reaches nothing else, whatever the allocator put behind it.
  states_[201].resize(linears_[9]->weight_cache_bytes() / sizeof(float), 2.0F);
  const WeightCasts casts = WeightCasts::plan(context_, linears_).value();
  Buffer workspace(casts.workspace_bytes());
  cuda_.emulate = false;
  using Calls = std::vector<WeightCall>;
  const auto run = [&](const Calls& given) { return casts.run(given, workspace.data(), nullptr); };
  const auto into = [](const void* at, size_t by) {
    return const_cast<uint8_t*>(static_cast<const uint8_t*>(at)) + by;
  };
  const auto refused = [&](const std::function<void(Calls&)>& change, std::string_view part) {
    Calls given = calls(false);
    ASSERT_TRUE(run(given)) << run(given).error().message;
    const size_t before = cuda_.launches.size();
    change(given);
    const Status status = run(given);
    ASSERT_FALSE(status) << part;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(says(status.error(), part)) << status.error().message;
    EXPECT_EQ(cuda_.launches.size(), before) << part;
  };
  refused([&](Calls& c) { c[7].cache = c[191].cache; },
          "float8_weight_casts_run: float8_weight_args.cache of args[");
  refused([&](Calls& c) { c[3].cache = into(c[150].w, 16); },
          "float8_weight_args.cache of args[3]");
  refused([&](Calls& c) { c[3].cache = into(c[150].w, 16); },
          "and float8_weight_args.w of args[150]");
  refused([&](Calls& c) { c[180].w = into(c[5].cache, linears_[5]->weight_cache_bytes() - 16); },
          "float8_weight_args.cache of args[5]");
  refused([&](Calls& c) { c[200].scales.opaque[0] = into(c[201].scales.opaque[0], 4); },
          "float8_scale_slots (amax) of args[200]");
  refused([&](Calls& c) { c[9].cache = c[201].scales.opaque[1]; },
          "float8_weight_args.cache of args[9]");
  // What is only read may be shared, so may slots that are added to, and neighbours touch.
  Calls given = calls(false);
  Buffer weight(16 * 9 * 16 * 11 * 2);
  given[4].w = given[3].w = given[2].w = given[1].w = weight.data();
  given[200].scales = given[201].scales;
  const size_t bytes = linears_[0]->weight_cache_bytes() + linears_[1]->weight_cache_bytes();
  Buffer both(bytes);
  given[1].cache = both.data();
  given[0].cache = both.data() + linears_[1]->weight_cache_bytes();
  EXPECT_TRUE(run(given)) << run(given).error().message;
  given[0].cache = both.data() + linears_[1]->weight_cache_bytes() - 16;
  EXPECT_FALSE(run(given));
}

TEST_F(WeightCastsTest, RunsOfTwoThreadsAtOnceAreChecked) {
  add("tensorwise", 40);
  const WeightCasts casts = WeightCasts::plan(context_, linears_).value();
  cuda_.emulate = false;
  auto bad = calls(false);
  bad[30].cache = bad[3].cache;
  std::atomic<int> wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        Buffer workspace(casts.workspace_bytes());
        for (int i = 0; i < 300; ++i) wrong += casts.run(bad, workspace.data(), nullptr) ? 1 : 0;
      });
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST_F(WeightCastsTest, MisuseIsOneClearError) {
  add("tensorwise", 3);
  add("delayed", 1);
  const WeightCasts casts = WeightCasts::plan(context_, linears_).value();
  Buffer workspace(casts.workspace_bytes());
  const size_t before = cuda_.launches.size();
  const auto refused = [&](auto change, std::string_view part) {
    auto given = calls(false);
    change(given);
    const Status status = casts.run(given, workspace.data(), nullptr);
    ASSERT_FALSE(status) << part;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(says(status.error(), part)) << status.error().message;
  };
  using Calls = std::vector<WeightCall>;
  refused([](Calls& c) { c.pop_back(); }, "4 weights were planned, 3 are given");
  refused([](Calls& c) { c[2].w = nullptr; }, "args[2]: float8_weight_args.w is NULL");
  refused([](Calls& c) { c[1].cache = nullptr; }, "args[1]: float8_weight_args.cache is NULL");
  refused([](Calls& c) { c[3].scales = {}; }, "args[3]: float8_weight_args.scales is empty");
  refused([](Calls& c) { c[3].first_step = true; }, "args[3].first_step is not args[0]'s");
  const Status no_workspace = casts.run(calls(false), nullptr, nullptr);
  ASSERT_FALSE(no_workspace);
  EXPECT_TRUE(says(no_workspace.error(), "workspace of float8_weight_casts_run is NULL"));
  EXPECT_EQ(cuda_.launches.size(), before);

  linears_.push_back(nullptr);
  EXPECT_TRUE(says(WeightCasts::plan(context_, linears_).error(), "linears[4] is NULL"));
  linears_.back() = Linear::plan(cuda_.context(), linears_[0]->desc()).value();
  EXPECT_TRUE(says(WeightCasts::plan(context_, linears_).error(), "another context's"));
}

}  // namespace
}  // namespace f8::runtime
