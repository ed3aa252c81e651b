// Linears of many rows, whose results are compared in places.
#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/lists/quantizer_list.hpp"
#include "tests/gpu/gemm_operands.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

// Axis scales by two launches: by lines, and beyond their limit the input's and grad_output's by
// words. The weight's are compared to those of a list, which takes words; what the reference would
// take minutes for, on elements here and there to GEMMs in high precision.
TEST_F(GpuTest, LargeRowwiseLinears) {
  struct LargeCase {
    Shape shape;
    int64_t m;
    bool clears;
  };
  const auto two_launches =
      *Context::create(context().device().ordinal,
                       {.cooperative_launch = false, .emulate = context().options().emulate});
  for (const auto& [shape, m, clears] :
       {LargeCase{by_device<Shape>({4200, 2304, 2048}, {4200, 48, 32}), 4200, false},
        LargeCase{by_device<Shape>({16384, 256, 256}, {16384, 16, 16}), 16384, true},
        LargeCase{by_device<Shape>({16384, 256, 256}, {16384, 16, 16}), 78 * 128, false}}) {
    SCOPED_TRACE(f8::format("{} called with m={}", to_string(shape), m));
    const auto planned = Linear::plan(two_launches, describe("rowwise", shape));
    F8_ASSERT_OK(planned);
    const Linear& linear = **planned;
    Tensors t(context(), linear, m, 5);
    for (const auto& steps :
         {linear.forward_steps(t.forward()), linear.backward_steps(t.backward())}) {
      EXPECT_EQ(std::ranges::any_of(steps, [](const Step& s) { return s.name == "clear amax"; }),
                clears);
      EXPECT_TRUE(
          std::ranges::any_of(steps, [](const Step& s) { return s.name.starts_with("amax"); }));
    }
    Bits first;
    for (int round = 0; round < 3; ++round) {
      t.poison_results();
      F8_ASSERT_OK(linear.forward(t.forward(), nullptr));
      F8_ASSERT_OK(linear.backward(t.backward(), nullptr));
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

    const Fp8Weight weight(two_launches, linear.desc());
    F8_ASSERT_OK(weight.run(t));
    const auto alone = weight.tensor.download<uint8_t>();
    const auto casts = QuantizerList::plan(two_launches, {&weight.quantizer, 1});
    F8_ASSERT_OK(casts);
    const DeviceBuffer workspace(context(), std::max<size_t>(casts->workspace_bytes(), 16));
    const DeviceBuffer by_list(context(), weight.tensor.bytes());
    QuantizeCall call = weight.call(t);
    call.tensor.data = by_list.as();
    call.step = nullptr;  // the list's
    F8_ASSERT_OK(casts->run(listed({&call, 1}, workspace.as(), &kFirstOfSteps), nullptr));
    EXPECT_TRUE(by_list.download<uint8_t>() == alone);
    if (HasFailure()) return;
  }
}

class HugeLinearTest : public RecipeTest {};
INSTANTIATE_TEST_SUITE_P(Recipes, HugeLinearTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

// x and dx have more than 2^32 bytes and 2^31 elements. All elements are 1 but for the last row of
// x and of dy, which is 2, so a row that is read or written elsewhere shows. K is short: of some
// thousand equal terms a fast sum drops each one's low bits, and beyond 2^14 all of them.
TEST_P(HugeLinearTest, BeyondFourGigabytes) {
  const auto shape = by_device<Shape>({524288, 16, 4112}, {200, 16, 48});
  const auto [m, n, k] = shape;
  const auto linear = plan(describe(GetParam(), shape));
  ASSERT_NE(linear, nullptr);
  const auto bytes = [](int64_t rows, int64_t cols) {
    return static_cast<size_t>(rows * cols) * 2;
  };
  size_t free_bytes = 0;
  size_t all_bytes = 0;
  F8_ASSERT_OK(driver().check(driver().mem_get_info(&free_bytes, &all_bytes), "cuMemGetInfo"));
  const size_t needed = 4 * bytes(m, k);  // x, dx, and x in fp8 for the forward and for dw
  if (free_bytes < needed) {
    GTEST_SKIP() << needed / 1'000'000 << " MB needed, " << free_bytes / 1'000'000 << " free";
  }
  const DeviceBuffer x(context(), bytes(m, k));
  const DeviceBuffer w(context(), bytes(n, k));
  const DeviceBuffer dy(context(), bytes(m, n));
  const DeviceBuffer y(context(), bytes(m, n));
  const DeviceBuffer dx(context(), bytes(m, k));
  const DeviceBuffer dw(context(), bytes(n, k) / 2 * size_bytes(linear->desc().grad_weight_dtype));
  const DeviceBuffer saved(context(), linear->saved_bytes());
  const DeviceBuffer workspace(context(), linear->workspace_bytes());
  const DeviceBuffer amaxes(context(), std::vector<uint32_t>(linear->scale_slots().size() + 1));
  const DeviceBuffer scales(context(), std::vector<float>(64, 1.0F));
  const ScaleSlots slots{amaxes.as<uint32_t>(), scales.as<float>()};

  constexpr unsigned kOnes = 0x3F803F80;  // bf16
  constexpr unsigned kTwos = 0x40004000;
  const auto at = [](const DeviceBuffer& buffer, size_t byte) {
    return reinterpret_cast<CUdeviceptr>(buffer.as<std::byte>() + byte);
  };
  const auto fill = [&](const DeviceBuffer& buffer, size_t byte, size_t count, unsigned pair) {
    F8_ASSERT_OK(driver().check(
        driver().memset_d32_async(at(buffer, byte), pair, count / 4, nullptr), "cuMemsetD32Async"));
  };
  fill(w, 0, bytes(n, k), kOnes);
  for (const auto& [buffer, cols] : {std::pair{&x, k}, std::pair{&dy, n}}) {
    fill(*buffer, 0, bytes(m - 1, cols), kOnes);
    fill(*buffer, bytes(m - 1, cols), bytes(1, cols), kTwos);
  }
  F8_ASSERT_OK(linear->forward({.m = m,
                                .x = {x.as()},
                                .w = {w.as()},
                                .y = {y.as()},
                                .saved = {saved.as()},
                                .workspace = {workspace.as()},
                                .step = &kFirstOfSteps,
                                .scales = slots},
                               nullptr));
  F8_ASSERT_OK(linear->backward({.m = m,
                                 .dy = {dy.as()},
                                 .x = {x.as()},
                                 .w = {w.as()},
                                 .dx = {dx.as()},
                                 .dw = {dw.as()},
                                 .saved = {saved.as()},
                                 .workspace = {workspace.as()},
                                 .step = &kFirstOfSteps,
                                 .scales = slots},
                                nullptr));

  // Sums of equal terms are where fast accumulation loses most.
  const auto near = [](double value, double exact) { return std::abs(value / exact - 1) <= 0.1; };
  const auto of_y = y.bf16();
  for (size_t i = 0; i < of_y.size(); ++i) {
    const bool last = static_cast<int64_t>(i) / n == m - 1;
    ASSERT_PRED2(near, of_y[i], static_cast<double>(last ? 2 * k : k)) << "y " << i;
  }
  for (const double value : result(dw, linear->desc().grad_weight_dtype)) {
    ASSERT_PRED2(near, value, static_cast<double>(m + 3)) << "dw";
  }
  for (const int64_t row : {int64_t{0}, m / 2, m - 2, m - 1}) {
    std::vector<uint16_t> bits(static_cast<size_t>(k));
    F8_ASSERT_OK(driver().check(
        driver().memcpy_dtoh(bits.data(), at(dx, bytes(row, k)), bytes(1, k)), "cuMemcpyDtoH"));
    for (const uint16_t b : bits) {
      ASSERT_PRED2(near, static_cast<double>(decode_bf16(b)),
                   static_cast<double>(row == m - 1 ? 2 * n : n))
          << "dx, row " << row;
    }
  }
  for (const DeviceBuffer* buffer : {&y, &dx, &dw, &saved, &workspace}) {
    EXPECT_TRUE(buffer->guards_are_whole());
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
