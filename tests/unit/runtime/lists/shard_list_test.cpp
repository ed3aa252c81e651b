// Shards of many tensors cast in few launches: the bits of a quantizer of each.
#include <algorithm>
#include <array>
#include <utility>

#include "tests/unit/runtime/lists/quantizer_lists.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;
using testing::Items;
using testing::Quantized;
using testing::QuantizerListTest;
using testing::says;

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
  ASSERT_FALSE(shared);
  EXPECT_TRUE(says(shared.error(), "row_amax of args[")) << shared.error().message;
  calls = calls_of(items);
  calls[1].amax = nullptr;
  EXPECT_TRUE(says(list.find_amax(listed(calls), nullptr).error(),
                   "tensors[1]: float8_quantize_args.amax is NULL"));
  EXPECT_TRUE(says(list.run(listed(calls), nullptr).error(),
                   "tensors[1]: float8_quantize_args.amax is NULL"));
  EXPECT_EQ(cuda_.launches.size(), before);
  EXPECT_EQ(cuda_.memsets, memsets);
}

}  // namespace
}  // namespace f8::runtime
