// Lists of casts for tests, beside each of which stands a cast of its own.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "recipes/fp8_layout.hpp"
#include "runtime/lists/quantizer_list.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime::testing {

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

}  // namespace f8::runtime::testing
