// Lists of quantizers and groups of linears through the public header, on an emulated device.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "tests/unit/runtime/c_abi/emulated_memory.hpp"

namespace {

using float8::testing::emulated;
using float8::testing::Memory;
using float8::testing::memory;
using float8::testing::random_bf16;

bool says(std::string_view words) {
  return std::string_view(float8_last_error()).find(words) != std::string_view::npos;
}

bool same(const Memory& a, const Memory& b, size_t bytes) {
  return std::memcmp(a.get(), b.get(), bytes) == 0;
}

class QuantizerListAbi : public ::testing::Test {
 protected:
  float8::Quantizer plan(float8_operand operand, int64_t rows, int64_t cols) const {
    return float8::Quantizer::plan(context_, {.operand = operand,
                                              .rows_max = rows,
                                              .cols = cols,
                                              .recipe = float8::Recipe::rowwise()})
        .value();
  }

  static constexpr int64_t kRows[] = {48, 32, 21};
  static constexpr int64_t kCols[] = {32, 64, 16};

  float8::Context context_ = emulated();
  std::vector<float8::Quantizer> quantizers_ = {
      plan(FLOAT8_INPUT, 48, 32), plan(FLOAT8_WEIGHT, 32, 64), plan(FLOAT8_GRAD_OUTPUT, 90, 16)};
  float8::QuantizerList list_ = float8::QuantizerList::plan(context_, quantizers_).value();
  std::array<Memory, 3> x_ = {random_bf16(48 * 32, 1), random_bf16(32 * 64, 2),
                              random_bf16(21 * 16, 3)};
  Memory workspace_ = memory(list_.workspace_bytes());
};

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
  EXPECT_TRUE(says("3 quantizers were planned, 0 args are given")) << float8_last_error();
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

class LinearGroupAbi : public ::testing::Test {
 protected:
  static constexpr int64_t kM = 40, kK = 64;
  static constexpr int64_t kN[] = {32, 48};

  float8::Linear linear(int64_t n) const {
    return float8::Linear::plan(context_, {.m_max = kM,
                                           .n = n,
                                           .k = kK,
                                           .recipe = float8::Recipe::rowwise(),
                                           .accumulate_grad_input = true})
        .value();
  }
  [[nodiscard]] float8::LinearGroupArgs args() const {
    return {.x = {x_.get()},
            .dx = {dx_.get()},
            .saved = {saved_.get()},
            .workspace = {workspace_.get()}};
  }
  [[nodiscard]] std::vector<float8::GroupedLinearArgs> each() const {
    std::vector<float8::GroupedLinearArgs> out;
    for (size_t i = 0; i < 2; ++i) {
      out.push_back(
          {.w = {w_[i].get()}, .y = {y_[i].get()}, .dy = {dy_[i].get()}, .dw = {dw_[i].get()}});
    }
    return out;
  }

  float8::Context context_ = emulated();
  std::vector<float8::Linear> linears_ = {linear(kN[0]), linear(kN[1])};
  float8::LinearGroup group_ = float8::LinearGroup::plan(context_, linears_).value();
  Memory x_ = random_bf16(kM * kK, 1), dx_ = memory(kM * kK * 2),
         saved_ = memory(group_.saved_bytes()), workspace_ = memory(group_.workspace_bytes());
  std::array<Memory, 2> w_ = {random_bf16(kN[0] * kK, 2), random_bf16(kN[1] * kK, 3)},
                        dy_ = {random_bf16(kM * kN[0], 4), random_bf16(kM*kN[1], 5)},
                        y_ = {memory(kM * kN[0] * 2), memory(kM*kN[1] * 2)},
                        dw_ = {memory(kN[0] * kK * 2), memory(kN[1] * kK * 2)};
};

TEST_F(LinearGroupAbi, ComputesWhatItsLinearsDo) {
  std::memset(workspace_.get(), 0, group_.workspace_bytes());
  ASSERT_TRUE(group_.forward(args(), each(), nullptr)) << float8_last_error();
  ASSERT_TRUE(group_.backward(args(), each(), nullptr)) << float8_last_error();
  const Memory dx = memory(kM * kK * 2);
  for (size_t i = 0; i < 2; ++i) {
    const auto n = static_cast<size_t>(kN[i]);
    const Memory y = memory(kM * n * 2), dw = memory(n * kK * 2);
    const Memory saved = memory(linears_[i].saved_bytes());
    const Memory scratch = memory(linears_[i].workspace_bytes());
    std::memset(scratch.get(), 0, linears_[i].workspace_bytes());
    ASSERT_TRUE(linears_[i].forward({.x = {x_.get()},
                                     .w = {w_[i].get()},
                                     .y = {y.get()},
                                     .saved = {saved.get()},
                                     .workspace = {scratch.get()}},
                                    nullptr));
    ASSERT_TRUE(linears_[i].backward({.dy = {dy_[i].get()},
                                      .dx = {.data = dx.get(), .accumulate = i > 0},
                                      .dw = {dw.get()},
                                      .saved = {saved.get()},
                                      .workspace = {scratch.get()}},
                                     nullptr));
    EXPECT_TRUE(same(y, y_[i], kM * n * 2)) << i;
    EXPECT_TRUE(same(dw, dw_[i], n * kK * 2)) << i;
  }
  EXPECT_TRUE(same(dx, dx_, kM * kK * 2));
}

// The text shows the launches of the group beside those of its linears.
TEST_F(LinearGroupAbi, SaysHowManyKernelsItLaunches) {
  const std::string text = group_.info().value();
  EXPECT_NE(text.find("group of 2 linears, m up to 40, k 64, recipe rowwise: n 32, 48"),
            std::string::npos)
      << text;
  for (const auto& [name, of_group, alone] :
       {std::tuple{"forward  ", 3, 4}, {"forward with weights in fp8", 3, 4}, {"backward", 4, 5}}) {
    const size_t at = text.find(std::string("\n  ") + name);
    ASSERT_NE(at, std::string::npos) << text;
    int counts[2] = {};
    ASSERT_EQ(std::sscanf(text.c_str() + at + 45, "%d %d", &counts[0], &counts[1]), 2) << text;
    EXPECT_EQ(counts[0], of_group) << text;
    EXPECT_EQ(counts[1], alone) << text;
  }
  EXPECT_LT(group_.saved_bytes(true), group_.saved_bytes());
  EXPECT_LT(group_.saved_bytes(), linears_[0].saved_bytes() + linears_[1].saved_bytes());
}

TEST_F(LinearGroupAbi, RefusesWhatItCannotDo) {
  float8_linear_group* out = nullptr;
  const float8_linear* some[] = {linears_[0].get(), nullptr};
  EXPECT_EQ(float8_linear_group_plan(context_.get(), some, 2, &out), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("linears[1] is NULL")) << float8_last_error();
  EXPECT_EQ(float8_linear_group_plan(context_.get(), nullptr, 2, &out), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(out, nullptr);
  EXPECT_EQ(float8_linear_group_workspace_bytes(nullptr), 0U);
  EXPECT_EQ(float8_linear_group_saved_bytes(nullptr, 0), 0U);
  float8_linear_group_destroy(nullptr);
  EXPECT_EQ(float8_linear_group_info(nullptr, nullptr, 0, nullptr), FLOAT8_INVALID_ARGUMENT);

  const auto refused = [&](auto change, std::string_view words) {
    float8::LinearGroupArgs group = args();
    std::vector<float8::GroupedLinearArgs> linears = each();
    group.m = kM;
    group.linears = linears.data();
    group.count = linears.size();
    change(group, linears);
    EXPECT_NE(float8_linear_group_forward(group_.get(), given(group, workspace_.get()), nullptr),
              FLOAT8_OK);
    EXPECT_TRUE(says(words)) << float8_last_error();
    EXPECT_NE(float8_linear_group_backward(group_.get(), given(group, workspace_.get()), nullptr),
              FLOAT8_OK);
    EXPECT_TRUE(says(words)) << float8_last_error();
  };
  refused([](auto& g, auto&) { g.count = 1; }, "count is 1, the group has 2 linears");
  refused([](auto& g, auto&) { g.linears = nullptr; }, "linears is NULL");
  refused([](auto& g, auto&) { g.dx.reserved = 1; }, "float8_linear_group_args.dx.reserved is 1");
  const float8_tensor in_fp8{};
  refused([&](auto& g, auto&) { g.x.fp8 = &in_fp8; }, "float8_linear_group_args.x.fp8 is given");
  refused([&](auto&, auto& l) { l[0].dy.fp8 = &in_fp8; },
          "linears[0]: float8_grouped_linear_args.dy.fp8 is given");
  refused([](auto&, auto& l) { l[1].y.accumulate = 1; },
          "linears[1]: float8_grouped_linear_args.y.accumulate is set");
  refused([](auto& g, auto&) { g.struct_size = 12; },
          "float8_linear_group_args: struct_size is 12");
  refused([](auto& g, auto&) { g.workspace.bytes = 1; },
          "float8_linear_group_args.workspace.bytes is 1");
  refused([](auto& g, auto&) { g.saved.bytes = 1; }, "float8_linear_group_args.saved.bytes is 1");
  refused([](auto&, auto& l) { l[1].struct_size -= 8; },
          "float8_linear_group_args.linears[1]: float8_grouped_linear_args: struct_size");
  refused([](auto& g, auto&) { g.m = kM + 1; }, "float8_linear_group_args.m is 41");
  float8_linear_group_args plain{};
  EXPECT_EQ(float8_linear_group_forward(nullptr, &plain, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_linear_group_forward(group_.get(), nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
}

// An emulated device remembers the forward of a saved buffer.
TEST_F(LinearGroupAbi, ABackwardFitsItsForward) {
  std::memset(workspace_.get(), 0, group_.workspace_bytes());
  float8::LinearGroupArgs forward = args();
  forward.m = 24;
  ASSERT_TRUE(group_.forward(forward, each(), nullptr)) << float8_last_error();
  EXPECT_FALSE(group_.backward(args(), each(), nullptr));
  EXPECT_TRUE(
      says("float8_linear_group_args.m is 40, the forward that filled `saved` had an m of "
           "24"))
      << float8_last_error();
  EXPECT_TRUE(group_.backward(forward, each(), nullptr)) << float8_last_error();
}

}  // namespace
