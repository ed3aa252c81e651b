// Linears whose backward casts x and the weight again, by the scales that forward found.
#include <cmath>

#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::describe;
using testing::FakeCuda;
using testing::Fixture;
using testing::says;

// A maximum that is not finite decides a scale as well, under both policies.
TEST(LinearRecompute, KeepsTheScalesOfTensorsThatAreNotFinite) {
  FakeCuda cuda;
  LinearDesc desc = describe("tensorwise", {64, 32, 48});
  for (const NonFinite policy : {NonFinite::kPropagate, NonFinite::kSaturate}) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      SCOPED_TRACE(f8::format("{} {}", static_cast<int>(policy), bad));
      desc.non_finite = policy;
      std::vector<std::vector<uint8_t>> results;
      for (const bool recompute : {false, true}) {
        desc.recompute = recompute;
        Fixture s(cuda, desc, 64);
        store_element(s.x.data(), 100, bad, Dtype::kBf16);
        store_element(s.w.data(), 7, bad, Dtype::kBf16);
        ASSERT_TRUE(s.linear->forward(s.forward(), nullptr));
        ASSERT_TRUE(s.linear->backward(s.backward(), nullptr));
        for (testing::Buffer* const got : {&s.y, &s.dx, &s.dw}) {
          results.emplace_back(got->data(), got->data() + got->bytes());
        }
      }
      for (size_t i = 0; i < 3; ++i) EXPECT_EQ(results[i], results[i + 3]) << i;
    }
  }
  EXPECT_TRUE(cuda.faults.empty()) << cuda.faults.front();
}

// The maximum of x and of w is found once in a step.
TEST(LinearRecompute, FindsNoMaximumTwice) {
  FakeCuda cuda;
  cuda.cooperative = false;  // large tensors take an amax and a cast on every device
  LinearDesc desc = describe("tensorwise", {2048, 1024, 1024});
  desc.recompute = true;
  Fixture s(cuda, desc, 2048);
  std::vector<std::string> steps;
  for (const Step& step : s.linear->backward_steps(s.backward())) {
    if (step.name.starts_with("amax") || step.name.starts_with("cast")) steps.push_back(step.name);
  }
  EXPECT_EQ(steps, (std::vector<std::string>{"amax dy", "cast dy", "cast x,w"}));
}

TEST(LinearRecompute, NeedsTheTensorsThatItCastsAgain) {
  FakeCuda cuda;
  LinearDesc desc = describe("tensorwise", {64, 32, 48});
  desc.recompute = true;
  Fixture s(cuda, desc, 64);
  const auto refused = [&](BackwardCall call, std::string_view part) {
    const Status status = s.linear->backward(call, nullptr);
    ASSERT_FALSE(status);
    EXPECT_TRUE(says(status.error(), part)) << status.error().message;
  };
  BackwardCall call = s.backward();
  call.x.data = nullptr;
  refused(call, "x.data is NULL; grad_weight is computed from it: float8_linear_desc.recompute");
  call = s.backward();
  call.w.data = nullptr;
  refused(call, "w.data is NULL; grad_input is computed from it: float8_linear_desc.recompute");
  call = s.backward();
  call.saved.data = nullptr;
  refused(call, "float8_backward_args.saved.data is NULL");
}

}  // namespace
}  // namespace f8::runtime
