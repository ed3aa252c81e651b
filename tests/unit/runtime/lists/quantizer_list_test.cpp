// Many tensors cast in few launches: the bits of float8_quantize on each.
#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>

#include "tests/unit/runtime/count_allocations.hpp"
#include "tests/unit/runtime/lists/quantizer_lists.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;
using testing::Items;
using testing::kPoison;
using testing::Quantized;
using testing::QuantizerListTest;
using testing::says;

INSTANTIATE_TEST_SUITE_P(Recipes, QuantizerListTest,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed",
                                           "blockwise"),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(QuantizerListTest, TheSameAsOneByOne) {
  for (const bool first_step : {false, true}) {
    if (first_step && !is_delayed()) continue;
    Items together = mixed();
    Items alone = mixed();
    expect_the_same(together, alone, first_step);
  }
}

TEST_P(QuantizerListTest, WhatIsNotFiniteStaysInItsTensor) {
  Items together = mixed();
  Items alone = mixed();
  for (Items* items : {&together, &alone}) {
    auto* x = reinterpret_cast<uint16_t*>((*items)[0]->x.data());
    x[20] = 0x7fc1;
    x[2000] = 0xff80;
    reinterpret_cast<uint16_t*>((*items)[9]->x.data())[7] = 0x7f80;
  }
  expect_the_same(together, alone);
}

TEST_P(QuantizerListTest, RowsMayDifferFromRunToRun) {
  Items together = mixed();
  const QuantizerList list = list_of(context_, together);
  Buffer workspace(list.workspace_bytes());
  for (const int64_t rows : {64, 7, 0, 63}) {
    std::fill_n(workspace.data(), workspace.bytes(), uint8_t{0});
    Items alone = mixed();
    for (Items* items : {&together, &alone}) {
      (*items)[2]->rows = rows;
      (*items)[2]->x = Buffer(reference::random_matrix(64, 32, 99));
      std::fill_n((*items)[2]->tensor.data(), (*items)[2]->tensor.bytes(), kPoison);
    }
    ASSERT_TRUE(list.run(listed(calls_of(together), workspace.data()), nullptr));
    Buffer scratch(alone[2]->quantizer->workspace_bytes());
    std::fill_n(scratch.data(), scratch.bytes(), uint8_t{0});
    ASSERT_TRUE(
        alone[2]->quantizer->run(with_workspace(alone[2]->call(), scratch.data()), nullptr));
    EXPECT_EQ(bytes(together[2]->tensor), bytes(alone[2]->tensor)) << rows;
  }
}

TEST_P(QuantizerListTest, OnePairOfLaunchesForManyTensors) {
  Items items;
  for (int64_t i = 0; i < 29; ++i) {
    items.push_back(std::make_unique<Quantized>(
        context_, desc(Tensor::kInput, 16 + i, 16 * (1 + i % 5)), 16 + i, i));
  }
  const QuantizerList list = list_of(context_, items);
  Buffer workspace(list.workspace_bytes());
  const size_t of_tensor = is_delayed() || recipe() == "blockwise" ? 1 : 2;
  size_t before = cuda_.launches.size();
  ASSERT_TRUE(list.run(listed(calls_of(items), workspace.data()), nullptr));
  EXPECT_EQ(cuda_.launches.size() - before, 2 * of_tensor);  // for 28 and for one more
  for (size_t i = 3; i < items.size(); ++i) items[i]->rows = 0;
  before = cuda_.launches.size();
  std::fill_n(workspace.data(), workspace.bytes(), uint8_t{0});
  ASSERT_TRUE(list.run(listed(calls_of(items), workspace.data()), nullptr));
  EXPECT_EQ(cuda_.launches.size() - before, 1U);  // of few small tensors
  for (const auto& item : items) item->rows = 0;
  before = cuda_.launches.size();
  ASSERT_TRUE(list.run(listed(calls_of(items), workspace.data()), nullptr));
  EXPECT_EQ(cuda_.launches.size(), before);
}

TEST_P(QuantizerListTest, AnEvaluationRecordsNothing) {
  if (!is_delayed()) GTEST_SKIP() << "there is nothing to record";
  Items items = mixed();
  const QuantizerList list = list_of(context_, items);
  Buffer workspace(list.workspace_bytes());
  ASSERT_TRUE(list.run(listed(calls_of(items), workspace.data(), &kEvaluation), nullptr));
  for (const auto& item : items) {
    EXPECT_TRUE(std::ranges::all_of(item->recorded, [](uint32_t word) { return word == 0; }));
  }
}

TEST_P(QuantizerListTest, RunDoesNotAllocate) {
  Items items = mixed();
  const QuantizerList list = list_of(context_, items);
  Buffer workspace(list.workspace_bytes());
  const auto calls = calls_of(items);
  cuda_.emulate = false;
  bool ok = false;
  int allocations = 0;
  {
    const testing::CountAllocations counting;
    ok = list.run(listed(calls, workspace.data()), nullptr).has_value();
    allocations = counting.count();
  }
  EXPECT_TRUE(ok);
  EXPECT_EQ(allocations, 0);
}

TEST_P(QuantizerListTest, BadArgumentsLeaveNothingEnqueued) {
  Items items = mixed();
  const QuantizerList list = list_of(context_, items);
  Buffer workspace(list.workspace_bytes() + 16);
  using Calls = std::vector<QuantizeCall>;
  const size_t before = cuda_.launches.size();
  const int memsets = cuda_.memsets;
  const auto refused = [&](const std::function<void(Calls&)>& change, std::string_view part) {
    Calls calls = calls_of(items);
    change(calls);
    const Status status = list.run(listed(calls, workspace.data()), nullptr);
    ASSERT_FALSE(status) << part;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(says(status.error(), part)) << status.error().message;
    EXPECT_EQ(cuda_.launches.size(), before) << part;
    EXPECT_EQ(cuda_.memsets, memsets) << part;
  };
  const auto into = [](const void* at, size_t by) {
    return const_cast<uint8_t*>(static_cast<const uint8_t*>(at)) + by;
  };
  refused([](Calls& c) { c.pop_back(); }, "10 args are given");
  refused([](Calls& c) { c[5].x = {}; }, "tensors[5]: float8_quantize_args.x.data is NULL");
  refused([](Calls& c) { c[9].tensor = {}; },
          "tensors[9]: float8_quantize_args.tensor.data is NULL");
  refused([](Calls& c) { c[3].rows = 301; }, "tensors[3]: float8_quantize_args.rows is 301");
  refused([](Calls& c) { c[1].rows = 159; }, "tensors[1]: float8_quantize_args.rows is 159");
  refused([](Calls& c) { c[4].x.ld = 8; }, "tensors[4]: float8_quantize_list");
  // What is one for all tensors is given once.
  uint32_t flag = 0;
  refused([](Calls& c) { c[7].step = &kFirstOfSteps; },
          "tensors[7]: float8_quantize_args.step is given");
  refused([&](Calls& c) { c[7].workspace = {workspace.data()}; },
          "tensors[7]: float8_quantize_args.workspace is given");
  refused([&](Calls& c) { c[7].noop_flag = &flag; },
          "tensors[7]: float8_quantize_args.noop_flag is given");
  refused([&](Calls& c) { c[6].amax = items[0]->recorded; }, "tensors[6]: float8_quantize_list");
  refused([&](Calls& c) { c[8].tensor = c[0].tensor; }, "overlap");
  refused([&](Calls& c) { c[8].tensor.data = into(c[1].x.data, 32); },
          "float8_quantize_args.x of args[1]");
  refused([&](Calls& c) { c[3].x.data = into(c[0].tensor.data, items[0]->tensor.bytes() - 16); },
          "float8_quantize_args.tensor of args[0]");
  refused([&](Calls& c) { c[4].tensor.data = workspace.data() + 256; }, "overlap");
  if (is_delayed()) {
    refused([](Calls& c) { c[0].scales = {}; }, "tensors[0]: float8_quantize_args.scales is empty");
    refused([&](Calls& c) { c[5].scales.opaque[0] = into(c[4].scales.opaque[0], 4); },
            "float8_scale_slots (amax)");
  }
  if (list.workspace_bytes() > 0) {
    const Status none = list.run(listed(calls_of(items)), nullptr);
    EXPECT_TRUE(says(none.error(), "float8_quantize_list_args.workspace.data is NULL"));
    const Status odd = list.run(listed(calls_of(items), workspace.data() + 4), nullptr);
    EXPECT_TRUE(says(odd.error(), "not aligned to 16 bytes"));
  }
  const Status find = list.find_amax(listed(calls_of(items)), nullptr);
  EXPECT_TRUE(says(find.error(), "set float8_quantizer_desc.over_ranks")) << find.error().message;
  std::vector<std::shared_ptr<const Quantizer>> quantizers = {items[0]->quantizer, nullptr};
  EXPECT_TRUE(says(QuantizerList::plan(context_, quantizers).error(), "quantizers[1] is NULL"));
  EXPECT_TRUE(says(QuantizerList::plan(cuda_.context(), quantizers).error(), "another context's"));
  EXPECT_EQ(cuda_.launches.size(), before);
  // An empty list is legal.
  const QuantizerList empty = QuantizerList::plan(context_, {}).value();
  EXPECT_EQ(empty.workspace_bytes(), 0U);
  EXPECT_TRUE(empty.run({}, nullptr));
  EXPECT_TRUE(empty.find_amax({}, nullptr));
  EXPECT_EQ(cuda_.launches.size(), before);
}

TEST_P(QuantizerListTest, RunsOfTwoThreadsAtOnceAreChecked) {
  Items items = mixed();
  const QuantizerList list = list_of(context_, items);
  cuda_.emulate = false;
  auto bad = calls_of(items);
  bad[8].tensor = bad[0].tensor;
  std::atomic<int> wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        Buffer workspace(list.workspace_bytes());
        for (int i = 0; i < 300; ++i) {
          wrong += list.run(listed(bad, workspace.data()), nullptr) ? 1 : 0;
        }
      });
    }
  }
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace f8::runtime
