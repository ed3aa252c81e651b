// The cast kernels against the reference, bit for bit: both copies, scales, tails.
#include <algorithm>
#include <bit>
#include <cmath>

#include "runtime/gemm.hpp"
#include "runtime/quantize.hpp"
#include "tests/gpu/gpu_test.hpp"
#include "tests/gpu/quantize_data.hpp"

namespace f8::runtime::gpu {
namespace {

using reference::AmaxOver;

// A matrix on the device with everything that the amax and cast kernels may write.
struct Quantized {
  Quantized(Context& context, const reference::Matrix& x)
      : ld_qt(padded(x.rows)),
        input(to_device(context, x)),
        partials(
            context,
            static_cast<size_t>(amax_partials(x.rows, x.cols, context.device().sm_count, 1)) * 4),
        row_amax(context, std::vector<uint32_t>(static_cast<size_t>(x.rows))),
        col_amax(context, std::vector<uint32_t>(static_cast<size_t>(x.cols))),
        q(context, static_cast<size_t>(x.rows * x.cols)),
        qt(context, static_cast<size_t>(x.cols * ld_qt)),
        scale(context, (kernels::kInverse + 1) * sizeof(float)),
        inv_row(context, static_cast<size_t>(x.rows) * 4),
        inv_col(context, static_cast<size_t>(x.cols) * 4),
        operand{.x = input.as(),
                .rows = x.rows,
                .cols = x.cols,
                .partials = partials.as<uint32_t>(),
                .row_amax = row_amax.as<uint32_t>(),
                .col_amax = col_amax.as<uint32_t>(),
                .q = q.as<uint8_t>(),
                .qt = qt.as<uint8_t>(),
                .scale = scale.as<float>(),
                .inv_row = inv_row.as<float>(),
                .inv_col = inv_col.as<float>()} {}

  int64_t ld_qt;
  DeviceBuffer input, partials, row_amax, col_amax, q, qt, scale, inv_row, inv_col;
  QuantizeOperand operand;
};

// NaNs are equal whatever their payload.
void expect_same_scales(const std::vector<float>& expected, const std::vector<float>& actual,
                        const char* what) {
  ASSERT_EQ(expected.size(), actual.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::isnan(expected[i]) && std::isnan(actual[i])) continue;
    ASSERT_EQ(std::bit_cast<uint32_t>(expected[i]), std::bit_cast<uint32_t>(actual[i]))
        << what << "[" << i << "]: " << expected[i] << " and " << actual[i];
  }
}

void expect_tensor_scale(const reference::Fp8Matrix& expected, const std::vector<float>& actual) {
  expect_same_scales({expected.scales[0], expected.inv_scales[0]},
                     {actual[0], actual[kernels::kInverse]}, "scale");
}

void expect_same_bytes(const std::vector<uint8_t>& expected, int64_t cols,
                       const std::vector<uint8_t>& actual, int64_t ld, const char* what) {
  for (size_t i = 0; i < actual.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / ld;
    const int64_t col = static_cast<int64_t>(i) % ld;
    const uint8_t want = col < cols ? expected[static_cast<size_t>(row * cols + col)] : uint8_t{0};
    ASSERT_EQ(int{actual[i]}, int{want}) << what << "[" << row << "][" << col << "]";
  }
}

void expect_like_reference(const codegen::CastSpec& spec, const reference::Matrix& x,
                           const Quantized& device) {
  const bool axis = spec.scale == codegen::ScaleMode::kAxis;
  const AmaxOver over = axis ? AmaxOver::kRow : AmaxOver::kTensor;
  if (spec.q) {
    const auto expected = reference::cast(x, over, spec.out, spec.pow2);
    expect_same_bytes(expected.bits, x.cols, device.q.download<uint8_t>(), x.cols, "q");
    if (axis) {
      expect_same_scales(expected.inv_scales, device.inv_row.download<float>(), "inv_row");
    } else {
      expect_tensor_scale(expected, device.scale.download<float>());
    }
  }
  if (spec.qt) {
    const auto expected = reference::cast_transposed(x, over, spec.out, spec.pow2);
    expect_same_bytes(expected.bits, x.rows, device.qt.download<uint8_t>(), device.ld_qt, "qt");
    if (axis) {
      expect_same_scales(expected.inv_scales, device.inv_col.download<float>(), "inv_col");
    } else {
      expect_tensor_scale(expected, device.scale.download<float>());
    }
  }
  for (const DeviceBuffer* buffer :
       {&device.partials, &device.row_amax, &device.col_amax, &device.q, &device.qt, &device.scale,
        &device.inv_row, &device.inv_col}) {
    EXPECT_TRUE(buffer->guards_are_whole());
  }
}

codegen::AmaxSpec amax_for(const codegen::CastSpec& spec) {
  const bool axis = spec.scale == codegen::ScaleMode::kAxis;
  return {.in = Dtype::kBf16, .tensor = !axis, .row = axis && spec.q, .col = axis && spec.qt};
}

class CastTest : public GpuTestWith<codegen::CastSpec> {
 protected:
  void run(std::span<const QuantizeOperand> operands) {
    const codegen::CastSpec& spec = GetParam();
    const int sms = context().device().sm_count;
    const auto amax = context().kernel(amax_for(spec));
    const auto cast = context().kernel(spec);
    F8_ASSERT_OK(amax);
    F8_ASSERT_OK(cast);
    F8_ASSERT_OK(
        launch_amax(driver(), **amax, amax_args(amax_for(spec), sms, operands), true, nullptr));
    F8_ASSERT_OK(launch_cast(driver(), **cast, cast_args(spec, sms, operands), true, nullptr));
  }
};

std::vector<codegen::CastSpec> specs() {
  std::vector<codegen::CastSpec> out;
  for (const Dtype type : {Dtype::kE4m3, Dtype::kE5m2}) {
    for (const auto scale : {codegen::ScaleMode::kTensor, codegen::ScaleMode::kAxis}) {
      for (const bool pow2 : {false, true}) {
        for (const auto& [q, qt] : {std::pair{true, true}, {true, false}, {false, true}}) {
          out.push_back(
              {.in = Dtype::kBf16, .out = type, .scale = scale, .q = q, .qt = qt, .pow2 = pow2});
        }
      }
    }
  }
  return out;
}

std::string name(const ::testing::TestParamInfo<codegen::CastSpec>& suite) {
  std::string text = codegen::key(suite.param);
  std::ranges::replace_if(
      text, [](char c) { return std::isalnum(c) == 0; }, '_');
  return text;
}
INSTANTIATE_TEST_SUITE_P(Specs, CastTest, ::testing::ValuesIn(specs()), name);

TEST_P(CastTest, BitwiseLikeTheReference) {
  for (const int64_t rows : {1, 17, 1000, 4095}) {
    for (const int64_t cols : {16, 48, 2064}) {
      for (const Data data : {Data::kOutliers, Data::kTiny, Data::kNonFinite, Data::kHuge}) {
        // The reference takes its time: special values and single copies on the smaller ones.
        const bool large = rows * cols > 200'000;
        if (large && (data != Data::kOutliers || !GetParam().q || !GetParam().qt)) continue;
        const uint64_t seed = static_cast<uint64_t>(rows * 10000 + cols);
        SCOPED_TRACE(fmt::format("{} rows {} cols {} data {} seed {}", codegen::key(GetParam()),
                                 rows, cols, static_cast<int>(data), seed));
        const auto x = make_data(data, rows, cols, seed);
        const Quantized device(context(), x);
        run({&device.operand, 1});
        expect_like_reference(GetParam(), x, device);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(CastTest, TwoMatricesInOneLaunch) {
  const auto x = make_data(Data::kOutliers, 300, 144, 1);
  const auto w = make_data(Data::kHuge, 129, 272, 2);
  const Quantized first(context(), x);
  const Quantized second(context(), w);
  const QuantizeOperand operands[] = {first.operand, second.operand};
  run(operands);
  {
    SCOPED_TRACE("first");
    expect_like_reference(GetParam(), x, first);
  }
  SCOPED_TRACE("second");
  expect_like_reference(GetParam(), w, second);
}

// Row strides above the width of input and q: what lies between rows is neither read nor written.
TEST_P(CastTest, StridedMatrices) {
  const codegen::CastSpec& spec = GetParam();
  const int64_t rows = 150;
  const int64_t cols = 176;
  const int64_t ld = 192;
  const int64_t ld_q = 208;
  const int sms = context().device().sm_count;
  const auto x = make_data(Data::kOutliers, rows, cols, 3);
  std::vector<uint16_t> strided(static_cast<size_t>(rows * ld), 0x7fc0);
  const auto dense = reference::to_bf16_bits(x);
  for (int64_t r = 0; r < rows; ++r) {
    std::copy_n(&dense[static_cast<size_t>(r * cols)], cols, &strided[static_cast<size_t>(r * ld)]);
  }
  const DeviceBuffer input(context(), strided);
  const DeviceBuffer q(context(), static_cast<size_t>(rows * ld_q));
  const Quantized device(context(), x);
  auto amax_arguments = amax_args(amax_for(spec), sms, {&device.operand, 1});
  amax_arguments.tensors[0].x = input.as();
  amax_arguments.tensors[0].ld = ld;
  auto arguments = cast_args(spec, sms, {&device.operand, 1});
  arguments.tensors[0].x = input.as();
  arguments.tensors[0].ld = ld;
  if (spec.q) arguments.tensors[0].q = q.as<uint8_t>();
  arguments.tensors[0].ld_q = ld_q;
  const auto amax = context().kernel(amax_for(spec));
  const auto cast = context().kernel(spec);
  F8_ASSERT_OK(amax);
  F8_ASSERT_OK(cast);
  F8_ASSERT_OK(launch_amax(driver(), **amax, amax_arguments, true, nullptr));
  F8_ASSERT_OK(launch_cast(driver(), **cast, arguments, true, nullptr));
  const AmaxOver over =
      spec.scale == codegen::ScaleMode::kAxis ? AmaxOver::kRow : AmaxOver::kTensor;
  if (spec.q) {
    const auto expected = reference::cast(x, over, spec.out, spec.pow2);
    const auto bytes = q.download<uint8_t>();
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < ld_q; ++c) {
        const int want = c < cols ? expected.bits[static_cast<size_t>(r * cols + c)] : kPoison;
        ASSERT_EQ(int{bytes[static_cast<size_t>(r * ld_q + c)]}, want) << r << ", " << c;
      }
    }
  }
  if (spec.qt) {
    const auto expected = reference::cast_transposed(x, over, spec.out, spec.pow2);
    expect_same_bytes(expected.bits, rows, device.qt.download<uint8_t>(), device.ld_qt, "qt");
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
