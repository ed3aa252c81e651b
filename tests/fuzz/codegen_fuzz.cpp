// The parsers of kernel keys and configurations: whatever the text, they answer with a legal value
// that writes itself back as the same text, or with one readable line.
#include <gtest/gtest.h>

#include <vector>

#include "codegen/kernel_spec.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace f8::codegen {
namespace {

const std::vector<std::string> kKeys = {
    "amax/bf16/tensor",
    "amax/f32/rowcol+tensor/flag/list",
    "cast/bf16.e4m3/tensor/q+qt",
    "cast/f16.e5m2/delayed+axis/q+qt/pow2/hold/count/sums/flag",
    "cast/f32.e4m3/block1x128/q/count/list",
    "cast/bf16.e4m3/block128x128+block1x128/q+qt/pow2/hold",
    "quantize/bf16.e4m3/axis/q+qt/pow2/hold",
    "gemm/e4m3.e4m3.bf16/tensor/fast/128x256s4c2x1w2",
    "gemm/e5m2.e4m3.f16/axis/precise/128x128s5c1x1w2p/+bias+add+amax",
    "gemm2/e4m3.e4m3.f32/block128x128/precise/128x128s4c1x1w2",
    "gemm/e4m3.e4m3.bf16/tensor/fast/128x128s5c1x1k2w2",
    "scale_update",
    "found_inf",
    "column_sums/f16",
    "bias_grad/f32",
};

TEST(Fuzz, KernelKeys) {
  for (const std::string& text : kKeys) {
    const auto spec = parse_kernel_spec(text);
    ASSERT_TRUE(spec) << spec.error().message;
    EXPECT_EQ(key(*spec), text);
  }
  int accepted = 0;
  fuzz::run(kKeys, [&accepted](std::string_view text) {
    const auto spec = parse_kernel_spec(text);
    if (!spec) {
      EXPECT_EQ(spec.error().code, ErrorCode::kInvalidArgument);
      fuzz::expect_readable(spec.error().message);
      return;
    }
    ++accepted;
    EXPECT_TRUE(validate(*spec));
    const auto again = parse_kernel_spec(key(*spec));
    ASSERT_TRUE(again) << again.error().message;
    EXPECT_TRUE(*again == *spec) << text;
    // GEMM keys have numbers, which may be written with leading zeros.
    if (!std::holds_alternative<GemmSpec>(*spec)) {
      EXPECT_EQ(key(*spec), text);
    }
  });
  EXPECT_TRUE(accepted > 0 || fuzz::options().iterations < 1000);
}

TEST(Fuzz, GemmConfigurations) {
  const std::vector<std::string> corpus = {"128x256s4c2x1w2g8", "64x64s8c1x1w1g1",
                                           "128x128s5c1x2w2pg16", "128x128s4c1x1k4w2g8"};
  int accepted = 0;
  fuzz::run(corpus, [&accepted](std::string_view text) {
    const auto config = parse_gemm_config(text);
    if (!config) {
      EXPECT_EQ(config.error().code, ErrorCode::kInvalidArgument);
      fuzz::expect_readable(config.error().message);
      return;
    }
    ++accepted;
    const auto again = parse_gemm_config(key(*config));
    ASSERT_TRUE(again) << key(*config);
    EXPECT_TRUE(*again == *config) << text;
  });
  EXPECT_TRUE(accepted > 0 || fuzz::options().iterations < 1000);
}

}  // namespace
}  // namespace f8::codegen
