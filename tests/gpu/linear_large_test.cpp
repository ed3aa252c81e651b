// Linears of many rows, whose results are compared in places.
#include <algorithm>
#include <utility>

#include "runtime/weight_casts.hpp"
#include "tests/gpu/gemm_operands.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

// Axis scales by two launches: by lines, and beyond their limit the input's and grad_output's by
// words. The weight's are compared to those of a list, which takes words; what the reference would
// take minutes for, on elements here and there to products in high precision.
TEST_F(GpuTest, LargeRowwiseLinears) {
  struct Case {
    Shape shape;
    int64_t m;
    bool clears;
  };
  const auto two_launches =
      *Context::create(context().device().ordinal,
                       {.cooperative_launch = false, .emulate = context().options().emulate});
  for (const auto& [shape, m, clears] :
       {Case{by_device<Shape>({4200, 2304, 2048}, {4200, 48, 32}), 4200, false},
        Case{by_device<Shape>({16384, 256, 256}, {16384, 16, 16}), 16384, true},
        Case{by_device<Shape>({16384, 256, 256}, {16384, 16, 16}), 78 * 128, false}}) {
    SCOPED_TRACE(fmt::format("{} called with m={}", to_string(shape), m));
    const auto planned = Linear::plan(two_launches, describe("rowwise", shape));
    F8_ASSERT_OK(planned);
    const Linear& linear = **planned;
    Tensors t(context(), linear, m, 5);
    for (const auto& steps : {linear.forward_steps(t.forward(), t.workspace.as()),
                              linear.backward_steps(t.backward(), t.workspace.as())}) {
      EXPECT_EQ(std::ranges::any_of(steps, [](const Step& s) { return s.name == "clear amax"; }),
                clears);
      EXPECT_TRUE(
          std::ranges::any_of(steps, [](const Step& s) { return s.name.starts_with("amax"); }));
    }
    Bits first;
    for (int round = 0; round < 3; ++round) {
      t.poison_results();
      F8_ASSERT_OK(linear.forward(t.forward(), t.workspace.as(), nullptr));
      F8_ASSERT_OK(linear.backward(t.backward(), t.workspace.as(), nullptr));
      if (round == 0) first = results(t);
    }
    EXPECT_TRUE(results(t) == first) << "other bits the second time";
    t.expect_whole_guards();

    const auto [n, k] = std::pair{shape.n, shape.k};
    const auto y = t.y.bf16();
    const auto dx = t.dx.bf16();
    const auto dw = result(t.dw, linear.desc().grad_weight_dtype);
    const auto near = [](int64_t count, int64_t rows, int64_t cols, const auto& computed,
                         const auto& term) {
      std::vector<double> exact;
      std::vector<double> found;
      for (int64_t i = 0; i < 300; ++i) {
        const int64_t row = i * 7919 % rows;
        const int64_t col = i * 104729 % cols;
        double sum = 0;
        for (int64_t j = 0; j < count; ++j) sum += term(row, col, j);
        exact.push_back(sum);
        found.push_back(computed[static_cast<size_t>(row * cols + col)]);
      }
      return reference::relative_error(exact, found) <= 0.06;
    };
    const auto at = [](const reference::Matrix& x, int64_t r, int64_t c) {
      return static_cast<double>(x.at(r, c));
    };
    EXPECT_TRUE(near(k, m, n, y, [&](int64_t r, int64_t c, int64_t j) {
      return at(t.x, r, j) * at(t.w, c, j);
    })) << "y";
    EXPECT_TRUE(near(n, m, k, dx, [&](int64_t r, int64_t c, int64_t j) {
      return at(t.dy, r, j) * at(t.w, j, c);
    })) << "dx";
    EXPECT_TRUE(near(m, n, k, dw, [&](int64_t r, int64_t c, int64_t j) {
      return at(t.dy, j, r) * at(t.x, j, c);
    })) << "dw";

    const DeviceBuffer cache(context(), linear.weight_cache_bytes());
    const DeviceBuffer by_list(context(), linear.weight_cache_bytes());
    WeightCall weight{.w = t.device_w.as(), .cache = cache.as()};
    F8_ASSERT_OK(linear.cast_weight(weight, t.workspace.as(), nullptr));
    const auto casts = WeightCasts::plan(two_launches, {&*planned, 1});
    F8_ASSERT_OK(casts);
    const DeviceBuffer workspace(context(), std::max<size_t>(casts->workspace_bytes(), 16));
    weight.cache = by_list.as();
    F8_ASSERT_OK(casts->run({&weight, 1}, workspace.as(), nullptr));
    EXPECT_TRUE(cache.download<uint8_t>() == by_list.download<uint8_t>());
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
