// The words about plans: every choice with its reason, and the launches that a call makes.
#include "runtime/model/info.hpp"

#include <float8/float8.hpp>

#include "runtime/c_abi/common.hpp"
#include "runtime/gemm/choose.hpp"
#include "runtime/gemm/cost_model.hpp"
#include "tests/unit/runtime/fake_cublaslt.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::FakeCublasLt;
using testing::FakeCuda;

constexpr Shape kLinear = {256, 48, 32};

::testing::AssertionResult says(const std::string& text, std::string_view part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << text << "\n  does not say: " << part;
}

std::string info(const std::shared_ptr<Context>& context, const LinearDesc& desc) {
  return describe(*Linear::plan(context, desc).value());
}

TEST(Info, SaysWhyEachKernelWasChosen) {
  FakeCuda cuda;
  FakeCublasLt library;
  const auto context = cuda.context();
  LinearDesc desc = testing::describe("rowwise_with_gw_hp", kLinear);
  std::string text = info(context, desc);
  EXPECT_TRUE(says(text, "recipe rowwise_with_gw_hp, tensors bf16, dw bf16"));
  EXPECT_TRUE(says(text, "output       e4m3 (a scale a row, power of two) by e4m3"));
  EXPECT_TRUE(says(text, "by the cost model: there is no tuning table"));
  EXPECT_TRUE(says(text, "grad_weight  bf16 by bf16\n"));
  EXPECT_TRUE(says(text, "cublaslt h0: there is no tuning table, and high precision is left to"));
  EXPECT_TRUE(says(describe(*context), "tuning table: none"));

  TuningTable table;
  table.devices = {{.name = "Fake H100"}};
  const GemmChoice measured = choose_gemm(nullptr,
                                          {.gemm = Gemm::kOutput,
                                           .shape = kLinear,
                                           .scale = codegen::ScaleMode::kAxis,
                                           .fast = true},
                                          132)
                                  .value();
  table.add({Problem::make(Op::kOutput, desc.recipe, kLinear).value(), measured, 1000});
  table.add({Problem::make(Op::kGradWeight, desc.recipe, {512, 48, 32}).value(),
             {Provider::kCublasLt, {}, 2},
             1000});
  context->set_table(table);
  text = info(context, desc);
  EXPECT_TRUE(
      says(text, "generated " + config_text(measured) + ": the tuning table's row of this"));
  EXPECT_TRUE(says(text, "by the cost model: the tuning table has no row of this shape"));
  EXPECT_TRUE(says(describe(*context),
                   "2 kernels and 0 linears measured on Fake H100, hash " + table.hash()));

  desc.choices[0] = measured;
  desc.choices[0]->why.clear();
  EXPECT_TRUE(says(info(context, desc), ": given by the caller"));
}

// The launches listed are those that a call makes.
TEST(Info, ListsTheLaunches) {
  FakeCuda cuda;
  const auto context = cuda.context();
  LinearDesc desc = testing::describe("tensorwise", {8192, 2048, 2048});
  std::string text = info(context, desc);
  EXPECT_TRUE(says(text, "forward              quantize x; quantize w; gemm output\n"));
  EXPECT_TRUE(says(text, "forward, w in fp8    quantize x; gemm output\n"));
  desc.shape = kLinear;
  EXPECT_TRUE(says(info(context, desc), "forward              quantize x,w; gemm output\n"));
  desc.recipe = find_recipe("delayed").value();
  desc.bias = desc.accumulate_grad_weight = true;
  desc.needs_grad_input = false;
  text = info(context, desc);
  EXPECT_TRUE(says(text, "dw bf16, with bias, may add, no dx\n"));
  EXPECT_TRUE(says(text, "e4m3 (one scale, delayed) by e4m3 (one scale, delayed), fast sums"));
  EXPECT_TRUE(says(text, "delayed scales 3"));
  EXPECT_FALSE(says(text, "grad_input"));
  desc.recompute = true;
  text = info(context, desc);
  EXPECT_TRUE(says(text, ", recompute\n"));
  EXPECT_TRUE(says(text, "backward, w in fp8  "));
  desc.recompute = false;
  desc.bias_grad = desc.count = true;
  desc.non_finite = NonFinite::kSaturate;
  text = info(context, desc);
  EXPECT_TRUE(says(text, ", db bf16, holds scales that are not finite, counts\n"));
  EXPECT_TRUE(says(text, "; bias gradient; "));
}

TEST(Info, SaysWhetherTheBuiltInTableIsOfTheDevice) {
  FakeCuda cuda;
  const auto context = cuda.context();
  const auto emulated = Context::create(0, {.emulate = true}).value();
  context->state().table = emulated->table();
  EXPECT_TRUE(says(describe(*context), "(built-in, of the nearest class: none is of this device)"));
  EXPECT_TRUE(describe(*emulated).ends_with("(built-in)"));  // it is no GPU to compare with
}

TEST(Info, FillsTheCallersBuffer) {
  FakeCuda cuda;
  float8_context context{cuda.context()};
  const float8_linear linear{
      Linear::plan(context.context, testing::describe("rowwise", kLinear)).value()};
  const std::string all = describe(*linear.linear);
  size_t needed = 0;
  ASSERT_EQ(float8_linear_info(&linear, nullptr, 0, &needed), FLOAT8_OK);
  ASSERT_EQ(needed, all.size() + 1);
  std::string text(needed + 4, '#');
  ASSERT_EQ(float8_linear_info(&linear, text.data(), needed, nullptr), FLOAT8_OK);
  EXPECT_EQ(text, all + '\0' + "####");
  text.assign(20, '#');
  ASSERT_EQ(float8_linear_info(&linear, text.data(), 8, &needed), FLOAT8_OK);
  EXPECT_EQ(text, all.substr(0, 7) + '\0' + std::string(12, '#'));
  EXPECT_EQ(needed, all.size() + 1);
  ASSERT_EQ(float8_context_info(&context, text.data(), 1, &needed), FLOAT8_OK);
  EXPECT_EQ(needed, describe(*context.context).size() + 1);
  EXPECT_EQ(text[0], '\0');

  EXPECT_EQ(float8_linear_info(nullptr, nullptr, 0, &needed), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_linear_info(&linear, nullptr, 1, &needed), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_context_info(nullptr, nullptr, 0, &needed), FLOAT8_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace f8::runtime
