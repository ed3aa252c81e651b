// Producers as the command line names them, what they compute, and the bytes that they move.
#include "tools/tuner/backend/producer.hpp"

#include <gtest/gtest.h>

namespace f8::tuner {
namespace {

using codegen::Activation;
using codegen::Computed;

TEST(Producer, HasAnActivationOrIsANorm) {
  const auto producers =
      parse_producers("glu,glu_backward/gelu,activation/relu2,activation_backward,rms_norm")
          .value();
  const std::vector<Producer> expected = {
      {.source = Computed::kGlu},
      {.source = Computed::kGluBackward, .activation = Activation::kGelu},
      {.source = Computed::kActivation, .activation = Activation::kRelu2},
      {.source = Computed::kActivationBackward},
      {.source = Computed::kRmsNorm}};
  EXPECT_EQ(producers, expected);
  std::string text;
  for (const Producer& each : producers) text += to_string(each) + ",";
  EXPECT_EQ(text, "glu/silu,glu_backward/gelu,activation/relu2,activation_backward/silu,rms_norm,");
}

TEST(Producer, BadInputNamesWhatCanBe) {
  const auto refused = [](const auto& result) {
    EXPECT_FALSE(result);
    return result ? std::string() : result.error().message;
  };
  EXPECT_EQ(refused(parse_producers("swiglu")),
            "unknown source 'swiglu'; one of glu, glu_backward, activation, activation_backward, "
            "rms_norm, layer_norm");
  EXPECT_FALSE(parse_producers("glu,"));
  EXPECT_FALSE(parse_producers("glu/"));
  EXPECT_FALSE(parse_producers("glu/tanh"));
  EXPECT_FALSE(parse_producers("rms_norm/silu"));
  EXPECT_FALSE(parse_producers("merged_glu_backward")) << "its tensor has gate and up";
  for (const char* bad :
       {"", "8192", "8192,", "0,16", "-1,16", "8,24", "8,0", "8,16;", "8,16,16", "2000000000,16"}) {
    EXPECT_FALSE(parse_sizes(bad)) << bad;
  }
  const auto sizes = parse_sizes("1,16;8192,14336").value();
  ASSERT_EQ(sizes.size(), 2u);
  EXPECT_EQ(sizes[1].rows, 8192);
  EXPECT_EQ(sizes[1].cols, 14336);
}

// The slopes are those of the values, by differences.
TEST(Producer, ComputesGradientsOfWhatItComputes) {
  constexpr double kStep = 1e-6;
  for (const Activation activation :
       {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu2}) {
    const auto of = [&](Computed source, double x) {
      return produced({.source = source, .activation = activation}, {x, 0.75, -1.5});
    };
    for (const double x : {-2.0, -0.3, 0.4, 1.7}) {
      const auto slope = [&](Computed source) {
        return (of(source, x + kStep).first - of(source, x - kStep).first) / (2 * kStep);
      };
      EXPECT_NEAR(of(Computed::kActivationBackward, x).first, 0.75 * slope(Computed::kActivation),
                  1e-6);
      const Produced both = of(Computed::kGluBackward, x);
      EXPECT_NEAR(both.first, -1.5 * slope(Computed::kGlu), 1e-6);
      EXPECT_NEAR(both.second, -1.5 * of(Computed::kActivation, x).first, 1e-12);
    }
  }
}

// Bytes of an element: delayed casts read the operands once and write both copies; a launch of maxima reads them too,
// and may leave the results for the cast.
TEST(Producer, CountsTheBytesOfItsLaunches) {
  const auto bytes = [](const char* source, const char* recipe) {
    const auto moved =
        bytes_of(parse_producers(source).value().front(), find_recipe(recipe).value(), {1, 16});
    EXPECT_TRUE(moved);
    return std::pair{moved->fused / 16, moved->apart / 16};
  };
  using Pair = std::pair<double, double>;
  EXPECT_EQ(bytes("glu", "delayed"), Pair(4 + 2, 6 + 2 + 2));
  EXPECT_EQ(bytes("glu", "tensorwise"), Pair(4 + 2 + 2 + 2, 6 + 4 + 2));
  EXPECT_EQ(bytes("glu", "rowwise"), Pair(4 + 2 + 2 + 2, 6 + 4 + 2));
  EXPECT_EQ(bytes("glu_backward", "delayed"), Pair(6 + 4, 10 + 4 + 4));
  EXPECT_EQ(bytes("glu_backward", "rowwise"), Pair(6 + 6 + 4, 10 + 8 + 4));
  EXPECT_EQ(bytes("glu_backward", "tensorwise"), Pair(6 + 4 + 4 + 4, 10 + 8 + 4));
  EXPECT_EQ(bytes("rms_norm", "rowwise"), Pair(2 + 2 + 2, 4 + 4 + 2));
}

}  // namespace
}  // namespace f8::tuner
