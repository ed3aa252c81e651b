// The cast of silu(gate) up, on an emulated device: the bits of a cast of the product, which is close to
// the product in fp64.
#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/emulation/swiglu.hpp"
#include "runtime/lists/quantizer_list.hpp"
#include "tests/golden.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using reference::Matrix;
using testing::Buffer;
using testing::FakeCuda;
using testing::says;

double exact(float gate, float up) {
  return static_cast<double>(gate) / (1 + std::exp(-static_cast<double>(gate))) *
         static_cast<double>(up);
}

TEST(Swiglu, IsCloseToTheProduct) {
  for (const auto& [type, bound] : {std::pair{Dtype::kF32, 4 * 0x1p-23}, {Dtype::kBf16, 0x1p-17}}) {
    double worst = 0;
    for (int i = -87'000; i <= 110'000; ++i) {
      const float gate = static_cast<float>(i) * 1.00009e-3F;
      if (gate == 0) continue;
      worst =
          std::max(worst, std::abs(emulation::swiglu(gate, 1.7F, type) / exact(gate, 1.7F) - 1));
    }
    EXPECT_LT(worst, bound) << to_string(type);
  }
}

TEST(Swiglu, KeepsWhatIsNotFinite) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const Dtype type : {Dtype::kF32, Dtype::kF16}) {
    const auto product = [&](float gate, float up) { return emulation::swiglu(gate, up, type); };
    EXPECT_TRUE(std::isnan(product(NAN, 1)));
    EXPECT_TRUE(std::isnan(product(1, NAN)));
    EXPECT_TRUE(std::isnan(product(-kInf, 1)));  // as -inf / (1 + inf)
    EXPECT_EQ(product(kInf, 2), kInf);
    EXPECT_EQ(product(3, -kInf), -kInf);
    EXPECT_EQ(product(-1e30F, 1), 0);
    EXPECT_EQ(product(0, 5), 0);
    EXPECT_FLOAT_EQ(product(1e30F, 2), 2e30F);
  }
}

struct Case {
  std::string_view recipe;
  int64_t rows, cols, gap;
};

class SwigluCastTest : public ::testing::TestWithParam<Case> {
 protected:
  static Matrix random(int64_t rows, int64_t cols, uint64_t seed, Dtype type) {
    return reference::rounded_to(
        reference::random_matrix(rows, cols, seed, reference::Distribution::kOutliers), type);
  }
  FakeCuda cuda_;
  std::shared_ptr<Context> context_ = cuda_.context();
};
INSTANTIATE_TEST_SUITE_P(Shapes, SwigluCastTest,
                         ::testing::Values(Case{"delayed", 1, 16, 0}, Case{"delayed", 130, 272, 8},
                                           Case{"delayed", 256, 128, 0},
                                           Case{"blockwise", 1, 16, 8},
                                           Case{"blockwise", 127, 144, 0},
                                           Case{"blockwise", 300, 400, 16}));

// For each type, with both copies and q alone; what delayed scaling records is the product's amax.
TEST_P(SwigluCastTest, IsTheCastOfTheProduct) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const bool qt : {true, false}) {
      SCOPED_TRACE(f8::format("{} {}", to_string(type), qt));
      QuantizerDesc desc{.rows = rows, .cols = cols, .recipe = find_recipe(recipe).value()};
      desc.dtype = type;
      desc.qt = qt;
      const auto plain = Quantizer::plan(context_, desc).value();
      desc.swiglu = true;
      const auto fused = Quantizer::plan(context_, desc).value();
      ASSERT_EQ(fused->tensor_bytes(), plain->tensor_bytes());
      EXPECT_EQ(fused->workspace_bytes(), 0U);

      const Matrix gate = random(rows, cols, 5, type), up = random(rows, cols, 6, type);
      Matrix h = gate;
      for (size_t i = 0; i < h.values.size(); ++i) {
        h.values[i] = emulation::swiglu(gate.values[i], up.values[i], type);
      }
      h = reference::rounded_to(h, type);
      Buffer of_gate(gate, type, gap), of_up(up, type, gap), of_h(h, type, 0);
      Buffer expected(plain->tensor_bytes()), got(plain->tensor_bytes());
      Buffer workspace(std::max<size_t>(plain->workspace_bytes(), 16));
      alignas(16) float scale[8] = {0.37F, 0, 0, 0, 1 / 0.37F};
      uint32_t amax[2] = {0, 0};
      uint32_t format[1] = {0};
      const int64_t ld = gap == 0 ? 0 : cols + gap;
      for (const bool product : {false, true}) {
        QuantizeCall call{.rows = rows,
                          .x = {product ? of_gate.data() : of_h.data(), product ? ld : 0},
                          .tensor = {product ? got.data() : expected.data()}};
        call.scales = ScaleSlots{amax + (product ? 1 : 0), scale, format};
        if (product) {
          call.up.data = of_up.data();
          call.up.ld = ld;
        }
        const auto& quantizer = product ? fused : plain;
        const Status done = quantizer->run(with_workspace(call, workspace.data()), nullptr);
        ASSERT_TRUE(done) << done.error().message;
      }
      EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
      EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.bytes()), 0);
      EXPECT_EQ(amax[0], amax[1]);
      EXPECT_EQ(amax[0] > 0, recipe == "delayed");
      EXPECT_TRUE(got.guard_is_whole());
    }
  }
}

class SwigluMisuse : public ::testing::Test {
 protected:
  void refused(const QuantizerDesc& desc, ErrorCode code, std::string_view words) {
    const auto plan = Quantizer::plan(context_, desc);
    ASSERT_FALSE(plan);
    EXPECT_EQ(plan.error().code, code);
    EXPECT_MESSAGE(plan, words);
  }
  static QuantizerDesc desc(std::string_view recipe) {
    QuantizerDesc out{.rows = 32, .cols = 64, .recipe = find_recipe(recipe).value()};
    out.swiglu = true;
    return out;
  }
  FakeCuda cuda_;
  std::shared_ptr<Context> context_ = cuda_.context();
};

TEST_F(SwigluMisuse, PlansThatCannotBe) {
  refused(desc("rowwise"), ErrorCode::kUnsupported, "FLOAT8_PLAIN");
  refused(desc("tensorwise"), ErrorCode::kUnsupported, "FLOAT8_PLAIN");
  QuantizerDesc weight = desc("blockwise");
  weight.operand = Tensor::kWeight;
  refused(weight, ErrorCode::kInvalidArgument, "FLOAT8_INPUT");
  QuantizerDesc rounded = desc("blockwise");
  rounded.f32_source = true;
  refused(rounded, ErrorCode::kInvalidArgument, "FLOAT8_INPUT");
  const std::shared_ptr<const Quantizer> all[] = {
      Quantizer::plan(context_, desc("blockwise")).value()};
  const auto list = QuantizerList::plan(context_, all);
  EXPECT_MESSAGE(list, "quantizers[0]", "FLOAT8_SWIGLU");
}

TEST_F(SwigluMisuse, CallsThatCannotBe) {
  const auto fused = Quantizer::plan(context_, desc("delayed")).value();
  QuantizerDesc of_plain = desc("blockwise");
  of_plain.swiglu = false;
  const auto plain = Quantizer::plan(context_, of_plain).value();
  Buffer x(32 * 64 * 2), up(32 * 64 * 2), tensor(fused->tensor_bytes() + plain->tensor_bytes());
  Buffer workspace(plain->workspace_bytes() + 16);
  alignas(16) float scale[8] = {1, 0, 0, 0, 1};
  uint32_t amax[1] = {0}, format[1] = {0};
  QuantizeCall good{.rows = 32, .x = {x.data()}, .tensor = {tensor.data()}};
  good.scales = ScaleSlots{amax, scale, format};
  good.up.data = up.data();
  const auto refused = [&](const Quantizer& quantizer, const QuantizeCall& call,
                           std::string_view words) {
    const Status status = quantizer.run(with_workspace(call, workspace.data()), nullptr);
    EXPECT_MESSAGE(status, words);
  };
  QuantizeCall call = good;
  call.up.data = nullptr;
  refused(*fused, call, "float8_quantize_args.up.data");
  refused(*plain, good, "float8_quantize_args.up.data");
  call = good;
  call.step = &kFirstOfSteps;
  refused(*fused, call, "FLOAT8_PLAIN");
  call = good;
  call.up.data = tensor.data();
  refused(*fused, call, "overlap");
  call = good;
  call.up.ld = 60;
  refused(*fused, call, "up.ld");
  EXPECT_TRUE(tensor.untouched());
  EXPECT_TRUE(cuda_.launches.empty());
}

}  // namespace
}  // namespace f8::runtime
