// RMSNorms and their gradients against the formula in fp64: every pair of types, both roundings, short and long rows,
// strides with gaps, sums that are exact, and what is refused. On a GPU the bits are also those of the emulation.
#include "runtime/norm/rms_norm.hpp"

#include <array>
#include <cmath>
#include <random>
#include <string>

#include "codegen/kernels/norm/norm_args.cuh"
#include "runtime/device/element_type.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

struct NormCase {
  std::array<int32_t, 3> types;  // of x, of the weight, of y
  int64_t rows, cols;
  int32_t rounding = FLOAT8_ROUND_ONCE;
  float offset = 0;
  int64_t gap = 0;     // elements between rows
  bool exact = false;  // with elements of which all sums are exact
};

// How far the nearest element may be from a value of 1.
double unit_of(int32_t dtype) {
  return dtype == FLOAT8_BF16 ? 0x1p-8 : dtype == FLOAT8_F16 ? 0x1p-11 : 0x1p-24;
}

// A matrix whose rows have a gap between them.
struct NormMatrix {
  NormMatrix(const NormCase& of, int32_t dtype, uint64_t seed)
      : type(element_type(dtype)), rows(of.rows), cols(of.cols), ld(of.cols + of.gap) {
    bytes.assign(static_cast<size_t>(rows * ld) * size_bytes(type), kPoison);
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> whole(-2, 2);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const auto value = of.exact ? static_cast<float>(whole(random)) : normal(random);
        store_element(bytes.data(), r * ld + c, value, type);
      }
    }
  }
  [[nodiscard]] double at(int64_t r, int64_t c) const {
    return load_element(bytes.data(), r * ld + c, type);
  }

  Dtype type;
  int64_t rows, cols, ld;
  std::vector<uint8_t> bytes;
};

// x of exact sums is 1 or -1, whose mean of squares is 1.
NormMatrix norm_input(const NormCase& of) {
  NormMatrix x(of, of.types[0], 1);
  if (!of.exact) return x;
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.cols; ++c) {
      store_element(x.bytes.data(), r * x.ld + c, x.at(r, c) < 0 ? -1.0F : 1.0F, x.type);
    }
  }
  return x;
}

class NormTensors {
 public:
  NormTensors(Context& context, const NormCase& of)
      : context_(context),
        of_(of),
        x_(norm_input(of)),
        dy_(of, of.types[2], 2),
        weight_({of.types, 1, of.cols, 0, 0, 0, of.exact}, of.types[1], 3),
        x_memory_(context, x_.bytes),
        dy_memory_(context, dy_.bytes),
        weight_memory_(context, weight_.bytes),
        y_(context, dy_.bytes.size()),
        rstd_(context, static_cast<size_t>(of.rows) * sizeof(float)),
        dx_(context, x_.bytes.size()),
        dweight_(context, weight_.bytes.size()),
        workspace_(context, rms_norm_backward_workspace_bytes(context, of.rows, of.cols)) {}

  [[nodiscard]] float8_rms_norm_args forward() const {
    float8_rms_norm_args args;
    args.x.data = x_memory_.as();
    args.x.ld = of_.gap == 0 ? 0 : x_.ld;
    args.weight = weight_memory_.as();
    args.y.data = y_.as();
    args.y.ld = args.x.ld;
    args.rstd = rstd_.as<float>();
    args.eps = eps();
    set_sizes(args);
    return args;
  }
  [[nodiscard]] float8_rms_norm_backward_args backward() const {
    float8_rms_norm_backward_args args;
    const int64_t ld = of_.gap == 0 ? 0 : x_.ld;
    args.dy = {dy_memory_.as(), ld, nullptr};
    args.x = {x_memory_.as(), ld, nullptr};
    args.weight = weight_memory_.as();
    args.rstd = rstd_.as<float>();
    args.dx.data = dx_.as();
    args.dx.ld = ld;
    args.dweight.data = dweight_.as();
    args.workspace.data = workspace_.as();
    set_sizes(args);
    return args;
  }
  void run() const {
    F8_ASSERT_OK(rms_norm(context_, forward(), nullptr));
    F8_ASSERT_OK(rms_norm_backward(context_, backward(), nullptr));
  }
  void expect_formula() const {
    const auto rstd = rstd_.download<float>();
    const auto y = y_.download<uint8_t>();
    const auto dx = dx_.download<uint8_t>();
    for (int64_t r = 0; r < of_.rows && !::testing::Test::HasFailure(); ++r) {
      double squares = 0;
      for (int64_t c = 0; c < of_.cols; ++c) squares += x_.at(r, c) * x_.at(r, c);
      const double expected =
          1 / std::sqrt(squares / static_cast<double>(of_.cols) + static_cast<double>(eps()));
      const double found = rstd[static_cast<size_t>(r)];
      EXPECT_NEAR(found, expected, of_.exact ? 0 : 2e-6 * expected) << "row " << r;
      expect_y(y, r, found);
      expect_dx(dx, r, found);
    }
    expect_dweight(rstd, 1);
    for (const DeviceBuffer* each : {&y_, &rstd_, &dx_, &dweight_, &workspace_}) {
      EXPECT_TRUE(each->guards_are_whole());
    }
  }
  // Each of so many calls added to dweight.
  void expect_dweight(const std::vector<float>& rstd, int calls) const {
    const auto found = dweight_.download<uint8_t>();
    for (int64_t c = 0; c < of_.cols && !::testing::Test::HasFailure(); ++c) {
      double sum = 0;
      double magnitude = 0;
      for (int64_t r = 0; r < of_.rows; ++r) {
        const double term = dy_.at(r, c) * normalized(r, c, rstd[static_cast<size_t>(r)]);
        sum += term;
        magnitude += std::abs(term);
      }
      const double error =
          of_.exact ? 0 : calls * (unit_of(of_.types[1]) * std::abs(sum) + 1e-6 * magnitude);
      EXPECT_NEAR(load_element(found.data(), c, weight_.type), calls * sum, error)
          << "column " << c;
    }
  }
  [[nodiscard]] std::vector<float> rstd() const { return rstd_.download<float>(); }
  // All that was written.
  [[nodiscard]] std::vector<std::vector<uint8_t>> bytes() const {
    return {y_.download<uint8_t>(), rstd_.download<uint8_t>(), dx_.download<uint8_t>(),
            dweight_.download<uint8_t>()};
  }

 private:
  [[nodiscard]] float eps() const { return of_.exact ? 3.0F : 1e-5F; }
  template <class Args>
  void set_sizes(Args& args) const {
    args.rows = of_.rows;
    args.cols = of_.cols;
    args.weight_offset = of_.offset;
    args.rounding = of_.rounding;
    args.dtype = of_.types[0];
    args.weight_dtype = of_.types[1];
    args.out_dtype = of_.types[2];
  }
  [[nodiscard]] bool is_normalized() const { return of_.rounding == FLOAT8_ROUND_NORMALIZED; }
  [[nodiscard]] double weight(int64_t c) const {
    return weight_.at(0, c) + static_cast<double>(of_.offset);
  }
  // What the forward multiplies by a weight, given the fp32 rstd.
  [[nodiscard]] double normalized(int64_t r, int64_t c, double rstd) const {
    const double product = x_.at(r, c) * rstd;
    if (!is_normalized()) return product;
    return round_element(static_cast<float>(product), x_.type);
  }
  void expect_y(const std::vector<uint8_t>& found, int64_t r, double rstd) const {
    for (int64_t c = 0; c < of_.cols; ++c) {
      const double expected = normalized(r, c, rstd) * weight(c);
      const double error =
          of_.exact ? 0 : (unit_of(of_.types[2]) + 0x1p-22) * std::abs(expected) + 0x1p-25;
      ASSERT_NEAR(load_element(found.data(), r * dy_.ld + c, dy_.type), expected, error)
          << "row " << r << " column " << c;
    }
    expect_gap(found, r, dy_);
  }
  void expect_dx(const std::vector<uint8_t>& found, int64_t r, double rstd) const {
    double sum = 0;
    double magnitude = 0;
    for (int64_t c = 0; c < of_.cols; ++c) {
      const double term = dy_.at(r, c) * weight(c) * x_.at(r, c) * rstd;
      sum += term;
      magnitude += std::abs(term);
    }
    const double mean = sum / static_cast<double>(of_.cols);
    magnitude /= static_cast<double>(of_.cols);
    for (int64_t c = 0; c < of_.cols; ++c) {
      const double g = dy_.at(r, c) * weight(c);
      const double n = x_.at(r, c) * rstd;
      const double expected = rstd * (g - n * mean);
      const double of_sums = 2e-6 * rstd * (std::abs(g) + std::abs(n) * magnitude);
      const double error =
          of_.exact ? 0 : unit_of(of_.types[0]) * std::abs(expected) + of_sums + 0x1p-25;
      const double rounded =
          of_.exact ? round_element(static_cast<float>(expected), x_.type) : expected;
      ASSERT_NEAR(load_element(found.data(), r * x_.ld + c, x_.type), rounded, error)
          << "row " << r << " column " << c;
    }
    expect_gap(found, r, x_);
  }
  static void expect_gap(const std::vector<uint8_t>& found, int64_t r, const NormMatrix& of) {
    const auto element = static_cast<int64_t>(size_bytes(of.type));
    for (int64_t i = (r * of.ld + of.cols) * element; i < (r + 1) * of.ld * element; ++i) {
      ASSERT_EQ(found[static_cast<size_t>(i)], kPoison) << "row " << r;
    }
  }

  Context& context_;
  NormCase of_;
  NormMatrix x_, dy_, weight_;
  DeviceBuffer x_memory_, dy_memory_, weight_memory_, y_, rstd_, dx_, dweight_, workspace_;
};

class RmsNormTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!context_ || kEmulated) return;
    emulated_ = Context::create(0, {.emulate = true}).value();
  }
  void expect_formula(const NormCase& of) {
    SCOPED_TRACE(f8::format("{} x {}, types {} {} {}, rounding {}", of.rows, of.cols, of.types[0],
                            of.types[1], of.types[2], of.rounding));
    const NormTensors tensors(context(), of);
    tensors.run();
    tensors.expect_formula();
    // Blocks that are as many have sums in one order.
    if (emulated_ && emulated_->device().sm_count == context().device().sm_count) {
      const NormTensors expected(*emulated_, of);
      expected.run();
      EXPECT_EQ(tensors.bytes(), expected.bytes());
    }
  }
  template <class Args>
  void expect_refused(const std::function<void(Args&)>& change, const std::string& words) {
    const NormTensors tensors(context(), {{0, 0, 0}, 3, 64});
    Status status;
    if constexpr (std::is_same_v<Args, float8_rms_norm_args>) {
      Args args = tensors.forward();
      change(args);
      status = rms_norm(context(), args, nullptr);
    } else {
      Args args = tensors.backward();
      change(args);
      status = rms_norm_backward(context(), args, nullptr);
    }
    ASSERT_FALSE(status) << words;
    EXPECT_NE(status.error().message.find(words), std::string::npos) << status.error().message;
  }

  std::shared_ptr<Context> emulated_;
};

TEST_F(RmsNormTest, HasTheFormulaInAllTypesAndRoundings) {
  for (const int32_t in : {FLOAT8_BF16, FLOAT8_F16, FLOAT8_F32}) {
    for (const int32_t weight : {in, int32_t{FLOAT8_F32}}) {
      for (const int32_t out : {in, int32_t{FLOAT8_F32}}) {
        expect_formula({{in, weight, out}, 37, 1000});
        expect_formula({{in, weight, out}, 37, 136, FLOAT8_ROUND_ONCE, 1.0F, 8});
        expect_formula({{in, weight, out}, 37, 264, FLOAT8_ROUND_NORMALIZED, 0, 24});
      }
    }
  }
}

TEST_F(RmsNormTest, OfAnySize) {
  for (const int64_t cols :
       {8, 16, 64, 128, 256, 512, 1000, 1024, 2048, 4096, 8192, 16384, 32768}) {
    const int64_t most = by_device<int64_t>(1025, cols <= 1024 ? 1025 : cols <= 4096 ? 300 : 140);
    for (const int64_t rows : {int64_t{1}, int64_t{3}, int64_t{127}, most}) {
      expect_formula({{0, 0, 0}, rows, cols, cols == 1000 ? 1 : 0, 0, 8 * (rows % 2)});
    }
    expect_formula({{FLOAT8_F32, FLOAT8_F32, FLOAT8_F32}, 5, cols});
    expect_formula({{FLOAT8_F16, FLOAT8_F32, FLOAT8_F32}, 5, cols, FLOAT8_ROUND_NORMALIZED});
  }
}

TEST_F(RmsNormTest, IsExactWhereSumsAre) {
  for (const int32_t type : {FLOAT8_BF16, FLOAT8_F16, FLOAT8_F32}) {
    for (const int32_t rounding : {FLOAT8_ROUND_ONCE, FLOAT8_ROUND_NORMALIZED}) {
      for (const int64_t cols : {8, 128, 1024, 2048, 8192}) {
        expect_formula({{type, FLOAT8_F32, type}, 67, cols, rounding, 0, 0, true});
      }
    }
    expect_formula({{type, type, type}, 9, 256, FLOAT8_ROUND_ONCE, 1.0F, 0, true});
  }
}

// A launch whose blocks have several rounds of rows.
TEST_F(RmsNormTest, ManyRowsOfHeads) {
  expect_formula({{0, 0, 0}, by_device<int64_t>(65537, 20001), 128, FLOAT8_ROUND_NORMALIZED});
  expect_formula({{0, 0, 0}, by_device<int64_t>(262145, 80001), 16, FLOAT8_ROUND_NORMALIZED});
}

TEST_F(RmsNormTest, ZerosAndInfinitiesStay) {
  const NormCase of{{0, 0, 0}, 2, 64};
  const std::vector<uint16_t> x = [] {
    std::vector<uint16_t> bits(128, 0);  // a row of zeros, and one with an infinity
    bits[70] = 0x7f80;
    return bits;
  }();
  const DeviceBuffer memory(context(), x);
  const NormTensors tensors(context(), of);
  float8_rms_norm_args args = tensors.forward();
  args.x.data = memory.as();
  args.eps = 1e-5F;
  F8_ASSERT_OK(rms_norm(context(), args, nullptr));
  const auto y = tensors.bytes()[0];
  for (int64_t c = 0; c < 64; ++c) {
    EXPECT_EQ(load_element(y.data(), c, Dtype::kBf16), 0.0F);
    EXPECT_EQ(std::isnan(load_element(y.data(), 64 + c, Dtype::kBf16)), c == 6);
  }
}

TEST_F(RmsNormTest, GradientsThatAreNotWantedAreNotWritten) {
  for (const int64_t cols : {128, 4096, 32768}) {
    const NormCase of{{0, FLOAT8_F32, 0}, 21, cols, FLOAT8_ROUND_NORMALIZED};
    const NormTensors both(context(), of);
    both.run();
    for (const bool dx : {false, true}) {
      const NormTensors one(context(), of);
      F8_ASSERT_OK(rms_norm(context(), one.forward(), nullptr));
      float8_rms_norm_backward_args args = one.backward();
      if (dx) {
        args.dweight.data = nullptr;
        args.workspace = {};
      } else {
        args.dx = {};
      }
      F8_ASSERT_OK(rms_norm_backward(context(), args, nullptr));
      const auto expected = both.bytes();
      const auto found = one.bytes();
      EXPECT_EQ(found[2] == expected[2], dx);
      EXPECT_EQ(found[3] == expected[3], !dx);
      const auto& left = found[dx ? 3 : 2];
      EXPECT_TRUE(std::ranges::all_of(left, [](uint8_t byte) { return byte == kPoison; }));
    }
  }
}

TEST_F(RmsNormTest, TheForwardNeedsNoRstd) {
  const NormCase of{{0, 0, 0}, 21, 256};
  const NormTensors with(context(), of);
  const NormTensors without(context(), of);
  F8_ASSERT_OK(rms_norm(context(), with.forward(), nullptr));
  float8_rms_norm_args args = without.forward();
  args.rstd = nullptr;
  F8_ASSERT_OK(rms_norm(context(), args, nullptr));
  EXPECT_EQ(with.bytes()[0], without.bytes()[0]);
}

TEST_F(RmsNormTest, AddsToTheGradientOfTheWeight) {
  const NormTensors tensors(context(), {{0, FLOAT8_F32, 0}, 33, 320});
  tensors.run();
  float8_rms_norm_backward_args args = tensors.backward();
  args.dweight.accumulate = 1;
  F8_ASSERT_OK(rms_norm_backward(context(), args, nullptr));
  tensors.expect_dweight(tensors.rstd(), 2);
}

TEST_F(RmsNormTest, WithoutRowsTheGradientOfTheWeightIsZero) {
  const NormTensors tensors(context(), {{0, 0, 0}, 0, 128});
  float8_rms_norm_args forward = tensors.forward();
  forward.x = {};
  forward.y = {};
  forward.weight = nullptr;
  F8_ASSERT_OK(rms_norm(context(), forward, nullptr));
  float8_rms_norm_backward_args args = tensors.backward();
  args.x = args.dy = {};
  args.rstd = nullptr;
  args.workspace = {};
  args.dweight.accumulate = 1;
  F8_ASSERT_OK(rms_norm_backward(context(), args, nullptr));
  const auto is_all = [&](uint8_t byte) {
    return std::ranges::all_of(tensors.bytes()[3], [byte](uint8_t each) { return each == byte; });
  };
  EXPECT_TRUE(is_all(kPoison));
  args.dweight.accumulate = 0;
  F8_ASSERT_OK(rms_norm_backward(context(), args, nullptr));
  EXPECT_TRUE(is_all(0));
}

TEST_F(RmsNormTest, SaysWhatItRefuses) {
  using Forward = float8_rms_norm_args;
  using Backward = float8_rms_norm_backward_args;
  expect_refused<Forward>([](Forward& a) { a.cols = 12; }, "cols is 12; rows are 0 to");
  expect_refused<Forward>([](Forward& a) { a.cols = 0; }, "cols is 0");
  expect_refused<Forward>([](Forward& a) { a.cols = 65536; }, "a multiple of 8, up to 32768");
  expect_refused<Forward>([](Forward& a) { a.rows = -1; }, "rows is -1");
  expect_refused<Forward>([](Forward& a) { a.rows = int64_t{1} << 40; }, "rows are 0 to");
  expect_refused<Forward>([](Forward& a) { a.eps = -1; }, "float8_rms_norm_args.eps is -1");
  expect_refused<Forward>([](Forward& a) { a.eps = NAN; }, "float8_rms_norm_args.eps is nan");
  expect_refused<Forward>([](Forward& a) { a.weight_offset = INFINITY; }, "weight_offset is inf");
  expect_refused<Forward>(
      [](Forward& a) {
        a.rounding = FLOAT8_ROUND_NORMALIZED;
        a.weight_offset = 1;
      },
      "0 with FLOAT8_ROUND_NORMALIZED");
  expect_refused<Forward>([](Forward& a) { a.weight_dtype = FLOAT8_F16; }, "weight_dtype is 2");
  expect_refused<Forward>([](Forward& a) { a.out_dtype = FLOAT8_F16; }, "out_dtype is 2");
  expect_refused<Forward>([](Forward& a) { a.x.data = nullptr; }, "x.data is NULL");
  expect_refused<Forward>([](Forward& a) { a.y.data = nullptr; }, "y.data is NULL");
  expect_refused<Forward>([](Forward& a) { a.weight = nullptr; }, "weight is NULL");
  expect_refused<Forward>([](Forward& a) { a.x.ld = 56; }, "float8_rms_norm_args.x.ld is 56");
  expect_refused<Forward>([](Forward& a) { a.y.ld = 68; }, "float8_rms_norm_args.y.ld is 68");
  expect_refused<Forward>([](Forward& a) { a.weight = static_cast<const char*>(a.weight) + 2; },
                          "weight is not aligned to 16 bytes");
  expect_refused<Forward>([](Forward& a) { a.y.data = const_cast<void*>(a.x.data); }, "overlap");
  expect_refused<Backward>([](Backward& a) { a.cols = 12; }, "float8_rms_norm_backward_args: rows");
  expect_refused<Backward>([](Backward& a) { a.dy.data = nullptr; }, "dy.data is NULL");
  expect_refused<Backward>([](Backward& a) { a.x.data = nullptr; }, "x.data is NULL");
  expect_refused<Backward>([](Backward& a) { a.rstd = nullptr; }, "rstd is NULL");
  expect_refused<Backward>([](Backward& a) { a.workspace = {}; }, "workspace.data is NULL");
  expect_refused<Backward>([](Backward& a) { a.dx.ld = 60; }, "dx.ld is 60");
  expect_refused<Backward>([](Backward& a) { a.dx.data = const_cast<void*>(a.dy.data); },
                           "overlap");
}

TEST_F(RmsNormTest, WorkspacesHaveASizeWhereCallsHave) {
  EXPECT_EQ(rms_norm_backward_workspace_bytes(context(), 1, 64), 64 * sizeof(float));
  EXPECT_EQ(rms_norm_backward_workspace_bytes(context(), 0, 64), 0U);
  EXPECT_EQ(rms_norm_backward_workspace_bytes(context(), 1, 65), 0U);
  EXPECT_EQ(rms_norm_backward_workspace_bytes(context(), -1, 64), 0U);
  const auto sms = static_cast<size_t>(context().device().sm_count);
  EXPECT_EQ(rms_norm_backward_workspace_bytes(context(), 1 << 20, 4096),
            2 * sms * 4096 * sizeof(float));
}

}  // namespace
}  // namespace f8::runtime::gpu
