// The C interface passes on what its caller said: descriptions are compared field by field, and
// calls by their results, with the same call made inside.
#include <cstring>
#include <float8/float8.hpp>

#include "runtime/c_abi/common.hpp"
#include "runtime/c_abi/recipe.hpp"
#include "tests/unit/runtime/c_abi/small_shape.hpp"
#include "tests/unit/runtime/count_allocations.hpp"
#include "tests/unit/runtime/fake_cublaslt.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;
using testing::FakeCublasLt;
using testing::FakeCuda;
using testing::Fixture;

::testing::AssertionResult ok(float8_status status) {
  if (status == FLOAT8_OK) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << float8_last_error();
}

::testing::AssertionResult refused(float8_status status, std::string_view words) {
  if (status == FLOAT8_OK) return ::testing::AssertionFailure() << "was not refused: " << words;
  if (std::string_view(float8_last_error()).find(words) == std::string_view::npos) {
    return ::testing::AssertionFailure() << float8_last_error() << "\n  does not say: " << words;
  }
  return ::testing::AssertionSuccess();
}

template <class Args>
Args sized() {
  Args args{};
  args.struct_size = sizeof args;
  return args;
}

float8_linear_desc described() {
  auto desc = sized<float8_linear_desc>();
  desc.m_max = kShape.m;
  desc.n = kShape.n;
  desc.k = kShape.k;
  desc.recipe = "tensorwise";
  return desc;
}

class CAbiLinear : public ::testing::Test {
 protected:
  [[nodiscard]] Result<LinearDesc> planned(const float8_linear_desc& desc) {
    float8_linear* linear = nullptr;
    if (float8_linear_plan(&context_, &desc, &linear) != FLOAT8_OK) {
      return fail(ErrorCode::kInternal, "{}", float8_last_error());
    }
    LinearDesc got = linear->linear->desc();
    float8_linear_destroy(linear);
    return got;
  }

  FakeCuda cuda_;
  FakeCublasLt library_;
  float8_context context_{cuda_.context()};
};

TEST_F(CAbiLinear, NamedRecipes) {
  for (const Recipe& recipe : builtin_recipes()) {
    float8_linear_desc desc = described();
    desc.recipe = recipe.name.c_str();
    EXPECT_EQ(planned(desc).value().recipe, recipe) << recipe.name;
  }
  float8_linear_desc desc = described();
  desc.recipe = "bf16";
  EXPECT_EQ(planned(desc).value().recipe, bf16_recipe());
}

TEST_F(CAbiLinear, RecipesThereAndBack) {
  std::vector<Recipe> all(builtin_recipes().begin(), builtin_recipes().end());
  all.push_back(bf16_recipe());
  for (const Recipe& recipe : all) {
    auto settings = sized<float8_recipe>();
    ASSERT_TRUE(ok(float8_recipe_named(recipe.name.c_str(), &settings)));
    EXPECT_EQ(c_abi::custom_recipe(&settings).value(), recipe);
    float8_linear_desc desc = described();
    desc.recipe = nullptr;
    desc.custom_recipe = &settings;
    EXPECT_EQ(planned(desc).value().recipe, recipe) << recipe.name;
  }
}

TEST_F(CAbiLinear, ARecipeOfTheCallers) {
  auto recipe = sized<float8_recipe>();
  recipe.output.a = {FLOAT8_DELAYED, FLOAT8_TENSOR, FLOAT8_E4M3, 1};
  recipe.output.fast = 1;
  recipe.grad_input.a = {FLOAT8_DYNAMIC, FLOAT8_AXIS, FLOAT8_E5M2, 0};
  recipe.grad_weight.a.scaling = FLOAT8_HIGH_PRECISION;
  recipe.grad_weight.b.scaling = FLOAT8_HIGH_PRECISION;
  float8_linear_desc desc = described();
  desc.recipe = nullptr;
  desc.custom_recipe = &recipe;
  const Recipe got = planned(desc).value().recipe;
  EXPECT_EQ(got.name, "custom");
  const CastSetting plain;
  EXPECT_EQ(got.at(Gemm::kOutput),
            (GemmSetting{.a = {Scaling::kDelayed, Granularity::kTensor, Dtype::kE4m3, true},
                         .b = plain,
                         .fast = true}));
  EXPECT_EQ(got.at(Gemm::kGradInput),
            (GemmSetting{.a = {Scaling::kDynamic, Granularity::kAxis, Dtype::kE5m2, false},
                         .b = plain,
                         .fast = false}));
  EXPECT_EQ(got.at(Gemm::kGradWeight), bf16_recipe().at(Gemm::kGradWeight));
}

TEST_F(CAbiLinear, EveryFieldOfADescription) {
  float8_linear_desc desc = described();
  LinearDesc got = planned(desc).value();
  EXPECT_FALSE(got.bias);
  EXPECT_FALSE(got.accumulate_grad_weight);
  EXPECT_TRUE(got.needs_grad_input);
  EXPECT_TRUE(got.needs_grad_weight);
  EXPECT_EQ(got.grad_weight_dtype, Dtype::kBf16);
  EXPECT_EQ(got.tensor_dtype, Dtype::kBf16);
  desc.bias = 1;
  desc.accumulate_grad_weight = 1;
  desc.no_grad_input = 1;
  desc.no_grad_weight = 1;
  desc.grad_weight_dtype = FLOAT8_F32;
  desc.tensor_dtype = FLOAT8_F16;
  EXPECT_FALSE(got.recompute);
  EXPECT_FALSE(got.bias_grad);
  EXPECT_EQ(got.bias_grad_dtype, Dtype::kBf16);
  EXPECT_EQ(got.non_finite, NonFinite::kPropagate);
  EXPECT_FALSE(got.count);
  desc.recompute = 1;
  desc.bias_grad = 1;
  desc.bias_grad_dtype = FLOAT8_F32;
  desc.non_finite = FLOAT8_SATURATE;
  desc.count = 1;
  got = planned(desc).value();
  EXPECT_EQ(got.shape, kShape);
  EXPECT_TRUE(got.bias);
  EXPECT_TRUE(got.accumulate_grad_weight);
  EXPECT_FALSE(got.needs_grad_input);
  EXPECT_FALSE(got.needs_grad_weight);
  EXPECT_EQ(got.grad_weight_dtype, Dtype::kF32);
  EXPECT_EQ(got.tensor_dtype, Dtype::kF16);
  EXPECT_TRUE(got.recompute);
  EXPECT_TRUE(got.bias_grad);
  EXPECT_EQ(got.bias_grad_dtype, Dtype::kF32);
  EXPECT_EQ(got.non_finite, NonFinite::kSaturate);
  EXPECT_TRUE(got.count);
}

TEST_F(CAbiLinear, BadRecipes) {
  float8_linear* linear = nullptr;
  auto recipe = sized<float8_recipe>();
  float8_linear_desc desc = described();
  const auto expect_refused = [&](std::string_view words) {
    EXPECT_TRUE(refused(float8_linear_plan(&context_, &desc, &linear), words));
    EXPECT_EQ(linear, nullptr);
  };
  desc.custom_recipe = &recipe;
  expect_refused("two recipes");
  desc.recipe = nullptr;
  desc.custom_recipe = nullptr;
  expect_refused("set one of recipe and custom_recipe");
  desc.custom_recipe = &recipe;
  const auto with = [&](auto change, std::string_view words) {
    recipe = sized<float8_recipe>();
    change(recipe);
    expect_refused(words);
  };
  with([](auto& r) { r.struct_size = 0; }, "float8_recipe: struct_size is 0");
  with([](auto& r) { r.reserved = 7; }, "float8_recipe.reserved is 7");
  with([](auto& r) { r.name = "My Recipe"; }, "My Recipe");
  with([](auto& r) { r.output.a.scaling = 3; }, "float8_recipe.output.a.scaling is 3; 0 to 2");
  with([](auto& r) { r.grad_input.b.granularity = -1; }, "grad_input.b.granularity is -1");
  with([](auto& r) { r.grad_weight.a.format = 9; }, "grad_weight.a.format is 9");
  with([](auto& r) { r.output.a.scaling = FLOAT8_HIGH_PRECISION; },
       "recipe custom, GEMM output: operand b is fp8");
  with([](auto& r) { r.output.b.granularity = FLOAT8_BLOCK_128X128; }, "blocks go with blocks");
  with(
      [](auto& r) {
        r.output.a.scaling = FLOAT8_DELAYED;
        r.output.a.granularity = FLOAT8_AXIS;
      },
      "delayed scaling");
  auto settings = sized<float8_recipe>();
  EXPECT_TRUE(refused(float8_recipe_named("fast", &settings), "rowwise"));
  EXPECT_TRUE(refused(float8_recipe_named(nullptr, &settings), "name is NULL"));
  EXPECT_TRUE(refused(float8_recipe_named("rowwise", nullptr), "NULL"));
}

// Every field of the args, in calls that use it.
class CAbiCalls : public CAbiLinear, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Recipes, CAbiCalls,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed",
                                           "blockwise", "bf16"),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(CAbiCalls, GiveTheBitsOfTheRuntimes) {
  LinearDesc desc;
  desc.shape = kShape;
  desc.recipe = c_abi::named_recipe(GetParam()).value();
  desc.bias = true;
  desc.accumulate_grad_weight = true;
  desc.grad_weight_dtype = Dtype::kF32;
  desc.bias_grad = true;
  desc.count = true;
  Fixture s(cuda_, desc, 24, 1, 16);
  const float8_linear handle{s.linear};
  EXPECT_EQ(float8_linear_workspace_bytes(&handle), s.linear->workspace_bytes());
  EXPECT_EQ(float8_linear_forward_workspace_bytes(&handle, 0, 1),
            s.linear->forward_workspace_bytes(false, true));
  EXPECT_EQ(float8_linear_backward_workspace_bytes(&handle, 1, 0, 0),
            s.linear->backward_workspace_bytes(true, false, false));
  EXPECT_EQ(float8_linear_saved_bytes(&handle), s.linear->saved_bytes());
  EXPECT_EQ(float8_linear_saved_bytes_with_tensors(&handle, 0, 1), s.linear->saved_bytes(true));
  std::optional<testing::Fp8Weight> weight;
  if (casts_weight(desc)) weight.emplace(s);

  Buffer db(static_cast<size_t>(kShape.n) * 2);
  std::vector<CastCounters> counters(kCountersOfLinear);
  const auto clear = [&] {
    EXPECT_EQ(float8_counters_clear(&context_, counters.data(), counters.size(), nullptr),
              FLOAT8_OK);
    std::memset(db.data(), 0, db.bytes());
  };
  for (const bool in_fp8 : {false, true}) {
    for (const bool first_step : {true, false}) {
      SCOPED_TRACE(::testing::Message() << in_fp8 << first_step);
      s.first_step = first_step;
      ForwardCall forward = s.forward();
      BackwardCall backward = s.backward();
      backward.dw.accumulate = true;
      forward.counters = backward.counters = counters.data();
      backward.db.data = db.data();
      backward.db.accumulate = true;
      clear();
      std::memset(s.dw.data(), 0, s.dw.bytes());
      if (in_fp8 && weight) {
        ASSERT_TRUE(weight->run());
        forward.w.fp8 = backward.w.fp8 = &weight->view;
      }
      ASSERT_TRUE(s.linear->forward(forward, nullptr));
      ASSERT_TRUE(s.linear->backward(backward, nullptr));
      const auto y = bytes(s.y);
      const auto dx = bytes(s.dx);
      const auto dw = bytes(s.dw);
      const auto sums = bytes(db);
      const auto counted = format_counters("l", counters);
      clear();
      for (Buffer* buffer : {&s.y, &s.dx, &s.saved}) {
        std::memset(buffer->data(), testing::kPoison, buffer->bytes());
      }
      std::memset(s.dw.data(), 0, s.dw.bytes());

      forward.workspace.bytes = backward.workspace.bytes = s.workspace.bytes();
      forward.saved.bytes = backward.saved.bytes = s.saved.bytes();
      ASSERT_TRUE(ok(float8_linear_forward(&handle, given(forward, s.workspace.data()), nullptr)));
      ASSERT_TRUE(
          ok(float8_linear_backward(&handle, given(backward, s.workspace.data()), nullptr)));
      EXPECT_EQ(bytes(s.y), y);
      EXPECT_EQ(bytes(s.dx), dx);
      EXPECT_EQ(bytes(s.dw), dw);
      EXPECT_EQ(bytes(db), sums);
      std::vector<float8_cast_counters> snapshot(counters.size());
      ASSERT_TRUE(ok(float8_counters_snapshot(&context_, counters.data(), counters.size(),
                                              snapshot.data(), nullptr)));
      std::string text(2000, '#');
      size_t text_bytes = 0;
      ASSERT_TRUE(
          ok(float8_counters_text("l", snapshot.data(), text.data(), text.size(), &text_bytes)));
      EXPECT_EQ(text.substr(0, text_bytes - 1), counted);
      EXPECT_EQ(counted.empty(), std::string_view(GetParam()) == "bf16");
      EXPECT_TRUE(s.guards_are_whole());
      EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
    }
  }
}

TEST_P(CAbiCalls, RefuseASizeThatIsOneByteShort) {
  LinearDesc desc;
  desc.shape = kShape;
  desc.recipe = c_abi::named_recipe(GetParam()).value();
  Fixture s(cuda_, desc, 24);
  const float8_linear handle{s.linear};
  std::optional<testing::Fp8Weight> weight;
  if (casts_weight(desc)) {
    ASSERT_TRUE(weight.emplace(s).run());
  }
  for (const bool in_fp8 : {false, true}) {
    ForwardCall forward = s.forward();
    BackwardCall backward = s.backward();
    if (in_fp8 && weight) forward.w.fp8 = backward.w.fp8 = &weight->view;
    const auto expect_refused = [&](const std::string& field) {
      EXPECT_TRUE(
          refused(float8_linear_forward(&handle, given(forward, s.workspace.data()), nullptr),
                  "float8_forward_args." + field));
      EXPECT_TRUE(
          refused(float8_linear_backward(&handle, given(backward, s.workspace.data()), nullptr),
                  "float8_backward_args." + field));
    };
    const size_t of_forward = s.linear->workspace_bytes(forward);
    const size_t of_backward = s.linear->workspace_bytes(backward);
    if (!in_fp8) {
      EXPECT_EQ(s.linear->workspace_bytes(), std::max(of_forward, of_backward));
    }
    if (of_forward > 1 && of_backward > 1) {
      forward.workspace.bytes = of_forward - 1;
      backward.workspace.bytes = of_backward - 1;
      expect_refused("workspace.bytes is");
    }
    forward.workspace.bytes = of_forward;
    backward.workspace.bytes = of_backward;
    if (const size_t saved = s.linear->saved_bytes(in_fp8 && weight); saved > 1) {
      forward.saved.bytes = backward.saved.bytes = saved - 1;
      expect_refused("saved.bytes is");
    }
  }
}

TEST_F(CAbiLinear, RunDoesNotAllocate) {
  Fixture s(cuda_, testing::describe("delayed", kShape), kShape.m);
  const float8_linear handle{s.linear};
  cuda_.emulate = false;
  auto f = sized<float8_forward_args>();
  f.x.data = s.x.data();
  f.w.data = s.w.data();
  f.y.data = s.y.data();
  f.saved.data = s.saved.data();
  f.m = kShape.m;
  f.scales = s.slots;
  auto b = sized<float8_backward_args>();
  b.dy.data = s.dy.data();
  b.saved.data = s.saved.data();
  b.dx.data = s.dx.data();
  b.dw.data = s.dw.data();
  b.m = kShape.m;
  b.scales = s.slots;
  ASSERT_TRUE(ok(float8_linear_forward(&handle, given(f, s.workspace.data()), nullptr)));
  cuda_.launches.reserve(100);
  const testing::CountAllocations counting;
  const float8_status forward =
      float8_linear_forward(&handle, given(f, s.workspace.data()), nullptr);
  const float8_status backward =
      float8_linear_backward(&handle, given(b, s.workspace.data()), nullptr);
  const int allocations = counting.count();
  EXPECT_TRUE(ok(forward));
  EXPECT_TRUE(ok(backward));
  EXPECT_EQ(allocations, 0);
}

TEST_F(CAbiLinear, CountersRefuseNonsense) {
  float8_cast_counters counters[FLOAT8_LINEAR_COUNTERS];
  auto* crooked = reinterpret_cast<float8_cast_counters*>(reinterpret_cast<char*>(counters) + 4);
  EXPECT_TRUE(refused(float8_counters_clear(nullptr, counters, 6, nullptr), "context is NULL"));
  EXPECT_TRUE(refused(float8_counters_clear(&context_, nullptr, 6, nullptr), "counters is NULL"));
  EXPECT_TRUE(refused(float8_counters_clear(&context_, crooked, 6, nullptr), "aligned"));
  EXPECT_TRUE(
      refused(float8_counters_snapshot(&context_, counters, 6, nullptr, nullptr), "to is NULL"));
  EXPECT_TRUE(
      refused(float8_counters_text(nullptr, counters, nullptr, 0, nullptr), "name is NULL"));
  EXPECT_TRUE(refused(float8_counters_text("x", nullptr, nullptr, 0, nullptr), "counters is NULL"));
  EXPECT_TRUE(ok(float8_counters_clear(&context_, nullptr, 0, nullptr)));
}

}  // namespace
}  // namespace f8::runtime
