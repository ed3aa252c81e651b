#include "tools/tuner/backend/candidate.hpp"

#include <gtest/gtest.h>

namespace f8::tuner {
namespace {

TEST(Candidate, ReadsWhatItWrites) {
  for (const char* impl : {"generated", "generated+bias", "generated+bias+amax+add", "cublaslt",
                           "cublaslt_tensorwise", "bf16_cublaslt", "float8", "float8_reused",
                           "bf16", "cast_list", "cast_each", "produce", "produce_apart", "copy"}) {
    const auto candidate = parse_candidate(impl, "h1");
    ASSERT_TRUE(candidate) << impl;
    EXPECT_EQ(impl_text(*candidate), impl);
    EXPECT_EQ(candidate->config, "h1");
  }
  EXPECT_EQ(parse_candidate("generated", "")->epilogue, Epilogue{});
  for (const char* impl : {"", "generated+", "generated+plain", "generatedbias", "cublaslt+bias",
                           "generated+scale", "generated+bias+bias"}) {
    EXPECT_FALSE(parse_candidate(impl, "")) << impl;
  }
}

TEST(Epilogue, ReadsWhatItWrites) {
  for (const char* text : {"bias", "amax", "add", "bias+amax", "bias+add", "bias+amax+add"}) {
    const auto epilogue = parse_epilogue(text);
    ASSERT_TRUE(epilogue) << text;
    EXPECT_EQ(to_string(*epilogue), text);
  }
  EXPECT_EQ(parse_epilogue("amax+bias").value(), parse_epilogue("bias+amax").value());
  EXPECT_EQ(to_string(Epilogue{}), "plain");
  for (const char* text : {"", "plain", "bias+", "+bias", "bias+bias", "bias,amax"}) {
    EXPECT_FALSE(parse_epilogue(text)) << text;
  }
}

}  // namespace
}  // namespace f8::tuner
