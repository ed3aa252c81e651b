// The keys, linears and counts of MLPs.
#include "recipes/mlp.hpp"

#include <gtest/gtest.h>

namespace f8 {
namespace {

TEST(Mlp, HasAKeyLinearsAndCounts) {
  const Recipe rowwise = *find_recipe("rowwise");
  const MlpShape gated{{8192, 1408, 2048}, true, {}};
  const Problem dense = Problem::make(Op::kMlp, rowwise, to_dims(gated)).value();
  EXPECT_EQ(dense.key(), "mlp/rowwise+fast/e4m3.e4m3.bf16/m8192n1408k2048gate1e0skew0");
  EXPECT_EQ(Problem::parse(dense.key()).value(), dense);
  EXPECT_EQ(mlp_shape(dense.dims), gated);
  EXPECT_EQ(dense.shape(), (Shape{8192, 1408, 2048}));
  EXPECT_EQ(dense.groups(), Groups());
  EXPECT_EQ(linears_of(gated),
            (std::vector<Shape>{{8192, 1408, 2048}, {8192, 1408, 2048}, {8192, 2048, 1408}}));
  double flops = 0;
  for (const Shape& linear : linears_of(gated)) {
    flops += Problem::make(Op::kLinear, rowwise, linear)->flops();
  }
  EXPECT_EQ(dense.flops(), flops);
  EXPECT_EQ(dense.bytes(), 2.0 * (4 * 8192 * 2048 + 6.0 * 8192 * 1408 + 6 * 1408 * 2048));

  const MlpShape plain{{64, 128, 32}, false, {}};
  EXPECT_EQ(linears_of(plain), (std::vector<Shape>{{64, 128, 32}, {64, 32, 128}}));
  const MlpShape experts{{64, 128, 32}, true, {.experts = 4, .skew = kZipf}};
  const Problem of_experts = Problem::make(Op::kMlp, rowwise, to_dims(experts)).value();
  EXPECT_EQ(of_experts.groups(), experts.groups);
  EXPECT_EQ(of_experts.group_shape().m, 16);
  EXPECT_FALSE(is_grouped(Op::kMlp) || is_gemm(Op::kMlp) || is_attention(Op::kMlp));
  EXPECT_EQ(linears_of(experts), (std::vector<Shape>{{64, 256, 32}, {64, 32, 128}}));
  EXPECT_EQ(of_experts.bytes(), 2.0 * (4 * 64 * 32 + 6 * 64 * 128 + 4 * 6 * 128 * 32));
}

TEST(Mlp, BadDimsAreRefused) {
  const auto words = [](const char* dims) {
    const auto problem = Problem::parse(f8::format("mlp/rowwise/e4m3.e4m3.bf16/{}", dims));
    return problem ? "no error" : problem.error().message;
  };
  EXPECT_NE(words("m64n128k32gate1e0skew1").find("without experts"), std::string::npos);
  EXPECT_NE(words("m64n128k32gate0e4skew0").find("without a gate"), std::string::npos);
  EXPECT_NE(words("m64n120k32gate1e0skew0").find("n (hidden features) is 120"), std::string::npos);
  EXPECT_NE(words("m64n128k32gate2e0skew0").find("gate (0 or 1) is 2"), std::string::npos);
  EXPECT_NE(words("m64n128k32").find("gate"), std::string::npos);
}

}  // namespace
}  // namespace f8
