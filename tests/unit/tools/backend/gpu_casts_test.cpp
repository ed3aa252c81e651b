// Casts of weights and of what casts compute: what is checked before they are timed, and what cannot be opened.
#include "tests/unit/tools/backend/gpu_backend_fixture.hpp"
#include "tools/tuner/backend/weight_list.hpp"

namespace f8::tuner {
namespace {

using testing::g_fakes;
using testing::GpuBackendTest;

TEST_F(GpuBackendTest, ProducersThatAreNotWrittenOrOfOtherOperandsAreWrong) {
  const Producer glu{.source = codegen::Computed::kGluBackward};
  const Recipe recipe = find_recipe("rowwise").value();
  ASSERT_TRUE(backend_->open_producer(recipe, glu, {96, 80}));
  for (const Impl impl : {Impl::kProduce, Impl::kProduceApart}) {
    ASSERT_TRUE(backend_->add({.impl = impl}));
  }
  EXPECT_FALSE(backend_->add({.impl = Impl::kCastList})) << "no weights are open";
  for (const int candidate : {0, 1}) {
    const auto right = backend_->verify(candidate);
    ASSERT_TRUE(right);
    EXPECT_TRUE(right->right) << right->what;
    EXPECT_GT(right->rel_err, 0);
  }
  cuda_.emulate = false;
  const auto nothing = backend_->verify(0);
  ASSERT_TRUE(nothing);
  EXPECT_FALSE(nothing->right);
  EXPECT_NE(nothing->what.find("q of result 0[0][0] is not finite"), std::string::npos)
      << nothing->what;
  const auto large = backend_->open_producer(recipe, glu, {1 << 20, 1 << 14});
  ASSERT_FALSE(large);
  EXPECT_EQ(large.error().code, ErrorCode::kOutOfMemory);
  EXPECT_NE(large.error().message.find("glu_backward/silu of 1048576 x 16384 takes"),
            std::string::npos)
      << large.error().message;
}

TEST_F(GpuBackendTest, CopiesThatDifferOrAreNotWrittenAreWrong) {
  const Recipe recipe = find_recipe("tensorwise").value();
  const std::vector<runtime::MatrixSize> weights = {{64, 48}, {32, 80}};
  ASSERT_TRUE(backend_->open_weights(recipe, weights));
  EXPECT_EQ(backend_->sets(), 3);
  for (const Impl impl : {Impl::kCastEach, Impl::kCastList}) {
    ASSERT_TRUE(backend_->add({.impl = impl, .config = ""}));
  }
  ASSERT_TRUE(backend_->verify(0)->right);
  const auto same = backend_->verify(1);
  ASSERT_TRUE(same);
  EXPECT_TRUE(same->right) << same->what;
  cuda_.emulate = false;
  const auto nothing = backend_->verify(1);
  ASSERT_TRUE(nothing);
  EXPECT_FALSE(nothing->right);
  EXPECT_EQ(nothing->what, "weight 0 (64 x 48): its fp8 copies were not written");
  cuda_.emulate = true;
  g_fakes.change_copy = 3;  // two for each weight
  const auto other = backend_->verify(1);
  ASSERT_TRUE(other);
  EXPECT_FALSE(other->right);
  EXPECT_EQ(other->what,
            "weight 1 (32 x 80): its fp8 copies are not those that it has cast the other way");
}

TEST_F(GpuBackendTest, WeightsThatCannotBeOpenedSayWhy) {
  const Recipe recipe = find_recipe("rowwise").value();
  const auto too_many = backend_->open_weights(recipe, parse_weight_list("8192,8192*100").value());
  ASSERT_FALSE(too_many);
  EXPECT_EQ(too_many.error().code, ErrorCode::kOutOfMemory);
  EXPECT_NE(too_many.error().message.find("a list of 100 weights and their copies takes 25.0 GiB"),
            std::string::npos)
      << too_many.error().message;
  ASSERT_TRUE(backend_->open_weights(recipe, parse_weight_list("64,48").value()));
  EXPECT_FALSE(backend_->add({.impl = Impl::kFloat8, .config = ""})) << "no linear is open";
  // The next problem is not affected.
  ASSERT_TRUE(backend_->open(problem(Op::kOutput, "tensorwise", {64, 48, 80})));
  EXPECT_FALSE(backend_->add({.impl = Impl::kCastList, .config = ""})) << "no weights are open";
}

}  // namespace
}  // namespace f8::tuner
