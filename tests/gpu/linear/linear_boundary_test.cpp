// The tensors at a linear's boundary on the device: bf16, f16 and f32, and rows that are further
// apart than they are long, under each recipe against the reference.
#include "tests/gpu/gemm_operands.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

// One call's tensors in their types, rows `gap` elements more apart than long.
struct Boundary {
  Boundary(const Context& context, const Linear& linear, int64_t rows, int64_t gap_of_rows)
      : type(linear.desc().tensor_dtype),
        dw_type(linear.desc().grad_weight_dtype),
        m(rows),
        n(linear.desc().shape.n),
        k(linear.desc().shape.k),
        gap(gap_of_rows),
        x(random(m, k, 1, reference::Distribution::kOutliers)),
        w(random(n, k, 2)),
        dy(random(m, n, 3)),
        bias(random(1, n, 4)),
        device_x(context, reference::to_bytes(x, type, k + gap, kPoison)),
        device_w(context, reference::to_bytes(w, type, k + gap, kPoison)),
        device_dy(context, reference::to_bytes(dy, type, n + gap, kPoison)),
        device_bias(context, reference::to_bytes(bias, type)),
        y(context, bytes(m, n, type)),
        dx(context, bytes(m, k, type)),
        dw(context, bytes(n, k, dw_type)),
        saved(context, linear.saved_bytes()),
        workspace(context, linear.workspace_bytes()),
        amaxes(context, std::vector<uint32_t>(8)),
        scales(context, std::vector<float>(64, 1.0F)) {}

  [[nodiscard]] reference::Matrix random(
      int64_t rows, int64_t cols, uint64_t seed,
      reference::Distribution of = reference::Distribution::kNormal) const {
    return reference::rounded_to(reference::random_matrix(rows, cols, seed, of), type);
  }
  [[nodiscard]] size_t bytes(int64_t rows, int64_t cols, Dtype of) const {
    return static_cast<size_t>(rows * (cols + gap)) * size_bytes(of);
  }
  [[nodiscard]] Status run(const Linear& linear) const {
    const ScaleSlots slots{amaxes.as<uint32_t>(), scales.as<float>()};
    F8_TRY(linear.forward({.m = m,
                           .x = {device_x.as(), k + gap},
                           .w = {device_w.as(), k + gap},
                           .bias = linear.desc().bias ? device_bias.as() : nullptr,
                           .y = {y.as(), n + gap},
                           .saved = {saved.as()},
                           .workspace = {workspace.as()},
                           .step = &kFirstOfSteps,
                           .scales = slots},
                          nullptr));
    return linear.backward({.m = m,
                            .dy = {device_dy.as(), n + gap},
                            .x = {device_x.as(), k + gap},
                            .w = {device_w.as(), k + gap},
                            .dx = {dx.as(), k + gap},
                            .dw = {dw.as(), k + gap},
                            .saved = {saved.as()},
                            .workspace = {workspace.as()},
                            .step = &kFirstOfSteps,
                            .scales = slots},
                           nullptr);
  }
  // The values of a result; what lies between its rows was not written.
  [[nodiscard]] std::vector<double> values(const DeviceBuffer& buffer, int64_t cols,
                                           Dtype of) const {
    const auto all = buffer.download<uint8_t>();
    const auto stride = static_cast<size_t>(cols + gap) * size_bytes(of);
    std::vector<double> out;
    for (size_t at = 0; at < all.size(); at += stride) {
      for (int64_t c = 0; c < cols; ++c) {
        out.push_back(static_cast<double>(load_element(&all[at], c, of)));
      }
      for (size_t i = static_cast<size_t>(cols) * size_bytes(of); i < stride; ++i) {
        EXPECT_EQ(int{all[at + i]}, int{kPoison});
      }
    }
    EXPECT_TRUE(buffer.guards_are_whole());
    return out;
  }
  [[nodiscard]] std::vector<std::vector<double>> results() const {
    return {values(y, n, type), values(dx, k, type), values(dw, k, dw_type)};
  }

  Dtype type, dw_type;
  int64_t m, n, k, gap;
  reference::Matrix x, w, dy, bias;
  DeviceBuffer device_x, device_w, device_dy, device_bias, y, dx, dw, saved, workspace, amaxes,
      scales;
};

class LinearBoundaryTest : public RecipeTest {};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearBoundaryTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(LinearBoundaryTest, EachTypeIsLikeTheReference) {
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const bool add : {false, true}) {
      SCOPED_TRACE(f8::format("{} {}{}", GetParam(), to_string(type), add ? " bias" : ""));
      LinearDesc desc = describe(GetParam(), {300, 208, 592});
      desc.tensor_dtype = desc.grad_weight_dtype = type;
      desc.bias = add;
      const auto linear = Linear::plan(context_, desc);
      F8_ASSERT_OK(linear);
      const Boundary t(context(), **linear, 290, 0);
      F8_ASSERT_OK(t.run(**linear));
      auto expected = reference::linear(desc.recipe, t.x, t.w, t.dy).value();
      for (size_t i = 0; add && i < expected.y.size(); ++i) {
        expected.y[i] += static_cast<double>(t.bias.values[i % static_cast<size_t>(t.n)]);
      }
      const auto bound = [&](Gemm g) {
        return desc.recipe.at(g).fast ? kFastBound : kPreciseBound;
      };
      const auto results = t.results();
      EXPECT_LE(reference::relative_error(expected.y, results[0]), bound(Gemm::kOutput));
      EXPECT_LE(reference::relative_error(expected.dx, results[1]), bound(Gemm::kGradInput));
      EXPECT_LE(reference::relative_error(expected.dw, results[2]), bound(Gemm::kGradWeight));
    }
  }
}

// The same bits whether rows follow each other or not; large enough for every path of the casts.
TEST_P(LinearBoundaryTest, RowsApartGiveTheSame) {
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const Shape shape :
         {Shape{300, 208, 592}, by_device<Shape>({2100, 1040, 1168}, {4200, 16, 48})}) {
      SCOPED_TRACE(f8::format("{} {} {}", GetParam(), to_string(type), to_string(shape)));
      LinearDesc desc = describe(GetParam(), shape);
      desc.tensor_dtype = desc.grad_weight_dtype = type;
      const auto linear = Linear::plan(context_, desc);
      F8_ASSERT_OK(linear);
      const Boundary dense(context(), **linear, shape.m, 0);
      F8_ASSERT_OK(dense.run(**linear));
      const Boundary apart(context(), **linear, shape.m, 24);
      F8_ASSERT_OK(apart.run(**linear));
      EXPECT_EQ(apart.results(), dense.results());
    }
  }
}

TEST_P(LinearBoundaryTest, AnEmptyBatchZeroesAGradientWhoseRowsAreApart) {
  LinearDesc desc = describe(GetParam(), {64, 48, 80});
  desc.tensor_dtype = desc.grad_weight_dtype = Dtype::kF16;
  const auto linear = Linear::plan(context_, desc);
  F8_ASSERT_OK(linear);
  const Boundary t(context(), **linear, 64, 8);
  F8_ASSERT_OK((*linear)->backward({.m = 0, .dw = {t.dw.as(), 88}}, nullptr));
  for (const double value : t.values(t.dw, t.k, t.dw_type)) ASSERT_EQ(value, 0);
}

}  // namespace
}  // namespace f8::runtime::gpu
