// The words about plans: every choice with its reason, and the launches that a call makes.
#include "runtime/model/info.hpp"

#include <float8/float8.hpp>

#include "runtime/c_abi/common.hpp"
#include "runtime/gemm/choose.hpp"
#include "runtime/gemm/cost_model.hpp"
#include "tests/golden.hpp"
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
  EXPECT_MESSAGE(text, "rowwise_with_gw_hp", "bf16", "e4m3", "grad_weight", "h0");
  EXPECT_MESSAGE(describe(*context));

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
  EXPECT_MESSAGE(text);
  EXPECT_TRUE(says(describe(*context),
                   "2 kernels and 0 linears measured on Fake H100, hash " + table.hash()));

  desc.choices[0] = measured;
  desc.choices[0]->why.clear();
  EXPECT_MESSAGE(info(context, desc));
}

// The launches listed are those that a call makes.
TEST(Info, ListsTheLaunches) {
  FakeCuda cuda;
  const auto context = cuda.context();
  LinearDesc desc = testing::describe("tensorwise", {8192, 2048, 2048});
  std::string text = info(context, desc);
  EXPECT_MESSAGE(text, "fp8");
  desc.shape = kLinear;
  EXPECT_MESSAGE(info(context, desc));
  desc.recipe = find_recipe("delayed").value();
  desc.bias = desc.accumulate_grad_weight = true;
  desc.needs_grad_input = false;
  text = info(context, desc);
  EXPECT_MESSAGE(text, "bf16", "e4m3");
  EXPECT_FALSE(says(text, "grad_input"));
  desc.recompute = true;
  text = info(context, desc);
  EXPECT_MESSAGE(text, "fp8");
  desc.recompute = false;
  desc.bias_grad = desc.count = true;
  desc.non_finite = NonFinite::kSaturate;
  text = info(context, desc);
  EXPECT_MESSAGE(text, "bf16");
}

TEST(Info, SaysWhetherTheBuiltInTableIsOfTheDevice) {
  FakeCuda cuda;
  const auto context = cuda.context();
  const auto emulated = Context::create(0, {.emulate = true}).value();
  context->state().table = emulated->table();
  EXPECT_MESSAGE(describe(*context));
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
