// A call on a prepared plan asks nothing of the host but launches and what encodes their arguments.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <thread>

#include "runtime/lists/quantizer_list.hpp"
#include "tests/unit/runtime/fake_cublaslt.hpp"
#include "tests/unit/runtime/intercept.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::describe;
using testing::FakeCublasLt;
using testing::FakeCuda;
using testing::Fixture;
using testing::Intercept;
using testing::SystemCalls;

const Driver* g_below = nullptr;  // where counted calls go on to
bool g_idle = false;              // launches and memsets do nothing

#define F8_ENUMERATE(field, function) k_##field,
enum CallId { F8_DRIVER_FUNCTIONS(F8_ENUMERATE) kCalls };
#undef F8_ENUMERATE
std::array<int, kCalls> g_counts;

template <CallId kCall, auto kField>
struct Counted;
template <CallId kCall, class... Args, CUresult (*Driver::*kField)(Args...)>
struct Counted<kCall, kField> {
  static CUresult call(Args... args) {
    ++g_counts[kCall];
    constexpr bool enqueues = kCall == k_launch_kernel_ex || kCall == k_memset_d8_async ||
                              kCall == k_memset_d32_async || kCall == k_memset_d2d8_async ||
                              kCall == k_memcpy_dtoh_async;
    if (enqueues && g_idle) return CUDA_SUCCESS;
    return (g_below->*kField)(args...);
  }
};

// The fake driver with every call counted.
class CountedDriver {
 public:
  explicit CountedDriver(const FakeCuda& cuda) {
    g_below = &cuda.table();
#define F8_COUNTED(field, function) table_.field = Counted<k_##field, &Driver::field>::call;
    F8_DRIVER_FUNCTIONS(F8_COUNTED)
#undef F8_COUNTED
    set_driver_for_testing(&table_);
  }
  ~CountedDriver() {
    set_driver_for_testing(g_below);
  }

 private:
  Driver table_;
};

// Calls that a run may make; all others are none.
constexpr bool is_run_call(int call) {
  return call == k_launch_kernel_ex || call == k_memset_d8_async || call == k_memset_d32_async ||
         call == k_memset_d2d8_async || call == k_memcpy_dtoh_async ||
         call == k_tensor_map_encode_tiled || call == k_ctx_get_current ||
         call == k_ctx_set_current;
}

class RunCostTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!Intercept::works()) GTEST_SKIP() << "a sanitizer has its own malloc";
  }
  void TearDown() override { g_idle = false; }
  FakeCuda cuda_;
  FakeCublasLt library_;
  CountedDriver counted_{cuda_};
};
INSTANTIATE_TEST_SUITE_P(Recipes, RunCostTest,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed",
                                           "blockwise"),
                         [](const auto& suite) { return std::string(suite.param); });

TEST(InterceptTest, Counts) {
  if (!Intercept::works()) GTEST_SKIP() << "a sanitizer has its own malloc";
  std::mutex mutex;
  SystemCalls calls;
  {
    const Intercept intercept;
    const auto allocated = std::make_unique<int>(1);
    void* const volatile block = std::malloc(16);
    std::free(block);
    const std::lock_guard lock(mutex);
    std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::nanoseconds(1));
    char text[8];
    volatile int number = 7;
    std::snprintf(text, sizeof text, "%d", number);
    const char* const volatile home = std::getenv("HOME");
    FILE* const file = std::fopen("/dev/null", "r");
    (void)home;
    calls = intercept.calls();
    std::fclose(file);
  }
  EXPECT_GE(calls.allocations, 3);  // fopen's own is one
  EXPECT_EQ(calls.locks, 1);
  EXPECT_EQ(calls.waits, 2);
  EXPECT_EQ(calls.texts, 1);
  EXPECT_EQ(calls.files, 1);
  EXPECT_EQ(calls.environment, 1);
  const Intercept intercept;
  const std::string message = f8::format("{} is {}, not aligned to 16 bytes", "x", 3);
  EXPECT_GE(intercept.calls().allocations, 1) << message;
}

// What a linear is planned with and how its calls use it.
struct Use {
  const char* name;
  void (*plan)(LinearDesc&);
  bool cached = false, accumulate = false;
  void (*plan_weight)(QuantizerDesc&) = [](QuantizerDesc&) {};
};
constexpr Use kUses[] = {
    {"plain", [](LinearDesc&) {}},
    {"a weight in fp8", [](LinearDesc&) {}, true},
    {"bias and its gradient", [](LinearDesc& d) { d.bias = d.bias_grad = true; }},
    {"accumulation", [](LinearDesc& d) { d.accumulate_grad_weight = true; }, true, true},
    {"recomputing", [](LinearDesc& d) { d.recompute = true; }},
    {"recomputing from a weight in fp8", [](LinearDesc& d) { d.recompute = true; }, true},
    {"counters", [](LinearDesc& d) { d.count = true; }},
    {"a flag", [](LinearDesc&) {}, true, false, [](QuantizerDesc& d) { d.noop_flag = true; }},
    {"f32 tensors", [](LinearDesc& d) { d.tensor_dtype = d.grad_weight_dtype = Dtype::kF32; }},
    {"a master weight", [](LinearDesc&) {}, true, false,
     [](QuantizerDesc& d) { d.f32_source = true; }},
    {"no gradient of the input", [](LinearDesc& d) { d.needs_grad_input = false; }},
    {"no gradient of the weight", [](LinearDesc& d) { d.needs_grad_weight = false; }},
    {"everything",
     [](LinearDesc& d) {
       d.bias = d.bias_grad = d.accumulate_grad_weight = d.count = true;
       d.non_finite = NonFinite::kSaturate;
     },
     true, true, [](QuantizerDesc& d) { d.noop_flag = true; }}};

TEST_P(RunCostTest, AsksNothingOfTheSystem) {
  for (const Use& use : kUses) {
    SCOPED_TRACE(use.name);
    LinearDesc desc = describe(GetParam(), {192, 160, 144});
    use.plan(desc);
    Fixture s(cuda_, desc, 192);
    const size_t weight = static_cast<size_t>(desc.shape.n * desc.shape.k);
    testing::Buffer master(weight * 4), db(static_cast<size_t>(desc.shape.n) * 4);
    testing::Buffer counters(kCountersOfLinear * sizeof(CastCounters)), noop_flag(16);
    CastCounters read[kCountersOfLinear];
    auto* const counted = desc.count ? reinterpret_cast<CastCounters*>(counters.data()) : nullptr;
    QuantizerDesc of_weight = weight_of(desc);
    use.plan_weight(of_weight);
    testing::Fp8Weight kept(s, of_weight);
    const std::shared_ptr<const Quantizer> all[] = {kept.quantizer};
    const QuantizerList casts = QuantizerList::plan(s.context, all).value();
    testing::Buffer casts_workspace(casts.workspace_bytes());

    for (const bool first_step : {true, false}) {
      s.first_step = first_step;
      ForwardCall forward = s.forward();
      BackwardCall backward = s.backward();
      QuantizeCall cast = kept.call();
      cast.struct_size = sizeof cast;
      forward.counters = backward.counters = cast.counters = counted;
      if (use.cached) forward.w.fp8 = backward.w.fp8 = &kept.view;
      if (desc.bias_grad) backward.db.data = db.data();
      backward.dw.accumulate = use.accumulate;
      if (of_weight.noop_flag) cast.noop_flag = reinterpret_cast<uint32_t*>(noop_flag.data());
      if (of_weight.f32_source) cast.x.data = master.data();
      QuantizeCall in_list[] = {cast};
      in_list[0].step = nullptr;
      in_list[0].noop_flag = nullptr;
      g_idle = true;
      library_.computes = false;
      g_counts = {};
      std::array<bool, 7> good{};
      SystemCalls calls;
      {
        const Intercept intercept;
        if (use.cached) {
          good[0] = kept.run(cast).has_value();
          good[1] =
              casts.run(listed(in_list, casts_workspace.data(), cast.step, cast.noop_flag), nullptr)
                  .has_value();
        } else {
          good[0] = good[1] = true;
        }
        good[2] = s.linear->forward(forward, nullptr).has_value();
        good[3] = s.linear->backward(backward, nullptr).has_value();
        good[4] = !s.delayed || s.delayed->update(s.state.data(), nullptr).has_value();
        good[5] = counted == nullptr ||
                  snapshot_counters(*s.context, counted, kCountersOfLinear, read, nullptr);
        good[6] =
            counted == nullptr || clear_counters(*s.context, counted, kCountersOfLinear, nullptr);
        calls = intercept.calls();
      }
      g_idle = false;
      EXPECT_TRUE(std::ranges::all_of(good, std::identity{}));
      EXPECT_EQ(calls, SystemCalls{})
          << calls.allocations << " allocations, " << calls.locks << " locks, " << calls.waits
          << " waits, " << calls.texts << " texts, " << calls.files << " files, "
          << calls.environment << " variables";
      EXPECT_GE(g_counts[k_launch_kernel_ex] + library_.matmuls, 4);
#define F8_EXPECT_NONE(field, function) \
  EXPECT_TRUE(is_run_call(k_##field) || g_counts[k_##field] == 0) << #function;
      F8_DRIVER_FUNCTIONS(F8_EXPECT_NONE)
#undef F8_EXPECT_NONE
    }
  }
}

// A call costs the host its launches and the driver calls around them (tensor maps, the current
// context, memsets). benchmarks/host_time says how long they take.
TEST_P(RunCostTest, ACallMakesItsLaunchesAndFewOtherDriverCalls) {
  struct Cost {
    const char* recipe;
    int forward_launches, forward_others, backward_launches, backward_others;
  };
  static constexpr Cost kCosts[] = {{"tensorwise", 2, 7, 2, 10},
                                    {"rowwise", 2, 7, 2, 10},
                                    {"rowwise_with_gw_hp", 3, 7, 2, 8},
                                    {"delayed", 2, 7, 2, 10},
                                    {"blockwise", 3, 7, 3, 11}};
  const auto* const cost =
      std::ranges::find(kCosts, std::string_view(GetParam()),
                        [](const Cost& c) { return std::string_view(c.recipe); });
  ASSERT_NE(cost, std::end(kCosts)) << GetParam();
  library_.computes = false;
  Fixture s(cuda_, describe(GetParam(), {192, 160, 144}), 192);
  const ForwardCall forward = s.forward();
  const BackwardCall backward = s.backward();
  g_idle = true;
  const auto others = [] {
    return g_counts[k_tensor_map_encode_tiled] + g_counts[k_ctx_get_current] +
           g_counts[k_ctx_set_current] + g_counts[k_memset_d32_async];
  };
  g_counts = {};
  ASSERT_TRUE(s.linear->forward(forward, nullptr));
  EXPECT_EQ(g_counts[k_launch_kernel_ex], cost->forward_launches);
  EXPECT_EQ(others(), cost->forward_others);
  g_counts = {};
  ASSERT_TRUE(s.linear->backward(backward, nullptr));
  EXPECT_EQ(g_counts[k_launch_kernel_ex], cost->backward_launches);
  EXPECT_EQ(others(), cost->backward_others);
}

}  // namespace
}  // namespace f8::runtime
