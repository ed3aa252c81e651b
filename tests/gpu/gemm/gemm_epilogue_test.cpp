// The epilogue of generated GEMMs: cluster split-K, mixed scales, bias, adding
// to what is there, the maximum of the result; and that its bits are the same every time.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/gpu/gemm_operands.hpp"

namespace f8::runtime::gpu {
namespace {

using codegen::ScaleMode;

struct Variant {
  const char* config;
  ScaleMode scale;
  bool fast;
  Dtype d = Dtype::kBf16;
};

std::string text(const Variant& v) {
  return f8::format("{} {} {} {}", v.config, to_string(v.scale), v.fast ? "fast" : "precise",
                    to_string(v.d));
}

class GemmEpilogueTest : public GpuTest {
 protected:
  static GemmDesc describe(const Variant& v, Shape own) {
    return {.gemm = Gemm::kOutput, .shape = own, .d = v.d, .scale = v.scale, .fast = v.fast};
  }
  std::shared_ptr<const GemmPlan> plan(const GemmDesc& desc, const char* config) {
    auto made = GemmPlan::create(
        context_, desc, GemmChoice{parse_gemm_kernel(Provider::kGenerated, config).value()});
    EXPECT_TRUE(made) << (made ? "" : made.error().message);
    return made ? *made : nullptr;
  }
  static double bound(const GemmDesc& desc) { return desc.fast ? kFastBound : kPreciseBound; }
  static size_t bytes(const GemmDesc& desc) {
    return static_cast<size_t>(desc.shape.m * desc.shape.n) * size_bytes(desc.d);
  }
};

// Whole waves of tiles, ping-pong, both clusters, a split, results that leave by 64 bytes; each
// type of result.
constexpr Variant kVariants[] = {
    {"128x256s4c2x1w2g8", ScaleMode::kTensor, true},
    {"128x256s4c1x2w2g8", ScaleMode::kTensor, false, Dtype::kF32},
    {"256x128s4c2x1w2g8", ScaleMode::kAxis, true},
    {"128x128s5c1x2w2pg16", ScaleMode::kAxis, false},
    {"64x128s6c1x1w1g8", ScaleMode::kTensor, true, Dtype::kF32},
    {"128x128s5c1x1k2w2g8", ScaleMode::kTensor, true},
    {"64x256s4c1x1k4w1g8", ScaleMode::kAxis, false, Dtype::kF32},
    {"128x256s4c1x2w2g8", ScaleMode::kBlock128x128, false},
    {"256x128s4c2x1w2g8", ScaleMode::kBlock1x128, false},
    {"128x128s5c1x1w2pg8", ScaleMode::kBlock128x128, false, Dtype::kF32},
    {"128x256s4c2x1w2g8", ScaleMode::kAxis, true, Dtype::kF16},
    {"128x128s5c1x1w2pg8", ScaleMode::kTensor, false, Dtype::kF16},
    {"128x160s5c1x2w2pg16", ScaleMode::kAxis, true},
    {"128x160s4c1x1w2g16", ScaleMode::kTensor, false, Dtype::kF32},
    {"128x224s3c2x1w2g16", ScaleMode::kTensor, false, Dtype::kF16},
};
constexpr Shape kOdd{401, 592, 720};  // no tile divides it, and k ends inside a block
constexpr float kLarge = 64;          // so that normal values show beside the results

reference::Matrix make_bias() {
  auto bias = reference::random_matrix(1, kOdd.n, 99);
  for (float& value : bias.values) value *= kLarge;
  return bias;
}

TEST_F(GemmEpilogueTest, SplitContractions) {
  const Variant variants[] = {
      {"128x128s5c1x1k2w2g8", ScaleMode::kTensor, true},
      {"128x128s4c1x1k4w2g8", ScaleMode::kAxis, true},
      {"128x128s4c1x1k4w2g8", ScaleMode::kTensor, false},
      {"128x128s5c1x1k2w2g8", ScaleMode::kAxis, false},
      {"64x256s4c1x1k2w1g8", ScaleMode::kTensor, true, Dtype::kF32},
      {"64x256s4c1x1k4w1g8", ScaleMode::kAxis, false},
      {"64x128s6c1x1k2w1g16", ScaleMode::kTensor, true},
      {"64x128s6c1x1k4w1g4", ScaleMode::kAxis, true},
  };
  // K of fewer blocks than shares, of one element more than a block, and long ones; the
  // last shape has more tiles than there are clusters at once.
  const Shape shapes[] = {{17, 16, 16},    {1, 48, 48},     {130, 272, 128}, {129, 592, 144},
                          {401, 592, 720}, {64, 256, 4096}, {300, 64, 8208}, {1410, 1168, 400}};
  for (const Variant& v : variants) {
    for (const Shape& own : shapes) {
      SCOPED_TRACE(f8::format("{} shape {} seed 7", text(v), to_string(own)));
      const GemmDesc desc = describe(v, own);
      const auto gemm = plan(desc, v.config);
      ASSERT_NE(gemm, nullptr);
      const GemmOperands x(context(), own, desc.a, desc.b, v.scale, 7);
      const DeviceBuffer d(context(), bytes(desc));
      F8_ASSERT_OK(gemm->run(x.call(d, own.m), nullptr, nullptr));
      EXPECT_LE(reference::relative_error(reference::matmul(x.a, x.b), result(d, v.d)),
                bound(desc));
      EXPECT_TRUE(d.guards_are_whole());
      if (HasFailure()) return;
    }
  }
}

TEST_F(GemmEpilogueTest, OneScaleForOneOperand) {
  for (const char* config :
       {"128x256s4c2x1w2g8", "128x128s5c1x2w2pg8", "64x256s4c1x1k2w1g8", "64x64s6c1x1w1g8"}) {
    for (const bool fast : {true, false}) {
      for (const bool scalar_a : {true, false}) {
        SCOPED_TRACE(f8::format("{} {} the tensor's scale for {}", config,
                                fast ? "fast" : "precise", scalar_a ? 'a' : 'b'));
        GemmDesc desc{.shape = kOdd, .scale = ScaleMode::kAxis, .fast = fast};
        desc.scalar_a = scalar_a;
        desc.scalar_b = !scalar_a;
        const auto gemm = plan(desc, config);
        ASSERT_NE(gemm, nullptr);
        const GemmOperands x(context(), kOdd, desc.a, desc.b, desc.scale, 7, scalar_a, !scalar_a);
        const DeviceBuffer d(context(), bytes(desc));
        F8_ASSERT_OK(gemm->run(x.call(d, kOdd.m), nullptr, nullptr));
        EXPECT_LE(reference::relative_error(reference::matmul(x.a, x.b), d.bf16()), bound(desc));
      }
    }
  }
}

TEST_F(GemmEpilogueTest, Bias) {
  const auto bias = make_bias();
  for (const Variant& v : kVariants) {
    SCOPED_TRACE(text(v));
    GemmDesc desc = describe(v, kOdd);
    desc.bias = true;
    const auto gemm = plan(desc, v.config);
    ASSERT_NE(gemm, nullptr);
    const GemmOperands x(context(), kOdd, desc.a, desc.b, v.scale, 7);
    const DeviceBuffer d(context(), bytes(desc));
    const DeviceBuffer device_bias(context(), reference::to_bytes(bias, desc.d));
    GemmCall call = x.call(d, kOdd.m);
    call.bias = device_bias.as();
    F8_ASSERT_OK(gemm->run(call, nullptr, nullptr));
    auto expected = reference::matmul(x.a, x.b);
    const auto plain = expected;
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] += static_cast<double>(bias.values[i % static_cast<size_t>(kOdd.n)]);
    }
    const auto values = result(d, v.d);
    EXPECT_LE(reference::relative_error(expected, values), bound(desc));
    EXPECT_GT(reference::relative_error(plain, values), 0.02) << "the bias changes the result";
    EXPECT_TRUE(d.guards_are_whole());
    if (HasFailure()) return;
  }
}

TEST_F(GemmEpilogueTest, AddsToWhatIsThere) {
  const auto there = reference::random_matrix(kOdd.m, kOdd.n, 55);
  for (const Variant& variant : kVariants) {
    for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      Variant v = variant;
      v.d = type;
      SCOPED_TRACE(text(v));
      GemmDesc desc = describe(v, kOdd);
      desc.add = true;
      const auto gemm = plan(desc, v.config);
      ASSERT_NE(gemm, nullptr);
      const GemmOperands x(context(), kOdd, desc.a, desc.b, v.scale, 7);
      const auto plain = reference::matmul(x.a, x.b);
      std::vector<float> before = there.values;
      for (float& value : before) value *= kLarge;
      const reference::Matrix old{.rows = kOdd.m, .cols = kOdd.n, .values = before};
      const DeviceBuffer d(context(), reference::to_bytes(old, type));
      auto expected = plain;
      for (int round = 1; round <= 2; ++round) {
        F8_ASSERT_OK(gemm->run(x.call(d, kOdd.m), nullptr, nullptr));
        for (size_t i = 0; i < expected.size(); ++i) {
          expected[i] = round * plain[i] + static_cast<double>(before[i]);
        }
        // Each bf16 addition rounds twice: the GEMM and the sum.
        EXPECT_LE(reference::relative_error(expected, result(d, type)), 2 * bound(desc)) << round;
      }
      EXPECT_TRUE(d.guards_are_whole());
      if (HasFailure()) return;
    }
  }
}

// The maximum is exact: that of the fp32 results, which an fp32 output shows, and which bf16
// rounds.
TEST_F(GemmEpilogueTest, AmaxOfTheResult) {
  const auto bias = make_bias();
  for (const Variant& variant : kVariants) {
    for (const Dtype type : {Dtype::kF32, Dtype::kBf16}) {
      for (const bool with_bias : {false, true}) {
        Variant v = variant;
        v.d = type;
        SCOPED_TRACE(text(v) + (with_bias ? " +bias" : ""));
        GemmDesc desc = describe(v, kOdd);
        desc.amax = true;
        desc.bias = with_bias;
        const auto gemm = plan(desc, v.config);
        ASSERT_NE(gemm, nullptr);
        GemmOperands x(context(), kOdd, desc.a, desc.b, v.scale, 7);
        const DeviceBuffer d(context(), bytes(desc));
        DeviceBuffer amax(context(), std::vector<uint32_t>(4));
        const DeviceBuffer device_bias(context(), reference::to_bytes(bias, desc.d));
        GemmCall call = x.call(d, kOdd.m);
        call.amax = amax.as<uint32_t>();
        call.bias = with_bias ? device_bias.as() : nullptr;
        F8_ASSERT_OK(gemm->run(call, nullptr, nullptr));
        const float found = amax.download<float>()[0];
        double most = 0;
        for (const double value : result(d, type)) most = std::max(most, std::abs(value));
        const auto rounded = type == Dtype::kF32 ? found : decode_bf16(encode_bf16(found));
        EXPECT_EQ(rounded, static_cast<float>(most));
        EXPECT_EQ(amax.download<uint32_t>()[1], 0U) << "one word";
        EXPECT_TRUE(d.guards_are_whole());

        // Raised, not overwritten.
        const std::vector<float> larger(4, found * 2);
        amax.upload(larger.data(), 4);
        F8_ASSERT_OK(gemm->run(call, nullptr, nullptr));
        EXPECT_EQ(amax.download<float>()[0], found * 2);

        // NaN is above all.
        auto scales = device_layout(x.b);
        scales[0] = std::numeric_limits<float>::quiet_NaN();
        x.inv_b.upload(scales.data(), scales.size() * sizeof(float));
        F8_ASSERT_OK(gemm->run(call, nullptr, nullptr));
        EXPECT_TRUE(std::isnan(amax.download<float>()[0]));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(GemmEpilogueTest, EverythingAtOnce) {
  const auto bias = make_bias();
  for (const Variant& variant : kVariants) {
    Variant v = variant;
    v.d = Dtype::kF32;
    SCOPED_TRACE(text(v));
    GemmDesc desc = describe(v, kOdd);
    desc.bias = desc.add = desc.amax = true;
    const auto gemm = plan(desc, v.config);
    ASSERT_NE(gemm, nullptr);
    const GemmOperands x(context(), kOdd, desc.a, desc.b, v.scale, 7);
    const std::vector<float> before(static_cast<size_t>(kOdd.m * kOdd.n), 300.0F);
    const DeviceBuffer d(context(), before);
    const DeviceBuffer amax(context(), std::vector<uint32_t>(1));
    const DeviceBuffer device_bias(context(), reference::to_bytes(bias, desc.d));
    GemmCall call = x.call(d, kOdd.m);
    call.bias = device_bias.as();
    call.amax = amax.as<uint32_t>();
    F8_ASSERT_OK(gemm->run(call, nullptr, nullptr));
    auto expected = reference::matmul(x.a, x.b);
    double most = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] += static_cast<double>(bias.values[i % static_cast<size_t>(kOdd.n)]);
      most = std::max(most, std::abs(expected[i]));
      expected[i] += 300;
    }
    EXPECT_LE(reference::relative_error(expected, d.f32()), bound(desc));
    EXPECT_NEAR(static_cast<double>(amax.download<float>()[0]), most, most * 0.02);
    if (HasFailure()) return;
  }
}

// Back to back, so that an early start of the next launch could show.
TEST_F(GemmEpilogueTest, SameBitsEveryTime) {
  const Shape own{1000, 1040, 2064};
  for (const Variant& v : kVariants) {
    SCOPED_TRACE(text(v));
    const GemmDesc desc = describe(v, own);
    const auto gemm = plan(desc, v.config);
    ASSERT_NE(gemm, nullptr);
    const GemmOperands x(context(), own, desc.a, desc.b, v.scale, 9);
    DeviceBuffer d(context(), bytes(desc));
    std::vector<uint8_t> first;
    for (int i = 0; i < 5; ++i) {
      d.poison();
      for (int run = 0; run < 4; ++run) {
        F8_ASSERT_OK(gemm->run(x.call(d, own.m), nullptr, nullptr));
      }
      const auto bits = d.download<uint8_t>();
      if (i == 0) first = bits;
      ASSERT_EQ(bits, first) << "round " << i;
    }
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
