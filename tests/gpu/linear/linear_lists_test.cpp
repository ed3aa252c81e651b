// Lists of quantizers: the bits of casts one by one.
#include <algorithm>

#include "runtime/lists/quantizer_list.hpp"
#include "tests/gpu/fp8_copies.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

// A quantizer, a tensor, and the memory of two casts of it.
struct Listed {
  Listed(const std::shared_ptr<Context>& context, const QuantizerDesc& desc, int64_t rows_of_call,
         uint64_t seed)
      : quantizer(Quantizer::plan(context, desc).value()),
        rows(rows_of_call),
        x(to_device(*context, reference::random_matrix(std::max<int64_t>(rows, 1), desc.cols, seed,
                                                       reference::Distribution::kOutliers))),
        together(*context, quantizer->tensor_bytes()),
        alone(*context, quantizer->tensor_bytes()),
        row_amax(*context, words(quantizer->row_amax_words())),
        amaxes(*context, std::vector<uint32_t>(8)),
        scales(*context, std::vector<float>(64, 32.0F)) {}

  static size_t words(int64_t count) {
    return static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(uint32_t);
  }
  [[nodiscard]] QuantizeCall call(const DeviceBuffer& tensor) const {
    QuantizeCall call;
    call.x.data = x.as();
    call.rows = rows;
    call.first_row = first_row;
    call.tensor.data = tensor.as();
    call.scales = ScaleSlots{amaxes.as<uint32_t>(), scales.as<float>()};
    if (quantizer->row_amax_words() > 0) call.row_amax = row_amax.as<uint32_t>();
    return call;
  }
  void expect_the_same(Context& context) const {
    EXPECT_EQ(copies(context, quantizer->view(together.as(), nullptr, rows).value()),
              copies(context, quantizer->view(alone.as(), nullptr, rows).value()));
    for (const DeviceBuffer* buffer : {&together, &alone, &row_amax}) {
      EXPECT_TRUE(buffer->guards_are_whole());
    }
  }

  std::shared_ptr<const Quantizer> quantizer;
  int64_t rows;
  int64_t first_row = 0;  // of a shard
  DeviceBuffer x, together, alone, row_amax, amaxes, scales;
};

class ListTest : public RecipeTest {
 protected:
  QuantizerDesc desc(Tensor operand, int64_t rows, int64_t cols) const {
    QuantizerDesc desc;
    desc.operand = operand;
    desc.rows = rows;
    desc.cols = cols;
    desc.recipe = find_recipe(GetParam()).value();
    return desc;
  }
  void add(const QuantizerDesc& desc, int64_t rows) {
    all_.push_back(std::make_unique<Listed>(context_, desc, rows, all_.size() + 1));
  }
  QuantizerList list() const {
    std::vector<std::shared_ptr<const Quantizer>> quantizers;
    for (const auto& one : all_) quantizers.push_back(one->quantizer);
    return QuantizerList::plan(context_, quantizers).value();
  }
  void expect_the_same() {
    const QuantizerList casts = list();
    const DeviceBuffer workspace(context(), casts.workspace_bytes());
    std::vector<QuantizeCall> calls;
    for (const auto& one : all_) calls.push_back(one->call(one->together));
    F8_ASSERT_OK(casts.run(listed(calls, workspace.as()), nullptr));
    EXPECT_TRUE(workspace.guards_are_whole());
    for (const auto& one : all_) {
      const DeviceBuffer scratch(context(), one->quantizer->workspace_bytes());
      F8_ASSERT_OK(
          one->quantizer->run(with_workspace(one->call(one->alone), scratch.as()), nullptr));
      one->expect_the_same(context());
    }
  }

  // Casts the shards of weights over three ranks, of up to so many rows.
  void expect_the_same_of_shards(int64_t most_rows);

  std::vector<std::unique_ptr<Listed>> all_;
};
INSTANTIATE_TEST_SUITE_P(Recipes, ListTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(ListTest, ManyTensorsAreCastAsOneByOne) {
  const int64_t large = by_device<int64_t>(4096, 256);
  for (int64_t i = 0; i < 6; ++i) add(desc(Tensor::kWeight, 128 + 16 * i, 592), 128 + 16 * i);
  add(desc(Tensor::kWeight, large, large), large);  // more tiles than one launch takes
  add(desc(Tensor::kInput, 300, 592), 257);
  add(desc(Tensor::kInput, large, 144), 1);
  add(desc(Tensor::kInput, 64, 144), 0);
  add(desc(Tensor::kGradOutput, large, 208), large - 1);
  expect_the_same();
}

TEST_P(ListTest, AFewSmallTensorsAreCastAsOneByOne) {
  add(desc(Tensor::kInput, 300, 592), 300);
  add(desc(Tensor::kInput, 64, 144), 33);
  expect_the_same();
}

// Ranks hold weights by rows; one device has all of their shards. The words of all weights are in one
// buffer, and the host takes their maxima over the ranks.
void ListTest::expect_the_same_of_shards(int64_t most_rows) {
  constexpr size_t kRanks = 3;
  constexpr int64_t kLinears = 6;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    for (int64_t i = 0; i < kLinears; ++i) {
      const int64_t last = 16 * i;  // the last shards are shorter, one is empty
      QuantizerDesc of = desc(Tensor::kWeight, most_rows, 80 + 16 * i);
      of.over_ranks = true;
      of.whole_rows = (int64_t{kRanks} - 1) * most_rows + last;
      add(of, rank + 1 < kRanks ? most_rows : last);
      all_.back()->first_row = static_cast<int64_t>(rank) * most_rows;
    }
  }
  const QuantizerList casts = list();
  EXPECT_EQ(casts.workspace_bytes(), 0U);
  int64_t total = 0;
  for (int64_t i = 0; i < kLinears; ++i) {
    total += all_[static_cast<size_t>(i)]->quantizer->amax_words();
  }
  DeviceBuffer together(context(), Listed::words(total * int64_t{kRanks}));
  DeviceBuffer alone(context(), Listed::words(total * int64_t{kRanks}));
  const auto calls = [&](bool in_list) {
    std::vector<QuantizeCall> out;
    uint32_t* at = (in_list ? together : alone).as<uint32_t>();
    for (const auto& one : all_) {
      out.push_back(one->call(in_list ? one->together : one->alone));
      if (one->quantizer->amax_words() > 0) out.back().amax = at;
      at += one->quantizer->amax_words();
    }
    return out;
  };
  const auto reduce = [&](DeviceBuffer& words) {
    auto values = words.download<uint32_t>();
    for (int64_t i = 0; i < total; ++i) {
      uint32_t most = 0;
      for (size_t rank = 0; rank < kRanks; ++rank) {
        most = std::max(most, values[static_cast<size_t>(i) + rank * static_cast<size_t>(total)]);
      }
      for (size_t rank = 0; rank < kRanks; ++rank) {
        values[static_cast<size_t>(i) + rank * static_cast<size_t>(total)] = most;
      }
    }
    words.upload(values.data(), values.size() * sizeof(uint32_t));
    return values;
  };
  F8_ASSERT_OK(casts.find_amax(listed(calls(true)), nullptr));
  const auto found = reduce(together);
  F8_ASSERT_OK(casts.run(listed(calls(true)), nullptr));
  const auto one_by_one = calls(false);
  for (size_t i = 0; i < all_.size(); ++i) {
    F8_ASSERT_OK(all_[i]->quantizer->find_amax(one_by_one[i], nullptr));
  }
  if (total > 0) {
    EXPECT_EQ(found, reduce(alone));
  }
  for (size_t i = 0; i < all_.size(); ++i) {
    SCOPED_TRACE(i);
    // find_amax of the list left the rows' maxima, which both casts read.
    F8_ASSERT_OK(all_[i]->quantizer->run(with_workspace(one_by_one[i], nullptr), nullptr));
    all_[i]->expect_the_same(context());
  }
  EXPECT_TRUE(together.guards_are_whole());
}

TEST_P(ListTest, ShardsOfManyWeightsAreCastAsOneByOne) {
  const std::string recipe = GetParam();
  if (recipe == "delayed") return;
  expect_the_same_of_shards(recipe == "blockwise" ? 128 : 112);
}

TEST_P(ListTest, ShardsThatCutBlocksAreCastAsOneByOne) {
  if (std::string(GetParam()) == "blockwise") expect_the_same_of_shards(112);
}

}  // namespace
}  // namespace f8::runtime::gpu
