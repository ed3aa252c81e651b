// Lists of quantizers, and linears that share them, through the public header, on an emulated device.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/unit/runtime/c_abi/emulated_memory.hpp"

namespace {

using float8::testing::emulated;
using float8::testing::Memory;
using float8::testing::memory;
using float8::testing::random_bf16;
using float8::testing::rowwise_quantizer;
using float8::testing::says;

bool same(const Memory& a, const Memory& b, size_t bytes) {
  return std::memcmp(a.get(), b.get(), bytes) == 0;
}

class QuantizerListAbi : public ::testing::Test {
 protected:
  static constexpr int64_t kRows[] = {48, 32, 21};
  static constexpr int64_t kCols[] = {32, 64, 16};

  float8::Context context_ = emulated();
  std::vector<float8::Quantizer> quantizers_ = {
      rowwise_quantizer(context_, FLOAT8_INPUT, 48, 32),
      rowwise_quantizer(context_, FLOAT8_WEIGHT, 32, 64),
      rowwise_quantizer(context_, FLOAT8_GRAD_OUTPUT, 90, 16)};
  float8::QuantizerList list_ = float8::QuantizerList::plan(context_, quantizers_).value();
  std::array<Memory, 3> x_ = {random_bf16(48 * 32, 1), random_bf16(32 * 64, 2),
                              random_bf16(21 * 16, 3)};
  Memory workspace_ = memory(list_.workspace_bytes());
};

// The elements that it has read are what it makes room for.
TEST_F(QuantizerListAbi, AdamwReadsTheElementsThatAreThere) {
  float8_quantize_args cast{};
  std::array<float8_adamw_tensor, 2> tensors{};
  tensors[1].struct_size = 0;  // it ends the reading
  tensors[0].quantizer = quantizers_[1].get();
  tensors[0].cast = &cast;
  float8_adamw_args args{};
  args.count = size_t{1} << 60;
  args.tensors = tensors.data();
  EXPECT_EQ(float8_adamw(context_.get(), &args, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("float8_adamw_args.tensors[1]: ")) << float8_last_error();
}

TEST_F(QuantizerListAbi, CastsTensorsToTheBitsOfOneByOne) {
  std::vector<float8::QuantizeArgs> args;
  std::vector<Memory> together, alone;
  for (size_t i = 0; i < 3; ++i) {
    const size_t bytes = quantizers_[i].tensor_bytes();
    for (auto* all : {&together, &alone}) {
      all->push_back(memory(bytes));
      std::memset(all->back().get(), 0xcd, bytes);
    }
    args.push_back({.rows = kRows[i], .x = {x_[i].get()}, .tensor = {together[i].get()}});
  }
  args[1].rows = -1;  // rows_max
  std::memset(workspace_.get(), 0, list_.workspace_bytes());
  ASSERT_TRUE(list_.run({.workspace = {workspace_.get()}}, args, nullptr)) << float8_last_error();
  for (size_t i = 0; i < 3; ++i) {
    const Memory scratch = memory(quantizers_[i].workspace_bytes());
    std::memset(scratch.get(), 0, quantizers_[i].workspace_bytes());
    args[i].tensor.data = alone[i].get();
    ASSERT_TRUE(quantizers_[i].run(with_workspace(args[i], scratch.get()), nullptr))
        << float8_last_error();
    EXPECT_TRUE(same(together[i], alone[i], quantizers_[i].tensor_bytes())) << i;
  }
}

TEST_F(QuantizerListAbi, TakesStructsOfAnotherVersion) {
  // Structs of a newer header, whose new field is 0.
  struct Newer {
    float8_quantize_args known;
    uint64_t unknown;
  };
  std::vector<Newer> args(3);
  std::vector<Memory> tensors;
  for (size_t i = 0; i < args.size(); ++i) {
    tensors.push_back(memory(quantizers_[i].tensor_bytes()));
    args[i] = {{.struct_size = sizeof(Newer),
                .rows = kRows[i],
                .x = {x_[i].get()},
                .tensor = {tensors[i].get()}},
               0};
  }
  std::memset(workspace_.get(), 0, list_.workspace_bytes());
  const auto run = [&] {
    const float8_quantize_list_args all{
        .tensors = &args[0].known, .count = args.size(), .workspace = {workspace_.get()}};
    return float8_quantize_list(list_.get(), &all, nullptr);
  };
  EXPECT_EQ(run(), FLOAT8_OK) << float8_last_error();
  args[2].unknown = 1;
  EXPECT_EQ(run(), FLOAT8_UNSUPPORTED);
  EXPECT_TRUE(says("float8_quantize_list_args.tensors[2]: float8_quantize_args: it sets fields"))
      << float8_last_error();
  args[2].unknown = 0;
  args[1].known.struct_size = sizeof(float8_quantize_args);
  EXPECT_EQ(run(), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("float8_quantize_list_args.tensors[1]: float8_quantize_args: struct_size"))
      << float8_last_error();
}

TEST_F(QuantizerListAbi, RefusesWhatItCannotDo) {
  float8_quantizer_list* out = nullptr;
  const float8_quantizer* some[] = {quantizers_[0].get(), nullptr};
  EXPECT_EQ(float8_quantizer_list_plan(context_.get(), some, 2, &out), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("quantizers[1] is NULL")) << float8_last_error();
  EXPECT_EQ(float8_quantizer_list_plan(context_.get(), nullptr, 1, &out), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("quantizers is NULL")) << float8_last_error();
  EXPECT_EQ(float8_quantizer_list_plan(nullptr, some, 1, &out), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(out, nullptr);
  EXPECT_EQ(float8_quantizer_list_workspace_bytes(nullptr), 0U);
  float8_quantizer_list_destroy(nullptr);
  float8_quantize_list_args args{};
  EXPECT_EQ(float8_quantize_list(nullptr, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_quantize_list(list_.get(), nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("float8_quantize_list_args is NULL")) << float8_last_error();
  args.count = 3;
  EXPECT_EQ(float8_quantize_list(list_.get(), &args, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("float8_quantize_list_args.tensors is NULL")) << float8_last_error();
  EXPECT_EQ(float8_quantize_list_amax(list_.get(), &args, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_FALSE(list_.run({.workspace = {workspace_.get()}}, {}, nullptr));
  EXPECT_TRUE(says("0 args are given")) << float8_last_error();
  std::vector<float8::QuantizeArgs> all(3);
  EXPECT_FALSE(list_.find_amax({}, all, nullptr));
  EXPECT_TRUE(says("set float8_quantizer_desc.over_ranks")) << float8_last_error();
  all[1].tensor = {x_[1].get(), 7};
  EXPECT_FALSE(list_.run({.workspace = {workspace_.get()}}, all, nullptr));
  EXPECT_TRUE(says("float8_quantize_list_args.tensors[1]: float8_quantize_args.tensor.bytes is 7"))
      << float8_last_error();
  all[1].tensor = {};
  EXPECT_FALSE(list_.run({.workspace = {workspace_.get(), 5}}, all, nullptr));
  EXPECT_TRUE(says("float8_quantize_list_args.workspace.bytes is 5")) << float8_last_error();
}

// Linears that read one x, such as Q, K and V: x and all weights are cast in one list, all dy in
// another, and the linears take what these left.
class LinearsOfOneX : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr int64_t kM = 40, kK = 64;
  static constexpr int64_t kN[] = {32, 48};

  struct Cast {
    float8::Quantizer quantizer;
    Memory memory;
    float8::Tensor view;
  };

  float8::Linear linear(int64_t n) const {
    return float8::Linear::plan(
               context_,
               {.m_max = kM, .n = n, .k = kK, .recipe = recipe_, .accumulate_grad_input = true})
        .value();
  }
  // Casts tensors in one list.
  std::vector<Cast> cast(
      const std::vector<std::tuple<float8_operand, int64_t, int64_t, const void*>>& tensors) {
    std::vector<Cast> all;
    std::vector<float8::Quantizer> quantizers;
    std::vector<float8::QuantizeArgs> args;
    for (const auto& [operand, rows, cols, x] : tensors) {
      auto quantizer =
          float8::Quantizer::plan(
              context_, {.operand = operand, .rows_max = rows, .cols = cols, .recipe = recipe_})
              .value();
      Memory to = memory(quantizer.tensor_bytes());
      args.push_back({.x = {x}, .tensor = {to.get()}});
      quantizers.push_back(quantizer);
      const float8::Tensor view = quantizer.view(to.get(), rows).value();
      all.push_back({quantizer, std::move(to), view});
    }
    const auto list = float8::QuantizerList::plan(context_, quantizers).value();
    const Memory scratch = memory(list.workspace_bytes());
    std::memset(scratch.get(), 0, list.workspace_bytes());
    EXPECT_TRUE(list.run({.workspace = {scratch.get()}}, args, nullptr)) << float8_last_error();
    return all;
  }

  float8::Context context_ = emulated();
  float8::Recipe recipe_ = float8::Recipe::named(GetParam());
};

TEST_P(LinearsOfOneX, ShareCasts) {
  const Memory x = random_bf16(kM * kK, 1);
  const std::array<Memory, 2> w = {random_bf16(kN[0] * kK, 2), random_bf16(kN[1] * kK, 3)},
                              dy = {random_bf16(kM * kN[0], 4), random_bf16(kM * kN[1], 5)};
  const auto forward = cast({{FLOAT8_INPUT, kM, kK, x.get()},
                             {FLOAT8_WEIGHT, kN[0], kK, w[0].get()},
                             {FLOAT8_WEIGHT, kN[1], kK, w[1].get()}});
  const auto backward = cast(
      {{FLOAT8_GRAD_OUTPUT, kM, kN[0], dy[0].get()}, {FLOAT8_GRAD_OUTPUT, kM, kN[1], dy[1].get()}});
  const Memory dx = memory(kM * kK * 2), dx_alone = memory(kM * kK * 2);
  for (size_t i = 0; i < 2; ++i) {
    const auto n = static_cast<size_t>(kN[i]);
    const float8::Linear linear = this->linear(kN[i]);
    const Memory y = memory(kM * n * 2), y_alone = memory(kM * n * 2);
    const Memory dw = memory(n * kK * 2), dw_alone = memory(n * kK * 2);
    const Memory saved = memory(linear.saved_bytes());
    const Memory scratch = memory(linear.workspace_bytes());
    std::memset(scratch.get(), 0, linear.workspace_bytes());
    const float8::Tensor *x8 = &forward[0].view, *w8 = &forward[i + 1].view;
    EXPECT_EQ(linear.saved_bytes_with_tensors(true, true), 0U);
    const float8::Buffer workspace = {scratch.get()};
    ASSERT_TRUE(linear.forward(
        {.x = {.fp8 = x8}, .w = {.fp8 = w8}, .y = {y.get()}, .workspace = workspace}, nullptr))
        << float8_last_error();
    ASSERT_TRUE(linear.backward({.dy = {.fp8 = &backward[i].view},
                                 .x = {.fp8 = x8},
                                 .w = {.fp8 = w8},
                                 .dx = {.data = dx.get(), .accumulate = i > 0},
                                 .dw = {dw.get()},
                                 .workspace = workspace},
                                nullptr))
        << float8_last_error();
    ASSERT_TRUE(linear.forward({.x = {x.get()},
                                .w = {w[i].get()},
                                .y = {y_alone.get()},
                                .saved = {saved.get()},
                                .workspace = workspace},
                               nullptr));
    ASSERT_TRUE(linear.backward({.dy = {dy[i].get()},
                                 .dx = {.data = dx_alone.get(), .accumulate = i > 0},
                                 .dw = {dw_alone.get()},
                                 .saved = {saved.get()},
                                 .workspace = workspace},
                                nullptr));
    EXPECT_TRUE(same(y, y_alone, kM * n * 2)) << i;
    EXPECT_TRUE(same(dw, dw_alone, n * kK * 2)) << i;
  }
  EXPECT_TRUE(same(dx, dx_alone, kM * kK * 2));
}

INSTANTIATE_TEST_SUITE_P(All, LinearsOfOneX,
                         ::testing::Values("tensorwise", "rowwise", "blockwise"));

}  // namespace
