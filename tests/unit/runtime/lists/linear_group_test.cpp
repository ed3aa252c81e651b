// Groups of linears of one x: the bits of the linears one by one with a shared x_tensor and
// accumulate_dx, in fewer launches.
#include "runtime/lists/linear_group.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>

#include "runtime/linear/quantizer.hpp"
#include "tests/unit/runtime/count_allocations.hpp"
#include "tests/unit/runtime/fake_cublaslt.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;
using testing::FakeCublasLt;
using testing::FakeCuda;
using testing::kPoison;
using testing::says;

constexpr int64_t kM = 160, kK = 144;
constexpr std::array<int64_t, 3> kN = {96, 32, 48};  // Q, K and V
constexpr int64_t kAllN = 176;

std::vector<uint8_t> bytes(Buffer& buffer) {
  return {buffer.data(), buffer.data() + buffer.bytes()};
}

Recipe recipe_of(std::string_view name) {
  return name == "bf16" ? bf16_recipe() : find_recipe(name).value();
}

// The weights that a caller gives in fp8.
enum class Weights { kCast, kCached, kMixed };

struct Trio {
  Trio(FakeCuda& cuda, const char* recipe_name, bool bias, NonFinite non_finite)
      : context(cuda.context()), recipe(recipe_of(recipe_name)) {
    std::vector<DelayedSlot> slots;
    for (const int64_t n : kN) {
      LinearDesc desc;
      desc.shape = {kM, n, kK};
      desc.recipe = recipe;
      desc.accumulate_grad_input = desc.accumulate_grad_weight = true;
      desc.bias = desc.bias_grad = bias;
      desc.bias_grad_dtype = Dtype::kF32;
      desc.non_finite = non_finite;
      linears.push_back(Linear::plan(context, desc).value());
      first_slot.push_back(slots.size());
      const auto& of = linears.back()->scale_slots();
      slots.insert(slots.end(), of.begin(), of.end());
    }
    delayed = DelayedScales::plan(context, slots).value();
    group = LinearGroup::plan(context, linears).value();
    QuantizerDesc of_x{.operand = Tensor::kInput, .rows = kM, .cols = kK, .recipe = recipe};
    of_x.non_finite = non_finite;
    if (auto planned = Quantizer::plan(context, of_x)) quantizer = *planned;
  }

  std::shared_ptr<Context> context;
  Recipe recipe;
  std::vector<std::shared_ptr<const Linear>> linears;
  std::vector<size_t> first_slot;
  std::optional<DelayedScales> delayed;
  std::shared_ptr<const LinearGroup> group;
  std::shared_ptr<const Quantizer> quantizer;  // of x; null: the recipe makes no copy of it
};

// One way of computing, with everything that it writes.
struct Tensors {
  Tensors(const Trio& trio, uint64_t seed)
      : x(reference::random_matrix(kM, kK, seed, reference::Distribution::kOutliers)),
        dy(reference::random_matrix(kM, kAllN, seed + 1)),
        y(static_cast<size_t>(kM * kAllN) * 2),
        dx(static_cast<size_t>(kM * kK) * 2),
        state(trio.delayed->bytes()) {
    if (trio.delayed->bytes() > 0) {
      EXPECT_TRUE(trio.delayed->init(state.data(), nullptr));
    }
    for (size_t i = 0; i < kN.size(); ++i) {
      w.emplace_back(reference::random_matrix(kN[i], kK, seed + 10 + i));
      bias.emplace_back(reference::random_matrix(1, kN[i], seed + 20 + i));
      dw.emplace_back(static_cast<size_t>(kN[i] * kK) * 2);
      db.emplace_back(static_cast<size_t>(kN[i]) * 4);
      cache.emplace_back(trio.linears[i]->weight_cache_bytes());
    }
  }
  [[nodiscard]] std::vector<std::vector<uint8_t>> written() {
    std::vector<std::vector<uint8_t>> out = {bytes(y), bytes(dx), bytes(state)};
    for (auto* of : {&dw, &db, &cache}) {
      for (Buffer& buffer : *of) {
        EXPECT_TRUE(buffer.guard_is_whole());
        out.push_back(bytes(buffer));
      }
    }
    EXPECT_TRUE(y.guard_is_whole());
    EXPECT_TRUE(dx.guard_is_whole());
    return out;
  }

  Buffer x, dy, y, dx, state;
  std::vector<Buffer> w, bias, dw, db, cache;
};

constexpr std::array kWritten = {"y",     "dx",    "state", "dw[0]",    "dw[1]",    "dw[2]",
                                 "db[0]", "db[1]", "db[2]", "cache[0]", "cache[1]", "cache[2]"};

struct Step {
  int64_t m = kM;
  Weights weights = Weights::kCast;
  bool saved = true;
  bool first_step = true;
  bool evaluate = false;
  bool dx = true, dw = true;
  bool accumulate = false;  // into what is there
  float8_nccl_comm ranks = nullptr;

  [[nodiscard]] bool has_cache(size_t i) const {
    return weights == Weights::kCached || (weights == Weights::kMixed && i == 1);
  }
  [[nodiscard]] bool wants_dw(size_t i) const {
    return dw && (weights != Weights::kMixed || i != 2);
  }
};

int reductions = 0;

// Another rank has tensors whose maxima are 3.
Status reduce_with_three(uint32_t* amax_bits, size_t count, float8_nccl_comm /*ranks*/,
                         Stream /*stream*/) {
  ++reductions;
  for (size_t i = 0; i < count; ++i) {
    if (amax_bits[i] == 0) continue;  // of a tensor that the call does not cast
    amax_bits[i] = std::max(amax_bits[i], std::bit_cast<uint32_t>(3.0F));
  }
  return {};
}

class LinearGroupTest : public ::testing::TestWithParam<const char*> {
 protected:
  static int64_t column(size_t i) {
    int64_t at = 0;
    for (size_t j = 0; j < i; ++j) at += kN[j];
    return at * 2;
  }
  static ScaleSlots slots(const Trio& trio, Tensors& to, size_t i) {
    if (trio.delayed->count() == 0) return {};
    return trio.delayed->slots(to.state.data(), trio.first_slot[i]);
  }
  static void cast_weights(const Trio& trio, Tensors& to, const Step& step) {
    for (size_t i = 0; i < kN.size(); ++i) {
      const Linear& linear = *trio.linears[i];
      if (!step.has_cache(i) || linear.weight_cache_bytes() == 0) continue;
      Buffer workspace(linear.workspace_bytes());
      zero(workspace);
      ASSERT_TRUE(linear.cast_weight({.w = to.w[i].data(),
                                      .cache = to.cache[i].data(),
                                      .scales = slots(trio, to, i),
                                      .first_step = step.first_step,
                                      .ranks = step.ranks},
                                     workspace.data(), nullptr, reduce_with_three));
    }
  }
  static void zero(Buffer& buffer) { std::fill_n(buffer.data(), buffer.bytes(), uint8_t{0}); }
  static const void* cache_of(const Trio& trio, Tensors& to, const Step& step, size_t i) {
    return step.has_cache(i) && trio.linears[i]->weight_cache_bytes() > 0 ? to.cache[i].data()
                                                                          : nullptr;
  }

  static std::array<GroupedLinearCall, 3> members(const Trio& trio, Tensors& to, const Step& step) {
    std::array<GroupedLinearCall, 3> out;
    for (size_t i = 0; i < kN.size(); ++i) {
      const LinearDesc& desc = trio.linears[i]->desc();
      out[i] = {.w = to.w[i].data(),
                .y = to.y.data() + column(i),
                .dy = to.dy.data() + column(i),
                .dw = step.wants_dw(i) ? to.dw[i].data() : nullptr,
                .ld_y = kAllN,
                .ld_dy = kAllN,
                .bias = desc.bias ? to.bias[i].data() : nullptr,
                .db = desc.bias_grad ? to.db[i].data() : nullptr,
                .weight_cache = cache_of(trio, to, step, i),
                .scales = slots(trio, to, i),
                .accumulate = step.accumulate,
                .accumulate_bias = step.accumulate};
    }
    return out;
  }
  static void run_group(const Trio& trio, Tensors& to, const Step& step) {
    cast_weights(trio, to, step);
    Buffer workspace(trio.group->workspace_bytes());
    zero(workspace);
    Buffer saved(trio.group->saved_bytes(step.weights == Weights::kCached));
    const auto linears = members(trio, to, step);
    const LinearGroupCall call{.x = to.x.data(),
                               .saved = step.saved ? saved.data() : nullptr,
                               .dx = step.dx ? to.dx.data() : nullptr,
                               .m = step.m,
                               .linears = linears.data(),
                               .count = linears.size(),
                               .accumulate_dx = step.accumulate,
                               .first_step = step.first_step,
                               .evaluate = step.evaluate,
                               .ranks = step.ranks};
    const Status forward = trio.group->forward(call, workspace.data(), nullptr, reduce_with_three);
    ASSERT_TRUE(forward) << forward.error().message;
    EXPECT_TRUE(saved.guard_is_whole());
    if (step.saved) {
      LinearGroupCall again = call;
      again.evaluate = 0;
      const Status backward =
          trio.group->backward(again, workspace.data(), nullptr, reduce_with_three);
      ASSERT_TRUE(backward) << backward.error().message;
    }
    EXPECT_TRUE(workspace.guard_is_whole());
  }

  // The linears one by one, with an x that is cast once.
  static void run_alone(const Trio& trio, Tensors& to, const Step& step) {
    cast_weights(trio, to, step);
    Buffer x_bytes(trio.quantizer == nullptr ? 0 : trio.quantizer->tensor_bytes());
    float8_tensor x{};
    if (trio.quantizer != nullptr) {
      Buffer scratch(trio.quantizer->workspace_bytes());
      zero(scratch);
      ASSERT_TRUE(trio.quantizer->run({.x = to.x.data(),
                                       .tensor = x_bytes.data(),
                                       .rows = step.m,
                                       .scales = slots(trio, to, 0),
                                       .first_step = step.first_step,
                                       .evaluate = step.evaluate},
                                      scratch.data(), nullptr));
      x = trio.quantizer->view(x_bytes.data(), nullptr, step.m).value();
    }
    const float8_tensor* x_tensor = trio.quantizer == nullptr ? nullptr : &x;
    const auto linears = members(trio, to, step);
    std::vector<Buffer> saved;
    for (size_t i = 0; i < kN.size(); ++i) {
      const Linear& linear = *trio.linears[i];
      const GroupedLinearCall& of = linears[i];
      saved.emplace_back(linear.saved_bytes());
      Buffer workspace(linear.workspace_bytes());
      zero(workspace);
      const Status good = linear.forward({.x = to.x.data(),
                                          .w = of.w,
                                          .y = of.y,
                                          .saved = step.saved ? saved.back().data() : nullptr,
                                          .m = step.m,
                                          .ld_y = of.ld_y,
                                          .bias = of.bias,
                                          .weight_cache = of.weight_cache,
                                          .scales = of.scales,
                                          .first_step = step.first_step,
                                          .ranks = step.ranks,
                                          .evaluate = step.evaluate,
                                          .x_tensor = x_tensor},
                                         workspace.data(), nullptr, reduce_with_three);
      ASSERT_TRUE(good) << good.error().message;
    }
    for (size_t i = 0; i < kN.size() && step.saved; ++i) {
      const Linear& linear = *trio.linears[i];
      const GroupedLinearCall& of = linears[i];
      Buffer workspace(linear.workspace_bytes());
      zero(workspace);
      const Status good = linear.backward({.dy = of.dy,
                                           .saved = saved[i].data(),
                                           .dx = step.dx ? to.dx.data() : nullptr,
                                           .dw = of.dw,
                                           .m = step.m,
                                           .ld_dy = of.ld_dy,
                                           .x = to.x.data(),
                                           .w = of.w,
                                           .weight_cache = of.weight_cache,
                                           .scales = of.scales,
                                           .first_step = step.first_step,
                                           .accumulate = of.accumulate,
                                           .db = of.db,
                                           .accumulate_bias = of.accumulate_bias,
                                           .ranks = step.ranks,
                                           .x_tensor = x_tensor,
                                           .accumulate_dx = i > 0 || step.accumulate},
                                          workspace.data(), nullptr, reduce_with_three);
      ASSERT_TRUE(good) << good.error().message;
    }
  }

  static void expect_equal(Tensors& together, Tensors& alone) {
    const auto ours = together.written();
    const auto expected = alone.written();
    for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(ours[i] == expected[i]) << kWritten[i];
  }
  void expect_the_same(const Trio& trio, Tensors& together, Tensors& alone, const Step& step) {
    run_group(trio, together, step);
    run_alone(trio, alone, step);
    expect_equal(together, alone);
    ASSERT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
  }

  FakeCuda cuda_;
  FakeCublasLt library_;
};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearGroupTest,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed",
                                           "blockwise", "bf16"),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(LinearGroupTest, TheSameAsOneByOneAtAnyM) {
  const Trio trio(cuda_, GetParam(), false, NonFinite::kPropagate);
  for (const int64_t m : {int64_t{0}, int64_t{1}, int64_t{77}, kM}) {
    SCOPED_TRACE(m);
    Tensors together(trio, 1), alone(trio, 1);
    expect_the_same(trio, together, alone, {.m = m});
  }
}

TEST_P(LinearGroupTest, TheSameWithWeightsInFp8) {
  const Trio trio(cuda_, GetParam(), false, NonFinite::kPropagate);
  for (const Weights weights : {Weights::kCached, Weights::kMixed}) {
    SCOPED_TRACE(static_cast<int>(weights));
    Tensors together(trio, 2), alone(trio, 2);
    expect_the_same(trio, together, alone, {.m = 131, .weights = weights});
  }
}

TEST_P(LinearGroupTest, TheSameWithoutABackwardOrAGradient) {
  const Trio trio(cuda_, GetParam(), false, NonFinite::kPropagate);
  for (const Weights weights : {Weights::kCast, Weights::kCached}) {
    Tensors together(trio, 3), alone(trio, 3);
    expect_the_same(trio, together, alone, {.m = 50, .weights = weights, .saved = false});
  }
  for (const Step& step : {Step{.m = 50, .dx = false}, Step{.m = 50, .dw = false},
                           Step{.m = 50, .accumulate = true}}) {
    Tensors together(trio, 4), alone(trio, 4);
    for (Tensors* to : {&together, &alone}) {
      zero(to->dx);
      for (auto* of : {&to->dw, &to->db}) std::ranges::for_each(*of, zero);
    }
    expect_the_same(trio, together, alone, step);
  }
}

TEST_P(LinearGroupTest, TheSameWithBiasGradients) {
  const Trio trio(cuda_, GetParam(), true, NonFinite::kPropagate);
  for (const int64_t m : {0, 129}) {
    SCOPED_TRACE(m);
    Tensors together(trio, 5), alone(trio, 5);
    expect_the_same(trio, together, alone, {.m = m});
  }
}

TEST_P(LinearGroupTest, TheSameForWhatIsNotFinite) {
  for (const NonFinite non_finite : {NonFinite::kPropagate, NonFinite::kHold}) {
    const Trio trio(cuda_, GetParam(), false, non_finite);
    Tensors together(trio, 6), alone(trio, 6);
    for (Tensors* to : {&together, &alone}) {
      reinterpret_cast<uint16_t*>(to->x.data())[300] = 0x7f80;
      reinterpret_cast<uint16_t*>(to->dy.data())[20] = 0x7fc1;
    }
    expect_the_same(trio, together, alone, {.m = 77});
  }
}

// With delayed scaling, x is cast with the scale of the first linear's slots.
TEST_P(LinearGroupTest, TheSameOverSteps) {
  const Trio trio(cuda_, GetParam(), false, NonFinite::kPropagate);
  Tensors together(trio, 7), alone(trio, 7);
  for (const Step& step : {Step{.m = 77}, Step{.m = kM, .first_step = false},
                           Step{.m = 12, .weights = Weights::kCached, .first_step = false},
                           Step{.m = 40, .saved = false, .first_step = false, .evaluate = true}}) {
    SCOPED_TRACE(step.m);
    expect_the_same(trio, together, alone, step);
    if (trio.delayed->bytes() == 0) continue;
    for (Tensors* to : {&together, &alone}) {
      ASSERT_TRUE(trio.delayed->update(to->state.data(), nullptr));
    }
    EXPECT_EQ(bytes(together.state), bytes(alone.state));
  }
}

// The first scales come from all ranks' maxima, in one reduction for x and the weights and one for
// all dy.
TEST_P(LinearGroupTest, TheSameInAFirstStepOverRanks) {
  if (GetParam() != std::string_view("delayed")) GTEST_SKIP() << "no scale is kept";
  const Trio trio(cuda_, GetParam(), false, NonFinite::kPropagate);
  int any = 0;
  for (const Weights weights : {Weights::kCast, Weights::kCached}) {
    Tensors together(trio, 11), alone(trio, 11);
    Step step{.m = 77, .weights = weights};
    step.ranks = reinterpret_cast<float8_nccl_comm>(&any);
    reductions = 0;
    run_group(trio, together, step);
    EXPECT_EQ(reductions, weights == Weights::kCast ? 2 : 2 + 3);
    run_alone(trio, alone, step);
    for (Tensors* to : {&together, &alone}) {
      ASSERT_TRUE(trio.delayed->update(to->state.data(), nullptr));
    }
    expect_equal(together, alone);
    ASSERT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
  }
}

TEST_P(LinearGroupTest, ItsLaunchesAreFewer) {
  const Trio trio(cuda_, GetParam(), false, NonFinite::kPropagate);
  Tensors to(trio, 8);
  const auto launches = [&](const Step& step) {
    cuda_.launches.clear();
    run_group(trio, to, step);
    return cuda_.launches.size();
  };
  // GEMMs in high precision are cuBLASLt's, which the driver does not see.
  const LinearGroup::Launches planned = trio.group->launches(kM);
  const LinearGroup::Launches alone = trio.group->launches_one_by_one(kM);
  EXPECT_LE(planned.forward, alone.forward);
  EXPECT_LE(planned.forward_with_caches, alone.forward_with_caches);
  EXPECT_LE(planned.backward, alone.backward);
  const std::string_view recipe = GetParam();
  if (recipe == "bf16" || recipe == "rowwise_with_gw_hp") return;
  const Step step{.first_step = false};
  EXPECT_EQ(launches({.saved = false, .first_step = false}), planned.forward);
  EXPECT_EQ(launches(step), planned.forward + planned.backward);
  if (recipe == "tensorwise") {
    // One launch casts x and the weights, or all dy; then a GEMM for each result.
    EXPECT_EQ(planned.forward, 4U);
    EXPECT_EQ(planned.forward_with_caches, 4U);
    EXPECT_EQ(alone.forward, 6U);
    EXPECT_EQ(alone.forward_with_caches, 6U);
  }
}

TEST_P(LinearGroupTest, RunDoesNotAllocate) {
  const Trio trio(cuda_, GetParam(), true, NonFinite::kPropagate);
  Tensors to(trio, 9);
  const auto linears = members(trio, to, {});
  Buffer workspace(trio.group->workspace_bytes()), saved(trio.group->saved_bytes());
  const LinearGroupCall call{.x = to.x.data(),
                             .saved = saved.data(),
                             .dx = to.dx.data(),
                             .m = kM,
                             .linears = linears.data(),
                             .count = linears.size(),
                             .first_step = 1};
  cuda_.emulate = false;
  bool ok = false;
  int allocations = 0;
  {
    const testing::CountAllocations counting;
    ok = trio.group->forward(call, workspace.data(), nullptr).has_value() &&
         trio.group->backward(call, workspace.data(), nullptr).has_value();
    allocations = counting.count();
  }
  EXPECT_TRUE(ok);
  EXPECT_EQ(allocations, 0);
}

TEST_P(LinearGroupTest, BadArgumentsLeaveNothingEnqueued) {
  const Trio trio(cuda_, GetParam(), false, NonFinite::kPropagate);
  Tensors to(trio, 10);
  Buffer workspace(trio.group->workspace_bytes()), saved(trio.group->saved_bytes());
  cuda_.emulate = false;
  using Linears = std::array<GroupedLinearCall, 3>;
  const auto refused = [&](const std::function<void(LinearGroupCall&, Linears&)>& change,
                           std::string_view forward, std::string_view backward) {
    Linears linears = members(trio, to, {});
    LinearGroupCall call{.x = to.x.data(),
                         .saved = saved.data(),
                         .dx = to.dx.data(),
                         .m = kM,
                         .count = linears.size(),
                         .first_step = 1};
    change(call, linears);
    call.linears = linears.data();
    const size_t before = cuda_.launches.size();
    const int memsets = cuda_.memsets;
    for (const auto& [part, is_forward] : {std::pair{forward, true}, {backward, false}}) {
      if (part.empty()) continue;
      const Status status = is_forward ? trio.group->forward(call, workspace.data(), nullptr)
                                       : trio.group->backward(call, workspace.data(), nullptr);
      ASSERT_FALSE(status) << part;
      EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
      EXPECT_TRUE(says(status.error(), part)) << status.error().message;
    }
    EXPECT_EQ(cuda_.launches.size(), before) << forward;
    EXPECT_EQ(cuda_.memsets, memsets) << forward;
  };
  using Call = LinearGroupCall;
  refused([](Call& c, Linears&) { c.count = 2; }, "count is 2, the group has 3 linears",
          "count is 2, the group has 3 linears");
  refused([](Call& c, Linears&) { c.m = kM + 1; }, "float8_linear_group_args.m is 161",
          "float8_linear_group_args.m is 161");
  refused([](Call& c, Linears&) { c.x = nullptr; }, "float8_linear_group_args.x is NULL", "");
  refused([](Call&, Linears& l) { l[1].w = nullptr; },
          "float8_linear_group_args.linears[1].w is NULL", "");
  refused([](Call&, Linears& l) { l[2].y = nullptr; },
          "float8_linear_group_args.linears[2].y is NULL", "");
  refused([](Call&, Linears& l) { l[2].dy = nullptr; }, "",
          "float8_linear_group_args.linears[2].dy is NULL");
  refused([](Call&, Linears& l) { l[0].ld_y = 7; }, "float8_linear_group_args.linears[0].ld_y is 7",
          "");
  refused([](Call&, Linears& l) { l[1].y = l[0].y; },
          "float8_linear_group_forward: float8_linear_group_args.linears[0].y (", "");
  refused([](Call&, Linears& l) { l[2].dw = l[0].dw; }, "",
          "float8_linear_group_args.linears[0].dw (");
  refused([&](Call& c, Linears&) { c.dx = to.dy.data(); }, "", "float8_linear_group_args.dx (");
  refused([&](Call&, Linears& l) { l[1].y = workspace.data() + 4096; }, "workspace (", "");
  refused([&](Call&, Linears& l) { l[1].bias = l[0].w; },
          "float8_linear_group_args.linears[1].bias is given", "");
  const auto linears = members(trio, to, {});
  const LinearGroupCall call{
      .x = to.x.data(), .m = kM, .linears = linears.data(), .count = 3, .first_step = 1};
  EXPECT_TRUE(says(trio.group->forward(call, nullptr, nullptr).error(),
                   "workspace of float8_linear_group_forward is NULL"));
}

class LinearGroupPlan : public ::testing::Test {
 protected:
  FakeCuda cuda_;
  FakeCublasLt library_;
};

TEST_F(LinearGroupPlan, RefusesLinearsThatDoNotGoTogether) {
  const auto context = cuda_.context();
  const auto linear = [&](const std::function<void(LinearDesc&)>& change) {
    LinearDesc desc = testing::describe("rowwise", {kM, 32, kK});
    desc.accumulate_grad_input = true;
    change(desc);
    return Linear::plan(context, desc).value();
  };
  const auto first = linear([](LinearDesc& d) { d.accumulate_grad_input = false; });
  const auto refused = [&](const std::function<void(LinearDesc&)>& change, ErrorCode code,
                           std::string_view part) {
    const std::vector<std::shared_ptr<const Linear>> both = {first, linear(change)};
    const auto group = LinearGroup::plan(context, both);
    ASSERT_FALSE(group) << part;
    EXPECT_EQ(group.error().code, code);
    EXPECT_TRUE(says(group.error(), part)) << group.error().message;
  };
  constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
  refused([](LinearDesc& d) { d.shape.k = 32; }, kInvalid, "differ in k");
  refused([](LinearDesc& d) { d.shape.m = 16; }, kInvalid, "differ in m_max");
  refused([](LinearDesc& d) { d.tensor_dtype = Dtype::kF16; }, kInvalid, "differ in tensor_dtype");
  refused([](LinearDesc& d) { d.count = true; }, kInvalid, "differ in count");
  refused([](LinearDesc& d) { d.non_finite = NonFinite::kHold; }, kInvalid, "differ in non_finite");
  refused([](LinearDesc& d) { d.recompute = true; }, ErrorCode::kUnsupported,
          "linears[1] has recompute");
  refused([](LinearDesc& d) { d.recipe = find_recipe("tensorwise").value(); }, kInvalid,
          "recipes rowwise of linears[0] and tensorwise of linears[1] cast x differently");
  refused([](LinearDesc& d) { d.accumulate_grad_input = false; }, kInvalid,
          "linears[1] adds to the dx of those before it");
  refused([](LinearDesc& d) { d.needs_grad_input = false; }, kInvalid, "differ in no_grad_input");
  EXPECT_TRUE(says(LinearGroup::plan(context, {}).error(), "count is 0; 1 to 16"));
  const std::vector<std::shared_ptr<const Linear>> none = {first, nullptr};
  EXPECT_TRUE(says(LinearGroup::plan(context, none).error(), "linears[1] is NULL"));
  const std::vector<std::shared_ptr<const Linear>> many(17, first);
  EXPECT_TRUE(says(LinearGroup::plan(context, many).error(), "count is 17; 1 to 16"));
  const std::vector<std::shared_ptr<const Linear>> one = {first};
  EXPECT_TRUE(LinearGroup::plan(context, one));
  EXPECT_TRUE(says(LinearGroup::plan(cuda_.context(), one).error(), "another context's"));
}

}  // namespace
}  // namespace f8::runtime
