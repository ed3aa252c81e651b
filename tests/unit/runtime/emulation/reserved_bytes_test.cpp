// The reserved bytes of a workspace: an emulated device tells when somebody else wrote to them.
#include <gtest/gtest.h>

#include <cstring>
#include <float8/float8.hpp>
#include <vector>

#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;

constexpr int64_t kTokens = 24;
constexpr int64_t kOutFeatures = 32;
constexpr int64_t kInFeatures = 48;

class ReservedBytesOfAWorkspace : public ::testing::Test {
 protected:
  static float8::Linear plan(const float8::Context& context) {
    float8::LinearDesc desc;
    desc.m_max = kTokens;
    desc.n = kOutFeatures;
    desc.k = kInFeatures;
    desc.recipe = float8::Recipe::rowwise();
    return float8::Linear::plan(context, desc).value();
  }
  [[nodiscard]] float8::Status forward() {
    return linear_.forward(
        {.x = {x_.data()}, .w = {w_.data()}, .y = {y_.data()}, .workspace = {workspace_.data()}},
        nullptr);
  }
  void expect_found(const float8::Status& status) const {
    EXPECT_EQ(status.code(), FLOAT8_CUDA);
    EXPECT_NE(status.message().find("somebody wrote to the first " + std::to_string(reserved_) +
                                    " bytes of the workspace"),
              std::string::npos)
        << status.message();
  }

  float8::Context context_ = float8::Context::create(0, {.cache_dir = "", .emulate = true}).value();
  float8::Linear linear_ = plan(context_);
  Buffer x_{reference::random_matrix(kTokens, kInFeatures, 1)},
      w_{reference::random_matrix(kOutFeatures, kInFeatures, 2)};
  Buffer y_{kTokens * kOutFeatures * 2};
  Buffer workspace_{linear_.workspace_bytes() + 4096};
  size_t reserved_ = context_.workspace_reserved_bytes();
};

TEST_F(ReservedBytesOfAWorkspace, AreAtItsFront) {
  EXPECT_GT(reserved_, 0U);
  EXPECT_LE(reserved_, size_t{2} << 20) << "the README says 2 MiB";
  EXPECT_LE(reserved_, linear_.workspace_bytes());
  EXPECT_EQ(float8_workspace_reserved_bytes(nullptr), 0U);
}

TEST_F(ReservedBytesOfAWorkspace, AnyByteThatSomebodyWroteIsFound) {
  ASSERT_TRUE(forward());
  ASSERT_TRUE(forward());
  for (const size_t at : {size_t{0}, size_t{4096}, reserved_ - 1}) {
    workspace_.data()[at] ^= 1;
    expect_found(forward());
    // It is said once; then what is there counts as the contents of a new workspace.
    EXPECT_TRUE(forward());
  }
  for (size_t i = 0; i < workspace_.bytes(); ++i) {
    workspace_.data()[i] = static_cast<uint8_t>(i);
  }
  expect_found(forward());
}

TEST_F(ReservedBytesOfAWorkspace, WhatLiesBehindIsFree) {
  ASSERT_TRUE(forward());
  std::memset(workspace_.data() + reserved_, 7, workspace_.bytes() - reserved_);
  EXPECT_TRUE(forward());
}

TEST_F(ReservedBytesOfAWorkspace, SetToZeroTheyAreANewWorkspace) {
  ASSERT_TRUE(forward());
  std::memset(workspace_.data(), 0, reserved_);
  EXPECT_TRUE(forward());
}

TEST_F(ReservedBytesOfAWorkspace, OfAContextThatIsGoneAreForgotten) {
  ASSERT_TRUE(forward());
  linear_ = plan(context_ = float8::Context::create(0, {.cache_dir = "", .emulate = true}).value());
  workspace_.data()[0] ^= 1;
  EXPECT_TRUE(forward());
}

// A workspace whose launch counts lie apart is all free between calls.
TEST_F(ReservedBytesOfAWorkspace, MayLieApart) {
  Buffer counts(reserved_);
  const float8::Step step{.launch_counts = {counts.data()}};
  const auto apart = [&] {
    return linear_.forward({.x = {x_.data()},
                            .w = {w_.data()},
                            .y = {y_.data()},
                            .workspace = {workspace_.data()},
                            .step = &step},
                           nullptr);
  };
  ASSERT_TRUE(forward());
  const std::vector<uint8_t> y(y_.data(), y_.data() + y_.bytes());
  std::memset(counts.data(), 0, reserved_);
  for (const int value : {7, 9}) {
    std::memset(workspace_.data(), value, workspace_.bytes());
    std::memset(y_.data(), value, y_.bytes());
    ASSERT_TRUE(apart());
    EXPECT_EQ(std::memcmp(y.data(), y_.data(), y.size()), 0);
  }
  counts.data()[reserved_ - 1] ^= 1;
  expect_found(apart());
}

// Quantizers and lists of them keep off them: they may share the workspace of linears.
TEST_F(ReservedBytesOfAWorkspace, CastsOfTheWeightKeepThem) {
  const auto quantizer =
      float8::Quantizer::plan(
          context_, {.operand = FLOAT8_WEIGHT, .rows_max = kOutFeatures, .cols = kInFeatures})
          .value();
  const auto casts = float8::QuantizerList::plan(context_, {quantizer, quantizer}).value();
  ASSERT_LE(casts.workspace_bytes(), workspace_.bytes());
  Buffer tensor(quantizer.tensor_bytes()), other(quantizer.tensor_bytes());
  const std::vector<float8::QuantizeArgs> args = {{.x = {w_.data()}, .tensor = {tensor.data()}},
                                                  {.x = {w_.data()}, .tensor = {other.data()}}};
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(forward());
    ASSERT_TRUE(quantizer.run(with_workspace(args[0], workspace_.data()), nullptr));
    ASSERT_TRUE(casts.run({.workspace = {workspace_.data()}}, args, nullptr));
    const float8::Status status = forward();
    EXPECT_TRUE(status) << status.message();
  }
}

}  // namespace
}  // namespace f8::runtime
