// The casts of experts' weights apart from their calls, through the public header on an emulated device: an
// expert linear has the same bits with them, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "tests/unit/runtime/c_abi/emulated_memory.hpp"

namespace expert_quantizer_test {
namespace {

using float8::testing::emulated;
using float8::testing::Memory;
using float8::testing::memory;
using float8::testing::random_bf16;
using float8::testing::says;

constexpr int64_t kM = 70, kN = 48, kK = 80;
constexpr int32_t kExperts = 3;

class ExpertQuantizerAbi : public ::testing::TestWithParam<const char*> {
 protected:
  static float8_expert_quantizer_desc desc(const char* recipe) {
    float8_expert_quantizer_desc out{};
    out.struct_size = sizeof out;
    out.n = kN;
    out.k = kK;
    out.experts = kExperts;
    out.recipe = recipe;
    return out;
  }
  static float8_layout layout_of(const float8_expert_quantizer_desc& of) {
    float8_layout out{};
    out.struct_size = sizeof out;
    EXPECT_EQ(float8_expert_quantizer_layout(&of, &out), FLOAT8_OK) << float8_last_error();
    return out;
  }
  float8_expert_quantizer* plan(const float8_expert_quantizer_desc& of) {
    float8_expert_quantizer* out = nullptr;
    status_ = float8_expert_quantizer_plan(context_.get(), &of, &out);
    return out;
  }

  float8::Context context_ = emulated();
  float8_status status_ = FLOAT8_OK;
};

float8_experts_desc experts_desc(const char* recipe) {
  float8_experts_desc out{};
  out.struct_size = sizeof out;
  out.m_max = kM;
  out.n = kN;
  out.k = kK;
  out.experts = kExperts;
  out.recipe = recipe;
  return out;
}

// The copies of a weight, and their view.
struct Copies {
  float8_layout at;
  Memory tensor, transposed;
  float8_tensor view = {};

  explicit Copies(const float8_layout& layout)
      : at(layout),
        tensor(memory(layout.tensor_bytes - layout.transposed_bytes)),
        transposed(memory(layout.transposed_bytes)) {}

  void set_view(const float8_cast_setting& q, const float8_cast_setting& qt) {
    const auto scales = [](const Memory& of, size_t offset) {
      return reinterpret_cast<const float*>(static_cast<const uint8_t*>(of.get()) + offset);
    };
    view.rows = kExperts * kN;
    view.cols = kK;
    view.q = tensor.get();
    view.qt = transposed.get();
    view.q_inverse_scale = scales(at.q_scale_apart != 0 ? transposed : tensor, at.q_inverse_scale);
    view.qt_inverse_scale = scales(transposed, at.qt_inverse_scale);
    view.ld_q = at.ld_q;
    view.ld_qt = at.ld_qt;
    view.q_setting = q;
    view.qt_setting = qt;
  }
};

// The settings of the weight in a named recipe, which those of a linear's cast are.
float8_tensor linear_view(const float8::Context& context, const char* recipe) {
  float8_quantizer_desc desc{};
  desc.struct_size = sizeof desc;
  desc.rows_max = kN;
  desc.cols = kK;
  desc.operand = FLOAT8_WEIGHT;
  desc.recipe = recipe;
  float8_quantizer* quantizer = nullptr;
  EXPECT_EQ(float8_quantizer_plan(context.get(), &desc, &quantizer), FLOAT8_OK);
  const Memory any = memory(float8_quantizer_tensor_bytes(quantizer));
  float8_tensor view;
  EXPECT_EQ(float8_quantizer_view(quantizer, any.get(), nullptr, kN, &view), FLOAT8_OK);
  float8_quantizer_destroy(quantizer);
  return view;
}

TEST_P(ExpertQuantizerAbi, CallsHaveTheBitsOfTheirOwnCasts) {
  float8_experts_desc of_experts = experts_desc(GetParam());
  of_experts.recompute_weight = 1;
  float8_experts* experts = nullptr;
  ASSERT_EQ(float8_experts_plan(context_.get(), &of_experts, &experts), FLOAT8_OK);
  const float8_group_layout_desc of_layout{
      .struct_size = sizeof of_layout, .m_max = kM, .experts = kExperts, .reserved = 0};
  float8_group_layout_plan* layouts = nullptr;
  ASSERT_EQ(float8_group_layout_plan_create(context_.get(), &of_layout, &layouts), FLOAT8_OK);
  const Memory layout = memory(float8_group_layout_bytes(layouts));
  const std::vector<int32_t> offsets = {40, 40, 65};
  const float8_group_layout_args routing{
      .offsets = offsets.data(), .m = kM, .layout = {layout.get()}};
  ASSERT_EQ(float8_group_layout(layouts, &routing, nullptr), FLOAT8_OK);

  const Memory x = random_bf16(kM * kK, 1), w = random_bf16(kExperts * kN * kK, 2);
  const Memory dy = random_bf16(kM * kN, 3);
  float8_expert_quantizer* const quantizer = plan(desc(GetParam()));
  ASSERT_NE(quantizer, nullptr) << float8_last_error();
  Copies copies(layout_of(desc(GetParam())));
  const Memory scratch = memory(float8_expert_quantizer_workspace_bytes(quantizer));
  const float8_expert_quantize_args cast{.w = {w.get()},
                                         .tensor = {copies.tensor.get()},
                                         .transposed = {copies.transposed.get()},
                                         .workspace = {scratch.get()}};
  ASSERT_EQ(float8_expert_quantize(quantizer, &cast, nullptr), FLOAT8_OK) << float8_last_error();
  const float8_tensor settings = linear_view(context_, GetParam());
  copies.set_view(settings.q_setting, settings.qt_setting);

  const Memory workspace = memory(float8_experts_workspace_bytes(experts));
  std::vector<std::string> results;
  for (const bool given : {false, true}) {
    const Memory saved = memory(float8_experts_saved_bytes(experts));
    const Memory y = memory(kM * kN * 2), dx = memory(kM * kK * 2);
    float8_experts_forward_args forward{.m = kM,
                                        .x = {x.get()},
                                        .w = {w.get()},
                                        .y = {y.get()},
                                        .layout = {layout.get()},
                                        .saved = {saved.get()},
                                        .workspace = {workspace.get()}};
    float8_experts_backward_args backward{.m = kM,
                                          .dy = {dy.get()},
                                          .dx = {dx.get()},
                                          .layout = {layout.get()},
                                          .saved = {saved.get()},
                                          .workspace = {workspace.get()},
                                          .w = {w.get()}};
    if (given) forward.w = backward.w = {nullptr, 0, &copies.view};
    ASSERT_EQ(float8_experts_forward(experts, &forward, nullptr), FLOAT8_OK) << float8_last_error();
    ASSERT_EQ(float8_experts_backward(experts, &backward, nullptr), FLOAT8_OK)
        << float8_last_error();
    results.emplace_back(static_cast<const char*>(y.get()), kM * kN * 2);
    results.back().append(static_cast<const char*>(dx.get()), kM * kK * 2);
  }
  EXPECT_EQ(results[0], results[1]);
  float8_expert_quantizer_destroy(quantizer);
  float8_experts_destroy(experts);
  float8_group_layout_plan_destroy(layouts);
}

// Two ranks have half of each expert's rows.
TEST_P(ExpertQuantizerAbi, RanksHavePartsOfEachExpert) {
  constexpr int64_t kHalf = kN / 2;
  if (std::string_view(GetParam()) == "blockwise") GTEST_SKIP() << "the halves cut blocks";
  const Memory w = random_bf16(kExperts * kN * kK, 2);
  float8_expert_quantizer* const whole = plan(desc(GetParam()));
  const Copies copies(layout_of(desc(GetParam())));
  const Memory scratch = memory(float8_expert_quantizer_workspace_bytes(whole));
  const float8_expert_quantize_args cast{.w = {w.get()},
                                         .tensor = {copies.tensor.get()},
                                         .transposed = {copies.transposed.get()},
                                         .workspace = {scratch.get()}};
  ASSERT_EQ(float8_expert_quantize(whole, &cast, nullptr), FLOAT8_OK);

  float8_expert_quantizer_desc of_half = desc(GetParam());
  of_half.n = kHalf;
  of_half.over_ranks = 1;
  float8_expert_quantizer* const quantizer = plan(of_half);
  ASSERT_NE(quantizer, nullptr) << float8_last_error();
  const float8_layout at = layout_of(of_half);
  const Memory halves[2] = {memory(kExperts * kHalf * kK * 2), memory(kExperts * kHalf * kK * 2)};
  const Memory words[2] = {memory(4 * at.amax_words), memory(4 * at.amax_words)};
  const Memory rows[2] = {memory(4 * at.row_amax_words), memory(4 * at.row_amax_words)};
  const auto* const from = static_cast<const uint16_t*>(w.get());
  for (const int rank : {0, 1}) {
    auto* const to = static_cast<uint16_t*>(halves[rank].get());
    for (int64_t e = 0; e < kExperts; ++e) {
      std::copy_n(from + (e * kN + rank * kHalf) * kK, kHalf * kK, to + e * kHalf * kK);
    }
    const float8_expert_quantize_args find{.w = {to},
                                           .amax = static_cast<uint32_t*>(words[rank].get()),
                                           .row_amax = static_cast<uint32_t*>(rows[rank].get())};
    ASSERT_EQ(float8_expert_quantize_amax(quantizer, &find, nullptr), FLOAT8_OK)
        << float8_last_error();
  }
  for (size_t i = 0; i < at.amax_words; ++i) {
    auto& one = static_cast<uint32_t*>(words[0].get())[i];
    one = std::max(one, static_cast<const uint32_t*>(words[1].get())[i]);
  }
  for (const int rank : {0, 1}) {
    const Copies own(at);
    const float8_expert_quantize_args part{.w = {halves[rank].get()},
                                           .tensor = {own.tensor.get()},
                                           .transposed = {own.transposed.get()},
                                           .amax = static_cast<uint32_t*>(words[0].get()),
                                           .row_amax = static_cast<uint32_t*>(rows[rank].get())};
    ASSERT_EQ(float8_expert_quantize(quantizer, &part, nullptr), FLOAT8_OK) << float8_last_error();
    const auto* const q = static_cast<const uint8_t*>(own.tensor.get());
    const auto* const qt = static_cast<const uint8_t*>(own.transposed.get());
    for (int64_t e = 0; e < kExperts; ++e) {
      const auto* const of_q = static_cast<const uint8_t*>(copies.tensor.get()) +
                               (e * kN + rank * kHalf) * copies.at.ld_q;
      EXPECT_TRUE(std::equal(of_q, of_q + kHalf * at.ld_q, q + e * kHalf * at.ld_q)) << e;
      for (int64_t k = e * kK; k < (e + 1) * kK; ++k) {
        const auto* const line = static_cast<const uint8_t*>(copies.transposed.get()) +
                                 k * copies.at.ld_qt + rank * kHalf;
        EXPECT_TRUE(std::equal(line, line + kHalf, qt + k * at.ld_qt)) << e << ", " << k;
      }
    }
  }
  float8_expert_quantizer_destroy(whole);
  float8_expert_quantizer_destroy(quantizer);
}

// The first half of each expert's rows in one tensor and the others in a second one, also over ranks.
TEST_P(ExpertQuantizerAbi, TwoTensorsHaveTheRowsOfEachExpert) {
  constexpr int64_t kRows = 128, kHalf = kRows / 2 * kK * 2;  // bytes of an expert's part
  const Memory w = random_bf16(kExperts * kRows * kK, 2);
  const Memory parts[2] = {memory(kExperts * kHalf), memory(kExperts * kHalf)};
  for (int64_t i = 0; i < 2 * kExperts; ++i) {
    std::copy_n(static_cast<const uint8_t*>(w.get()) + i * kHalf, kHalf,
                static_cast<uint8_t*>(parts[i % 2].get()) + i / 2 * kHalf);
  }
  std::vector<std::string> made;
  for (const auto& [two, over_ranks] : {std::pair{false, false}, {true, false}, {true, true}}) {
    float8_expert_quantizer_desc of = desc(GetParam());
    of.n = kRows;
    of.two_tensors = two ? 1 : 0;
    of.over_ranks = over_ranks ? 1 : 0;
    float8_expert_quantizer* const quantizer = plan(of);
    ASSERT_NE(quantizer, nullptr) << float8_last_error();
    const Copies copies(layout_of(of));
    const Memory scratch = memory(float8_expert_quantizer_workspace_bytes(quantizer));
    const Memory amax = memory(4 * copies.at.amax_words),
                 rows = memory(4 * copies.at.row_amax_words);
    float8_expert_quantize_args args{.w = {two ? parts[0].get() : w.get()},
                                     .tensor = {copies.tensor.get()},
                                     .transposed = {copies.transposed.get()},
                                     .workspace = {scratch.get()},
                                     .amax = static_cast<uint32_t*>(amax.get()),
                                     .row_amax = static_cast<uint32_t*>(rows.get())};
    if (two) {
      EXPECT_EQ(float8_expert_quantize(quantizer, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
      EXPECT_TRUE(says("second_w.data is NULL")) << float8_last_error();
      args.second_w = {parts[1].get()};
    }
    if (over_ranks) {
      ASSERT_EQ(float8_expert_quantize_amax(quantizer, &args, nullptr), FLOAT8_OK)
          << float8_last_error();
    }
    ASSERT_EQ(float8_expert_quantize(quantizer, &args, nullptr), FLOAT8_OK) << float8_last_error();
    made.emplace_back(static_cast<const char*>(copies.tensor.get()),
                      copies.at.tensor_bytes - copies.at.transposed_bytes);
    made.back().append(static_cast<const char*>(copies.transposed.get()),
                       copies.at.transposed_bytes);
    float8_expert_quantizer_destroy(quantizer);
  }
  EXPECT_EQ(made[0], made[1]);
  EXPECT_EQ(made[0], made[2]);
}

// A cast under a flag writes the copies once, until the flag is cleared.
TEST_P(ExpertQuantizerAbi, AFlagGuardsCasts) {
  float8_expert_quantizer_desc guarded = desc(GetParam());
  guarded.noop_flag = 1;
  float8_expert_quantizer* const quantizer = plan(guarded);
  ASSERT_NE(quantizer, nullptr) << float8_last_error();
  const Memory w = random_bf16(kExperts * kN * kK, 2), other = random_bf16(kExperts * kN * kK, 3);
  const Copies copies(layout_of(guarded));
  const Memory scratch = memory(float8_expert_quantizer_workspace_bytes(quantizer));
  uint32_t flag = 0;
  const auto cast = [&](const Memory& of) {
    const float8_expert_quantize_args args{.w = {of.get()},
                                           .tensor = {copies.tensor.get()},
                                           .transposed = {copies.transposed.get()},
                                           .workspace = {scratch.get()},
                                           .noop_flag = &flag};
    EXPECT_EQ(float8_expert_quantize(quantizer, &args, nullptr), FLOAT8_OK) << float8_last_error();
    EXPECT_EQ(flag, 1U);
    std::string made(static_cast<const char*>(copies.tensor.get()),
                     copies.at.tensor_bytes - copies.at.transposed_bytes);
    return made.append(static_cast<const char*>(copies.transposed.get()),
                       copies.at.transposed_bytes);
  };
  const std::string first = cast(w);
  EXPECT_EQ(cast(other), first);
  flag = 0;
  EXPECT_NE(cast(other), first);
  flag = 0;
  EXPECT_EQ(cast(w), first);
  float8_expert_quantizer_destroy(quantizer);
}

INSTANTIATE_TEST_SUITE_P(Recipes, ExpertQuantizerAbi,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp",
                                           "blockwise"));

using ExpertQuantizerRefusals = ExpertQuantizerAbi;

TEST_P(ExpertQuantizerRefusals, Descriptions) {
  EXPECT_EQ(plan(desc("bf16")), nullptr);
  EXPECT_EQ(status_, FLOAT8_UNSUPPORTED);
  EXPECT_TRUE(says("recipe bf16: casts of experts' weights apart have scales of a matrix"));
  float8_expert_quantizer_desc bad = desc("rowwise");
  bad.n = 24;
  EXPECT_EQ(plan(bad), nullptr);
  EXPECT_TRUE(says("desc.n is 24; it is a multiple of 16"));
  bad.over_ranks = 1;
  float8_expert_quantizer* const cut = plan(bad);
  EXPECT_NE(cut, nullptr);
  float8_expert_quantizer_destroy(cut);
  bad.recipe = "blockwise";
  EXPECT_EQ(plan(bad), nullptr);
  EXPECT_EQ(status_, FLOAT8_UNSUPPORTED);
  EXPECT_TRUE(says("which cuts blocks of 128x128"));
  bad = desc("rowwise");
  bad.experts = FLOAT8_MAX_EXPERTS + 1;
  EXPECT_EQ(plan(bad), nullptr);
  EXPECT_TRUE(says("experts is 1025; it is 1 to 1024"));
  bad = desc("rowwise");
  bad.two_tensors = 1;  // each has 24 rows of an expert
  EXPECT_EQ(plan(bad), nullptr);
  EXPECT_TRUE(says("two_tensors is set with n 48"));
  bad = desc("rowwise");
  bad.over_ranks = bad.noop_flag = 1;
  EXPECT_EQ(plan(bad), nullptr);
  EXPECT_TRUE(says("noop_flag is set; it is for casts without over_ranks"));
}

TEST_P(ExpertQuantizerRefusals, Calls) {
  float8_expert_quantizer* const quantizer = plan(desc("rowwise"));
  const Copies copies(layout_of(desc("rowwise")));
  const Memory w = random_bf16(kExperts * kN * kK, 2);
  const Memory scratch = memory(float8_expert_quantizer_workspace_bytes(quantizer));
  const float8_expert_quantize_args good{.w = {w.get()},
                                         .tensor = {copies.tensor.get()},
                                         .transposed = {copies.transposed.get()},
                                         .workspace = {scratch.get()}};
  const auto refuses = [&](const auto& change, std::string_view words) {
    float8_expert_quantize_args args = good;
    change(args);
    EXPECT_EQ(float8_expert_quantize(quantizer, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
    EXPECT_TRUE(says(words)) << float8_last_error();
  };
  refuses([](auto& a) { a.w.data = nullptr; }, "w.data is NULL");
  refuses([&](auto& a) { a.w.fp8 = &copies.view; }, "w.fp8 is given");
  refuses([](auto& a) { a.tensor.data = nullptr; }, "tensor.data is NULL");
  refuses([](auto& a) { a.transposed.bytes = 16; }, "transposed.bytes is 16");
  refuses([](auto& a) { a.workspace = {}; }, "workspace.data is NULL");
  refuses([&](auto& a) { a.tensor.data = w.get(); }, "overlap");
  uint32_t flag = 0;
  refuses([&](auto& a) { a.noop_flag = &flag; }, "set float8_expert_quantizer_desc.noop_flag");
  EXPECT_EQ(float8_expert_quantize_amax(quantizer, &good, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("is for float8_expert_quantizer_desc.over_ranks"));
  float8_expert_quantizer_destroy(quantizer);
  float8_expert_quantizer_destroy(nullptr);
  EXPECT_EQ(float8_expert_quantizer_workspace_bytes(nullptr), 0U);
}

// A weight in fp8 that an expert linear cannot read.
TEST_P(ExpertQuantizerRefusals, WeightsOfCalls) {
  const float8_experts_desc of_experts = experts_desc("rowwise");
  float8_experts* saves = nullptr;
  ASSERT_EQ(float8_experts_plan(context_.get(), &of_experts, &saves), FLOAT8_OK);
  const float8_tensor settings = linear_view(context_, "rowwise");
  Copies copies(layout_of(desc("rowwise")));
  copies.set_view(settings.q_setting, settings.qt_setting);
  const Memory x = random_bf16(kM * kK, 1), y = memory(kM * kN * 2), layout = memory(1 << 16);
  const Memory saved = memory(float8_experts_saved_bytes(saves));
  const Memory workspace = memory(float8_experts_workspace_bytes(saves));
  const auto refuses = [&](float8_tensor view, bool with_saved, std::string_view words) {
    float8_experts_forward_args args{.m = kM,
                                     .x = {x.get()},
                                     .w = {nullptr, 0, &view},
                                     .y = {y.get()},
                                     .layout = {layout.get()},
                                     .workspace = {workspace.get()}};
    if (with_saved) args.saved.data = saved.get();
    EXPECT_EQ(float8_experts_forward(saves, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
    EXPECT_TRUE(says(words)) << float8_last_error();
  };
  refuses(copies.view, true, "set recompute_weight");
  float8_tensor bad = copies.view;
  bad.rows = kN;
  refuses(bad, false, "w.fp8 has 48 rows; 3 experts have 144");
  bad = copies.view;
  bad.q = nullptr;
  refuses(bad, false, "w.fp8.q is NULL");
  bad = copies.view;
  bad.q_setting.granularity = FLOAT8_TENSOR;
  refuses(bad, false, "quantize it under the linear's recipe");
  bad = copies.view;
  bad.ld_q = kK;
  refuses(bad, false, "w.fp8.ld_q is 80");
  float8_experts_destroy(saves);
}

INSTANTIATE_TEST_SUITE_P(Once, ExpertQuantizerRefusals, ::testing::Values(""));

}  // namespace
}  // namespace expert_quantizer_test
