// The planned launches of a call: which of them are for which m, and that a call runs those that
// its steps name.
#include <algorithm>
#include <utility>

#include "runtime/linear/plan/kernels.hpp"
#include "runtime/quantize/quantize.hpp"
#include "tests/unit/runtime/fake_cublaslt.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::describe;
using testing::FakeCublasLt;
using testing::FakeCuda;

// Pointers that lead nowhere, far apart: nothing is computed.
template <class T = void>
T* address(uintptr_t index) {
  return reinterpret_cast<T*>(index << 48);
}

class LaunchesTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    cuda_.emulate = cuda_.touch_memory = false;
    library_.computes = false;
  }
  FakeCuda cuda_;
  FakeCublasLt library_;
};
INSTANTIATE_TEST_SUITE_P(Recipes, LaunchesTest,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed",
                                           "blockwise"),
                         [](const auto& suite) { return std::string(suite.param); });

ForwardCall forward_of(int64_t m) {
  ForwardCall call;
  call.x.data = address(1);
  call.w.data = address(2);
  call.y.data = address(3);
  call.saved.data = address(4);
  call.m = m;
  call.scales = ScaleSlots{.amax = address<uint32_t>(5), .scale = address<float>(6)};
  return call;
}

// Every m from where all of x and w goes in one launch to where each pass needs two.
TEST_P(LaunchesTest, AreForTheSizesThatTheirKernelsAreFor) {
  const LinearDesc desc = describe(GetParam(), {12000, 512, 1024});
  const auto linear = Linear::plan(cuda_.context(), desc).value();
  const auto passes =
      linear_kernels(desc).value().passes(kXq | kXqt | kWq | kWqt, /*first_step=*/false);
  for (int64_t m = 1; m <= desc.shape.m; m += 61) {
    std::vector<std::string> expected;
    bool cleared = false;
    for (const KernelPass& pass : passes) {
      std::vector<QuantizeOperand> operands;
      for (const FusedCast& cast : pass.casts) {
        const bool input = cast.tensor == Tensor::kInput;
        QuantizeOperand& x = operands.emplace_back();
        x.rows = input ? m : desc.shape.n;
        x.cols = desc.shape.k;
        static uint16_t partials;
        if (pass.amax && fits_tile_amax(*pass.amax, x.rows, x.cols)) x.tile_amax = &partials;
      }
      const Launches launches =
          pass.one_launch ? quantize_launches(*pass.one_launch, 132, operands) : Launches::kTwo;
      if (launches == Launches::kOne) {
        expected.push_back("quantize " + pass.operands);
      } else if (launches == Launches::kOneEach) {
        for (const FusedCast& cast : pass.casts) expected.push_back("quantize " + cast.operand);
      } else {
        const bool raises =
            pass.amax && (pass.amax->row || pass.amax->col) &&
            std::ranges::any_of(operands, [](const auto& x) { return x.tile_amax == nullptr; });
        if (raises && !std::exchange(cleared, true)) {
          expected.push_back("clear amax");
        }
        if (pass.amax) expected.push_back("amax " + pass.operands);
        expected.push_back("cast " + pass.operands);
      }
    }
    expected.push_back("gemm output");
    std::vector<std::string> names;
    for (const Step& step : linear->forward_steps(with_workspace(forward_of(m), address(7)))) {
      names.push_back(step.name);
    }
    ASSERT_EQ(names, expected) << "m " << m;
  }
}

TEST_P(LaunchesTest, OfACallAreThoseOfItsSteps) {
  const auto linear =
      Linear::plan(cuda_.context(), describe(GetParam(), {12000, 512, 1024})).value();
  for (const int64_t m : {1, 129, 1000, 3000, 6000, 12000}) {
    const ForwardCall call = forward_of(m);
    const auto keys_of = [&](auto&& run) {
      cuda_.launches.clear();
      run();
      std::vector<std::string_view> keys;
      for (const auto& launch : cuda_.launches) keys.push_back(launch.kernel);
      return keys;
    };
    const auto run =
        keys_of([&] { EXPECT_TRUE(linear->forward(with_workspace(call, address(7)), nullptr)); });
    const auto steps = keys_of([&] {
      for (const Step& step : linear->forward_steps(with_workspace(call, address(7)))) {
        EXPECT_TRUE(step.launch(nullptr)) << step.name;
      }
    });
    EXPECT_EQ(run, steps) << "m " << m;
    EXPECT_GE(run.size(), 2U);
  }
}

}  // namespace
}  // namespace f8::runtime
