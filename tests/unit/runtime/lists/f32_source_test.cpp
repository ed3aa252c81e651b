// Quantizers that round fp32 as they read it: the bits of rounding first, and casting then.
#include <algorithm>
#include <array>
#include <memory>

#include "runtime/lists/quantizer_list.hpp"
#include "tests/golden.hpp"
#include "tests/gpu/quantize/quantize_data.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using gpu::Floats;
using gpu::kAllFloats;
using testing::Buffer;
using testing::FakeCuda;
using testing::says;

constexpr int64_t kGap = 16;  // elements between rows

// A quantizer, a tensor, and everything that its calls write.
struct SourceItem {
  SourceItem(const std::shared_ptr<Context>& context, const QuantizerDesc& desc,
             const reference::Matrix& of)
      : quantizer(Quantizer::plan(context, desc).value()),
        rows(of.rows),
        ld(of.cols + kGap),
        x(of, desc.f32_source ? Dtype::kF32 : desc.dtype, kGap),
        tensor(quantizer->tensor_bytes()),
        workspace(std::vector<uint8_t>(quantizer->workspace_bytes())),
        amax(static_cast<size_t>(quantizer->amax_words()) * 4),
        row_amax(static_cast<size_t>(quantizer->row_amax_words()) * 4) {
    for (size_t i = 0; i < 4; ++i) scale[i * kernels::kScaleStride] = 24.0F;
  }

  [[nodiscard]] QuantizeCall call() {
    const auto words = [](Buffer& of) {
      return of.bytes() == 0 ? nullptr : reinterpret_cast<uint32_t*>(of.data());
    };
    return {.struct_size = sizeof(QuantizeCall),
            .rows = rows,
            .x = {x.data(), ld},
            .tensor = {tensor.data()},
            .scales = {{recorded.data(), scale}},
            .amax = words(amax),
            .row_amax = words(row_amax)};
  }
  void run() {
    if (quantizer->desc().over_ranks) {
      ASSERT_TRUE(quantizer->find_amax(call(), nullptr));
    }
    ASSERT_TRUE(quantizer->run(with_workspace(call(), workspace.data()), nullptr));
  }
  [[nodiscard]] auto written() {
    const auto bytes = [](Buffer& of) {
      EXPECT_TRUE(of.guard_is_whole());
      return std::vector<uint8_t>(of.data(), of.data() + of.bytes());
    };
    return std::tuple(bytes(tensor), bytes(amax), bytes(row_amax), recorded);
  }

  std::shared_ptr<const Quantizer> quantizer;
  int64_t rows, ld;
  Buffer x, tensor, workspace, amax, row_amax;
  std::array<uint32_t, 8> recorded = {};
  float scale[4 * kernels::kScaleStride] = {};
};
using SourceItems = std::vector<std::unique_ptr<SourceItem>>;

class F32SourceTest : public ::testing::TestWithParam<const char*> {
 protected:
  static QuantizerDesc desc(Tensor operand, int64_t rows, int64_t cols, Dtype dtype) {
    return {.operand = operand,
            .rows = rows,
            .cols = cols,
            .recipe = find_recipe(GetParam()).value(),
            .dtype = dtype,
            .f32_source = true};
  }
  static bool is_delayed() { return std::string_view(GetParam()) == "delayed"; }

  // Quantizers of several types, operands and shapes, and some that round nothing.
  static std::vector<QuantizerDesc> all() {
    std::vector<QuantizerDesc> some = {
        desc(Tensor::kWeight, 144, 272, Dtype::kBf16), desc(Tensor::kWeight, 16, 400, Dtype::kF16),
        desc(Tensor::kInput, 131, 48, Dtype::kBf16), desc(Tensor::kGradOutput, 1, 16, Dtype::kF16),
        desc(Tensor::kGradOutput, 129, 144, Dtype::kBf16)};
    some.push_back(some[0]);
    some.back().f32_source = false;
    some.push_back(some.back());
    some.back().dtype = Dtype::kF32;
    some.push_back(some[1]);
    some.back().non_finite = NonFinite::kSaturate;
    for (size_t i = 0; i < 3 && !is_delayed(); ++i) {
      some.push_back(some[i]);
      some.back().over_ranks = true;
      some.back().rows = 256;
    }
    return some;
  }

  // Of each quantizer one that rounds, and one that is given what was rounded.
  std::pair<SourceItems, SourceItems> items(Floats kind) {
    SourceItems rounding;
    SourceItems rounded;
    for (const QuantizerDesc& desc : all()) {
      const int64_t rows = desc.over_ranks ? 131 : desc.rows;
      const auto x = random_floats(kind, rows, desc.cols, rounding.size());
      rounding.push_back(std::make_unique<SourceItem>(context_, desc, x));
      QuantizerDesc plain = desc;
      plain.f32_source = false;
      rounded.push_back(
          std::make_unique<SourceItem>(context_, plain, reference::rounded_to(x, desc.dtype)));
    }
    return {std::move(rounding), std::move(rounded)};
  }

  void expect_the_same(const SourceItems& found, const SourceItems& expected) {
    EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i]->written(), expected[i]->written()) << i;
    }
  }

  FakeCuda cuda_;
  std::shared_ptr<Context> context_ = cuda_.context();
};
INSTANTIATE_TEST_SUITE_P(Recipes, F32SourceTest,
                         ::testing::Values("tensorwise", "rowwise", "blockwise", "delayed"));

TEST_P(F32SourceTest, HasTheBitsOfRoundingFirst) {
  for (const Floats kind : kAllFloats) {
    SCOPED_TRACE(static_cast<int>(kind));
    auto [found, expected] = items(kind);
    for (const auto* some : {&found, &expected}) {
      for (const auto& item : *some) item->run();
    }
    expect_the_same(found, expected);
  }
}

TEST_P(F32SourceTest, ListsToo) {
  for (const Floats kind : kAllFloats) {
    SCOPED_TRACE(static_cast<int>(kind));
    auto [found, expected] = items(kind);
    for (const auto& item : expected) item->run();
    std::vector<std::shared_ptr<const Quantizer>> quantizers;
    std::vector<QuantizeCall> calls;
    for (const auto& item : found) {
      quantizers.push_back(item->quantizer);
      calls.push_back(item->call());
    }
    const QuantizerList list = QuantizerList::plan(context_, quantizers).value();
    Buffer workspace{std::vector<uint8_t>(list.workspace_bytes())};
    if (!is_delayed()) {
      ASSERT_TRUE(list.find_amax(listed(calls), nullptr));
    }
    const Status ran = list.run(listed(calls, workspace.data()), nullptr);
    ASSERT_TRUE(ran) << ran.error().message;
    expect_the_same(found, expected);
  }
}

TEST(F32Source, IsNotRoundedToF32) {
  FakeCuda cuda;
  const auto none = Quantizer::plan(cuda.context(), {.rows = 16,
                                                     .cols = 16,
                                                     .recipe = find_recipe("tensorwise").value(),
                                                     .dtype = Dtype::kF32,
                                                     .f32_source = true});
  EXPECT_MESSAGE(none, "float8_quantizer_desc.f32_source");
}

TEST(F32Source, ReadsRowsOfF32) {
  FakeCuda cuda;
  const QuantizerDesc desc{.operand = Tensor::kWeight,
                           .rows = 16,
                           .cols = 16,
                           .recipe = find_recipe("tensorwise").value(),
                           .f32_source = true};
  SourceItem item(cuda.context(), desc, reference::random_matrix(16, 16, 1));
  QuantizeCall call = item.call();
  call.x.ld = 20;  // 80 bytes, which are whole 16s; 40 bytes in bf16 are not
  EXPECT_TRUE(item.quantizer->run(with_workspace(call, item.workspace.data()), nullptr));
  call.x.ld = 18;
  EXPECT_FALSE(item.quantizer->run(with_workspace(call, item.workspace.data()), nullptr));
}

}  // namespace
}  // namespace f8::runtime
