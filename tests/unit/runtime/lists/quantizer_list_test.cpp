// Many tensors cast in few launches: the bits of float8_quantize on each.
#include "runtime/lists/quantizer_list.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <optional>
#include <thread>

#include "recipes/fp8_layout.hpp"
#include "tests/golden.hpp"
#include "tests/unit/runtime/count_allocations.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;
using testing::FakeCuda;
using testing::kPoison;
using testing::says;

// A quantizer, a tensor of up to its rows, and everything that a cast of it writes.
struct Quantized {
  Quantized(const std::shared_ptr<Context>& context, const QuantizerDesc& desc,
            int64_t rows_of_call, uint64_t seed)
      : quantizer(Quantizer::plan(context, desc).value()),
        rows(rows_of_call),
        x(reference::random_matrix(std::max<int64_t>(rows, 1), desc.cols, seed), desc.dtype),
        tensor(quantizer->tensor_bytes()),
        amax(static_cast<size_t>(quantizer->amax_words()) * 4),
        row_amax(static_cast<size_t>(quantizer->row_amax_words()) * 4) {
    // The slots of a linear with the recipe: x, w and dy.
    for (size_t i = 0; i < 4; ++i) {
      scale[i * kernels::kScaleStride] = 16.0F * static_cast<float>(i + 1);
    }
  }

  [[nodiscard]] QuantizeCall call(bool first_step = false) {
    return {.rows = rows,
            .x = {x.data()},
            .tensor = {tensor.data()},
            .step = first_step_if(first_step),
            .scales = {{recorded, scale}},
            .amax = quantizer->amax_words() > 0 ? words(amax) : nullptr,
            .row_amax = quantizer->row_amax_words() > 0 ? words(row_amax) : nullptr};
  }
  [[nodiscard]] static uint32_t* words(Buffer& buffer) {
    return reinterpret_cast<uint32_t*>(buffer.data());
  }
  [[nodiscard]] auto written() {
    EXPECT_TRUE(tensor.guard_is_whole());
    EXPECT_TRUE(amax.guard_is_whole());
    EXPECT_TRUE(row_amax.guard_is_whole());
    return std::tuple(bytes(tensor), std::vector<uint32_t>(recorded, recorded + 8));
  }

  std::shared_ptr<const Quantizer> quantizer;
  int64_t rows;
  Buffer x, tensor, amax, row_amax;
  uint32_t recorded[8] = {};
  float scale[4 * kernels::kScaleStride] = {};
};
using Items = std::vector<std::unique_ptr<Quantized>>;

class QuantizerListTest : public ::testing::TestWithParam<const char*> {
 protected:
  QuantizerDesc desc(Tensor operand, int64_t rows, int64_t cols) const {
    return {
        .operand = operand, .rows = rows, .cols = cols, .recipe = find_recipe(recipe()).value()};
  }
  static std::string_view recipe() { return GetParam(); }
  static bool is_delayed() { return recipe() == "delayed"; }

  // Tensors of all operands, of many shapes, with fewer rows than planned, one and none.
  Items mixed() const {
    Items items;
    const auto add = [&](QuantizerDesc of, int64_t rows) {
      items.push_back(std::make_unique<Quantized>(context_, of, rows, items.size()));
    };
    add(desc(Tensor::kInput, 200, 144), 133);
    add(desc(Tensor::kWeight, 160, 48), 160);
    add(desc(Tensor::kInput, 64, 32), 0);
    add(desc(Tensor::kInput, 300, 16), 1);
    add(desc(Tensor::kGradOutput, 129, 272), 129);
    add(desc(Tensor::kGradOutput, 77, 64), 31);
    add(desc(Tensor::kWeight, 16, 400), 16);
    add(desc(Tensor::kWeight, 32, 16), 0);  // as of a rank without rows
    QuantizerDesc forward_alone = desc(Tensor::kInput, 90, 80);
    forward_alone.qt = false;
    add(forward_alone, 55);
    QuantizerDesc f32 = desc(Tensor::kWeight, 48, 64);
    f32.dtype = Dtype::kF32;
    add(f32, 48);
    QuantizerDesc hold = desc(Tensor::kInput, 40, 32);
    hold.non_finite = NonFinite::kSaturate;
    add(hold, 40);
    return items;
  }
  static QuantizerList list_of(const std::shared_ptr<Context>& context, const Items& items) {
    std::vector<std::shared_ptr<const Quantizer>> quantizers;
    for (const auto& item : items) quantizers.push_back(item->quantizer);
    return QuantizerList::plan(context, quantizers).value();
  }
  static std::vector<QuantizeCall> calls_of(const Items& items) {
    std::vector<QuantizeCall> calls;
    for (const auto& item : items) {
      calls.push_back(item->call());
      calls.back().struct_size = sizeof(QuantizeCall);
    }
    return calls;
  }

  // Casts everything at once, and one by one.
  void expect_the_same(Items& together, Items& alone, bool first_step = false) {
    const QuantizerList list = list_of(context_, together);
    Buffer workspace(list.workspace_bytes());
    std::fill_n(workspace.data(), std::min(workspace.bytes(), reserved_), uint8_t{0});
    ASSERT_TRUE(
        list.run(listed(calls_of(together), workspace.data(), first_step_if(first_step)), nullptr));
    EXPECT_TRUE(workspace.guard_is_whole());
    for (size_t i = 0; i < together.size(); ++i) {
      Quantized& item = *alone[i];
      Buffer scratch(item.quantizer->workspace_bytes());
      std::fill_n(scratch.data(), std::min(scratch.bytes(), reserved_), uint8_t{0});
      ASSERT_TRUE(
          item.quantizer->run(with_workspace(item.call(first_step), scratch.data()), nullptr));
      EXPECT_EQ(together[i]->written(), item.written()) << i;
    }
    EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
  }

  FakeCuda cuda_;
  std::shared_ptr<Context> context_ = cuda_.context();
  size_t reserved_ = quantize_sync_bytes(context_->device().sm_count);
};
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
    EXPECT_MESSAGE(status, part);
    EXPECT_EQ(cuda_.launches.size(), before) << part;
    EXPECT_EQ(cuda_.memsets, memsets) << part;
  };
  const auto into = [](const void* at, size_t by) {
    return const_cast<uint8_t*>(static_cast<const uint8_t*>(at)) + by;
  };
  refused([](Calls& c) { c.pop_back(); }, "11");
  refused([](Calls& c) { c[5].x = {}; }, "float8_quantize_args.x.data");
  refused([](Calls& c) { c[9].tensor = {}; }, "float8_quantize_args.tensor.data");
  refused([](Calls& c) { c[3].rows = 301; }, "float8_quantize_args.rows");
  refused([](Calls& c) { c[1].rows = 159; }, "float8_quantize_args.rows");
  refused([](Calls& c) { c[4].x.ld = 8; }, "float8_quantize_list");
  // What is one for all tensors is given once.
  uint32_t flag = 0;
  refused([](Calls& c) { c[7].step = &kFirstOfSteps; }, "float8_quantize_args.step");
  refused([&](Calls& c) { c[7].workspace = {workspace.data()}; }, "float8_quantize_args.workspace");
  refused([&](Calls& c) { c[7].noop_flag = &flag; }, "float8_quantize_args.noop_flag");
  refused([&](Calls& c) { c[6].amax = items[0]->recorded; }, "float8_quantize_list");
  refused([&](Calls& c) { c[8].tensor = c[0].tensor; }, "overlap");
  refused([&](Calls& c) { c[8].tensor.data = into(c[1].x.data, 32); }, "float8_quantize_args.x");
  refused([&](Calls& c) { c[3].x.data = into(c[0].tensor.data, items[0]->tensor.bytes() - 16); },
          "float8_quantize_args.tensor");
  refused([&](Calls& c) { c[4].tensor.data = workspace.data() + 256; }, "overlap");
  if (is_delayed()) {
    refused([](Calls& c) { c[0].scales = {}; }, "float8_quantize_args.scales");
    refused([&](Calls& c) { c[5].scales.opaque[0] = into(c[4].scales.opaque[0], 4); },
            "float8_scale_slots");
  }
  if (list.workspace_bytes() > 0) {
    const Status none = list.run(listed(calls_of(items)), nullptr);
    EXPECT_MESSAGE(none, "float8_quantize_list_args.workspace.data");
    const Status odd = list.run(listed(calls_of(items), workspace.data() + 4), nullptr);
    EXPECT_MESSAGE(odd, "16");
  }
  const Status find = list.find_amax(listed(calls_of(items)), nullptr);
  EXPECT_MESSAGE(find, "float8_quantizer_desc.over_ranks");
  std::vector<std::shared_ptr<const Quantizer>> quantizers = {items[0]->quantizer, nullptr};
  EXPECT_MESSAGE(QuantizerList::plan(context_, quantizers), "quantizers[1]");
  EXPECT_MESSAGE(QuantizerList::plan(cuda_.context(), quantizers));
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

// Tensors that ranks hold by rows.
class ShardListTest : public QuantizerListTest {
 protected:
  struct Whole {
    Tensor operand;
    int64_t rows, cols;
  };
  // The last blocks of 128 are cut; sizes are legal for a weight.
  static constexpr std::array<Whole, 5> kWholes = {{{Tensor::kWeight, 304, 144},
                                                    {Tensor::kInput, 192, 48},
                                                    {Tensor::kWeight, 144, 272},
                                                    {Tensor::kGradOutput, 160, 64},
                                                    {Tensor::kWeight, 16, 32}}};
  static Buffer matrix(size_t i) {
    const Whole& whole = kWholes[i];
    Buffer buffer(reference::random_matrix(whole.rows, whole.cols, 50 + i));
    if (i == 2) reinterpret_cast<uint16_t*>(buffer.data())[140 * 272 + 3] = 0x7fc1;
    return buffer;
  }
  // The most rows of a shard where `ranks` hold a tensor, and the rows of this rank.
  static std::pair<int64_t, int64_t> shard(int64_t rows, int64_t ranks, int64_t rank) {
    const int64_t most = recipe() == "blockwise" ? padded((rows + ranks - 1) / ranks, 128)
                                                 : (rows + ranks - 1) / ranks;
    return {most, std::clamp<int64_t>(rows - rank * most, 0, most)};
  }
  static int64_t padded(int64_t rows, int64_t of) { return (rows + of - 1) / of * of; }
};
INSTANTIATE_TEST_SUITE_P(Recipes, ShardListTest,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp",
                                           "blockwise"),
                         [](const auto& suite) { return std::string(suite.param); });

// Adjacent words of all tensors are reduced at once, as float8_amax_sync does, and every shard has the
// bits of a quantizer of its own over ranks, which tensor_test.cpp compares with the whole tensor.
TEST_P(ShardListTest, TheSameAsOneByOne) {
  for (const int64_t ranks : {2, 3, 4}) {
    SCOPED_TRACE(ranks);
    std::vector<Items> together(static_cast<size_t>(ranks)), alone(static_cast<size_t>(ranks));
    std::vector<std::vector<uint32_t>> words;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      for (auto* all : {&together, &alone}) {
        Items& items = (*all)[static_cast<size_t>(rank)];
        for (size_t i = 0; i < kWholes.size(); ++i) {
          const auto& [operand, rows, cols] = kWholes[i];
          const auto [most, count] = shard(rows, ranks, rank);
          QuantizerDesc of = desc(operand, most, cols);
          of.over_ranks = true;
          items.push_back(std::make_unique<Quantized>(context_, of, count, i));
          if (count == 0) continue;
          Buffer whole = matrix(i);
          std::copy_n(whole.data() + rank * most * cols * 2, count * cols * 2,
                      items.back()->x.data());
        }
      }
      // One buffer for the list's words.
      size_t total = 0;
      for (const auto& item : together[static_cast<size_t>(rank)]) {
        total += static_cast<size_t>(item->quantizer->amax_words());
      }
      words.emplace_back(total, 0xdeadbeefU);
    }
    const auto calls = [&](int64_t rank) {
      const auto index = static_cast<size_t>(rank);
      auto out = calls_of(together[index]);
      uint32_t* at = words[index].data();
      for (size_t i = 0; i < out.size(); ++i) {
        if (out[i].amax != nullptr) out[i].amax = at;
        at += together[index][i]->quantizer->amax_words();
      }
      return out;
    };
    const auto list = [&](int64_t rank) {
      return list_of(context_, together[static_cast<size_t>(rank)]);
    };
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int memsets = cuda_.memsets;
      const auto& of_rank = words[static_cast<size_t>(rank)];
      cuda_.allocations = {{.begin = of_rank.data(), .bytes = 4 * of_rank.size()}};
      EXPECT_EQ(list(rank).workspace_bytes(), 0U);
      ASSERT_TRUE(list(rank).find_amax(listed(calls(rank)), nullptr));
      EXPECT_LE(cuda_.memsets - memsets, 1 + static_cast<int>(kWholes.size()));
    }
    for (size_t w = 0; w < words[0].size(); ++w) {
      uint32_t most = 0;
      for (const auto& of_rank : words) most = std::max(most, of_rank[w]);
      for (auto& of_rank : words) of_rank[w] = most;
    }
    for (auto& items : alone) {
      for (auto& item : items) ASSERT_TRUE(item->quantizer->find_amax(item->call(), nullptr));
    }
    for (size_t i = 0; i < kWholes.size(); ++i) {
      const auto count = static_cast<size_t>(alone[0][i]->quantizer->amax_words());
      for (size_t w = 0; w < count; ++w) {
        uint32_t most = 0;
        for (auto& items : alone) most = std::max(most, Quantized::words(items[i]->amax)[w]);
        for (auto& items : alone) Quantized::words(items[i]->amax)[w] = most;
      }
    }
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto index = static_cast<size_t>(rank);
      ASSERT_TRUE(list(rank).run(listed(calls(rank)), nullptr));
      size_t at = 0;
      for (size_t i = 0; i < kWholes.size(); ++i) {
        Quantized& one = *alone[index][i];
        const auto count = static_cast<size_t>(one.quantizer->amax_words());
        EXPECT_TRUE(std::equal(words[index].begin() + static_cast<std::ptrdiff_t>(at),
                               words[index].begin() + static_cast<std::ptrdiff_t>(at + count),
                               Quantized::words(one.amax)));
        at += count;
        ASSERT_TRUE(one.quantizer->run(with_workspace(one.call(), nullptr), nullptr));
        EXPECT_EQ(together[index][i]->written(), one.written()) << i;
      }
    }
    ASSERT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
  }
}

TEST_P(ShardListTest, OneAmaxLaunchAndOneCastLaunch) {
  Items items;
  std::vector<uint32_t> amax, row_amax;
  for (int64_t i = 0; i < 20; ++i) {
    QuantizerDesc of = desc(Tensor::kWeight, 128, 16 * (1 + i % 5));
    of.over_ranks = true;
    items.push_back(std::make_unique<Quantized>(context_, of, i == 4 ? 0 : 128 - i, i));
    amax.resize(amax.size() + static_cast<size_t>(items.back()->quantizer->amax_words()));
    row_amax.resize(row_amax.size() +
                    static_cast<size_t>(items.back()->quantizer->row_amax_words()));
  }
  auto calls = calls_of(items);
  size_t at = 0, row_at = 0;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (calls[i].amax != nullptr) calls[i].amax = amax.data() + at;
    if (calls[i].row_amax != nullptr) calls[i].row_amax = row_amax.data() + row_at;
    at += static_cast<size_t>(items[i]->quantizer->amax_words());
    row_at += static_cast<size_t>(items[i]->quantizer->row_amax_words());
  }
  const QuantizerList list = list_of(context_, items);
  cuda_.allocations = {{.begin = amax.data(), .bytes = 4 * amax.size()},
                       {.begin = row_amax.data(), .bytes = 4 * row_amax.size()}};
  const size_t before = cuda_.launches.size();
  int memsets = cuda_.memsets;
  ASSERT_TRUE(list.find_amax(listed(calls), nullptr));
  const size_t finds = cuda_.launches.size() - before;
  ASSERT_TRUE(list.run(listed(calls), nullptr));
  const size_t casts = cuda_.launches.size() - before - finds;
  EXPECT_EQ(finds, recipe() == "blockwise" ? 0U : 1U);
  EXPECT_EQ(casts, 1U);
  EXPECT_EQ(cuda_.memsets - memsets, recipe() == "blockwise" ? 0 : 2);

  // Words that follow each other by chance are of two allocations here.
  if (recipe() == "blockwise") return;
  const size_t half = 4 * static_cast<size_t>(calls[10].amax - amax.data());
  cuda_.allocations.front().bytes = half;
  cuda_.allocations.push_back({.begin = calls[10].amax, .bytes = 4 * amax.size() - half});
  memsets = cuda_.memsets;
  const Status found = list.find_amax(listed(calls), nullptr);
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(cuda_.memsets - memsets, 3);
  EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
}

TEST_P(ShardListTest, ShardsOfTwoTensorsMayNotShareWords) {
  if (recipe() == "blockwise") GTEST_SKIP() << "shards of blocks have no words";
  Items items;
  for (size_t i = 0; i < 2; ++i) {
    QuantizerDesc of = desc(Tensor::kWeight, 64, 32);
    of.over_ranks = true;
    items.push_back(std::make_unique<Quantized>(context_, of, 64, i));
  }
  const QuantizerList list = list_of(context_, items);
  auto calls = calls_of(items);
  const size_t before = cuda_.launches.size();
  const int memsets = cuda_.memsets;
  calls[1].row_amax = calls[0].row_amax;
  const Status shared = list.find_amax(listed(calls), nullptr);
  EXPECT_MESSAGE(shared, "row_amax", "args[");
  calls = calls_of(items);
  calls[1].amax = nullptr;
  EXPECT_MESSAGE(list.find_amax(listed(calls), nullptr), "tensors[1]", "float8_quantize_args.amax");
  EXPECT_MESSAGE(list.run(listed(calls), nullptr), "tensors[1]", "float8_quantize_args.amax");
  EXPECT_EQ(cuda_.launches.size(), before);
  EXPECT_EQ(cuda_.memsets, memsets);
}

}  // namespace
}  // namespace f8::runtime
