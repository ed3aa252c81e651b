// An expert linear gives, bit for bit, what a linear of each expert gives with the same kernels, and
// writes nothing else: by recipe, type and routing.
#include "runtime/experts/experts.hpp"

#include <bit>
#include <cmath>

#include "recipes/reference/groups.hpp"
#include "recipes/scales/scale.hpp"
#include "runtime/experts/group_layout.hpp"
#include "tests/gpu/experts/routings.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

using reference::Matrix;

struct ExpertsCase {
  const char* recipe;
  Dtype tensor_dtype = Dtype::kBf16;
  Dtype grad_weight_dtype = Dtype::kBf16;
  bool accumulate = false;  // of dw
  bool recompute_weight = false;
};

class ExpertsTest : public GpuTestWith<ExpertsCase> {
 protected:
  // The tensors of all experts, whose rows of no expert are NaN, and the results by both ways.
  struct Groups {
    Groups(const Context& context, const Routing& routing, const ExpertsDesc& desc)
        : n(desc.shape.n),
          k(desc.shape.k),
          element_bytes(size_bytes(desc.tensor_dtype)),
          x(context, rows_of(routing, k, desc.tensor_dtype, 1)),
          w(context, bytes_of(desc.experts * n, k, desc.tensor_dtype, 2)),
          dy(context, rows_of(routing, n, desc.tensor_dtype, 3)),
          y(context, dy.bytes()),
          dx(context, x.bytes()),
          y_alone(context, dy.bytes()),
          dx_alone(context, x.bytes()),
          dw(context, first_dw(desc)),
          dw_alone(context, first_dw(desc)) {}

    static std::vector<uint8_t> bytes_of(int64_t rows, int64_t cols, Dtype type, uint64_t seed) {
      return reference::to_bytes(
          reference::rounded_to(
              reference::random_matrix(rows, cols, seed, reference::Distribution::kOutliers), type),
          type);
    }
    static std::vector<uint8_t> rows_of(const Routing& routing, int64_t cols, Dtype type,
                                        uint64_t seed) {
      std::vector<uint8_t> bytes = bytes_of(std::max(routing.m, 1), cols, type, seed);
      const int64_t used = routing.ends.back() * cols * static_cast<int64_t>(size_bytes(type));
      std::fill(bytes.begin() + used, bytes.end(), kPoison);
      return bytes;
    }
    // What dw holds before: NaN, or what a backward adds to.
    static std::vector<uint8_t> first_dw(const ExpertsDesc& desc) {
      const int64_t elements = desc.experts * desc.shape.n * desc.shape.k;
      return std::vector<uint8_t>(
          static_cast<size_t>(elements) * size_bytes(desc.grad_weight_dtype),
          desc.accumulate_grad_weight ? 0x3f : kPoison);
    }
    [[nodiscard]] uint8_t* row(const DeviceBuffer& of, int64_t at, int64_t cols) const {
      return of.as<uint8_t>() + static_cast<size_t>(at * cols) * element_bytes;
    }

    // The bits of the largest |w|.
    [[nodiscard]] uint32_t weight_amax(const ExpertsDesc& desc) const {
      const std::vector<uint8_t> bytes = w.download<uint8_t>();
      uint32_t most = 0;
      for (int64_t i = 0; i < desc.experts * n * k; ++i) {
        const float value = load_element(bytes.data(), i, desc.tensor_dtype);
        most = std::max(most, std::bit_cast<uint32_t>(std::abs(value)));
      }
      return most;
    }

    void poison_results(const ExpertsDesc& desc) {
      y.poison();
      dx.poison();
      const std::vector<uint8_t> first = first_dw(desc);
      dw.upload(first.data(), first.size());
    }

    int64_t n, k;
    size_t element_bytes;
    DeviceBuffer x, w, dy, y, dx, y_alone, dx_alone, dw, dw_alone;
  };

  [[nodiscard]] static ExpertsDesc describe(const Routing& routing, int64_t n, int64_t k) {
    ExpertsDesc desc;
    desc.shape = {std::max(routing.m, 1), n, k};
    desc.experts = static_cast<int64_t>(routing.ends.size());
    const std::string_view recipe = GetParam().recipe;
    desc.recipe = recipe == "bf16" ? bf16_recipe() : find_recipe(recipe).value();
    desc.tensor_dtype = GetParam().tensor_dtype;
    desc.grad_weight_dtype = GetParam().grad_weight_dtype;
    desc.accumulate_grad_weight = GetParam().accumulate;
    desc.recompute_weight = GetParam().recompute_weight;
    return desc;
  }

  // The state of delayed scaling after some steps, or that of no slots.
  struct Scales {
    Scales(const std::shared_ptr<Context>& context, const Experts& experts)
        : delayed(DelayedScales::plan(context, experts.scale_slots()).value()),
          state(*context, image()) {}
    [[nodiscard]] std::vector<uint32_t> image() const {
      constexpr std::array kScales = {37.5F, 411.0F, 2309.0F};
      std::vector<uint32_t> words = delayed.initial();
      for (size_t i = 0; i < delayed.count(); ++i) set_scale(words, i, kScales.at(i));
      return words;
    }
    void set_scale(std::vector<uint32_t>& words, size_t slot, float scale) const {
      const size_t at = delayed.layout().scale / 4 + slot * kernels::kScaleStride;
      words[at] = std::bit_cast<uint32_t>(scale);
      words[at + kernels::kInverse] = std::bit_cast<uint32_t>(inverse_scale(scale));
    }
    // What a call is given of it.
    [[nodiscard]] float8_scale_slots slots() const {
      return delayed.count() == 0 ? float8_scale_slots{} : delayed.slots(state.as(), 0);
    }
    void reset(const std::vector<uint32_t>& words) {
      state.upload(words.data(), words.size() * sizeof(uint32_t));
    }
    [[nodiscard]] std::vector<uint32_t> words() const { return state.download<uint32_t>(); }

    DelayedScales delayed;
    DeviceBuffer state;
  };

  // Computes each group by a linear with the kernels of `experts`.
  void run_dense(const Experts& experts, const Routing& routing, const Groups& groups,
                 const float8_scale_slots& scales) {
    LinearDesc desc;
    desc.shape = experts.desc().shape;
    desc.recipe = experts.desc().recipe;
    desc.tensor_dtype = experts.desc().tensor_dtype;
    desc.grad_weight_dtype = experts.desc().grad_weight_dtype;
    desc.accumulate_grad_weight = experts.desc().accumulate_grad_weight;
    for (const Gemm gemm : kGemms) {
      GemmChoice choice;
      choice.provider = Provider::kCublasLt;  // of a GEMM in high precision
      if (desc.recipe.at(gemm).is_fp8()) {
        choice.provider = Provider::kGenerated;
        choice.config = experts.config(gemm);
      }
      desc.choices[static_cast<size_t>(gemm)] = choice;
    }
    const auto linear = Linear::plan(context_, desc);
    F8_ASSERT_OK(linear);
    const DeviceBuffer saved(context(), (*linear)->saved_bytes());
    const DeviceBuffer workspace(context(), (*linear)->workspace_bytes());
    const auto [n, k] = std::pair{groups.n, groups.k};
    const size_t experts_count = routing.ends.size();
    int64_t start = 0;
    for (size_t e = 0; e < experts_count; ++e) {
      const int64_t m = routing.ends[e] - start;
      ForwardCall forward{.m = m};
      forward.x.data = groups.row(groups.x, start, k);
      forward.w.data = groups.row(groups.w, static_cast<int64_t>(e) * n, k);
      forward.y.data = groups.row(groups.y_alone, start, n);
      forward.saved.data = saved.as();
      forward.workspace.data = workspace.as();
      forward.scales = scales;
      F8_ASSERT_OK((*linear)->forward(forward, nullptr));
      BackwardCall backward{.m = m};
      backward.dy.data = groups.row(groups.dy, start, n);
      backward.x.data = forward.x.data;
      backward.w.data = forward.w.data;
      backward.dx.data = groups.row(groups.dx_alone, start, k);
      backward.dw = {groups.dw_alone.as<uint8_t>() + e * (groups.dw_alone.bytes() / experts_count),
                     0, desc.accumulate_grad_weight};
      backward.saved.data = saved.as();
      backward.workspace.data = workspace.as();
      backward.scales = scales;
      F8_ASSERT_OK((*linear)->backward(backward, nullptr));
      start = routing.ends[e];
    }
  }

  static void expect_equal(const DeviceBuffer& together, const DeviceBuffer& alone, size_t used,
                           bool zero_tail, const std::string& name) {
    std::vector<uint8_t> expected = alone.download<uint8_t>();
    const uint8_t tail = zero_tail ? 0 : kPoison;
    std::fill(expected.begin() + static_cast<std::ptrdiff_t>(used), expected.end(), tail);
    EXPECT_EQ(together.download<uint8_t>(), expected) << name << ", zero_tail " << zero_tail;
    EXPECT_TRUE(together.guards_are_whole()) << name;
  }

  // Of two libraries, whose sums have other orders.
  static void expect_close(const DeviceBuffer& together, const DeviceBuffer& alone, size_t used,
                           bool zero_tail, Dtype type, const std::string& name) {
    const auto found = together.download<uint8_t>(), expected = alone.download<uint8_t>();
    const uint8_t tail = zero_tail ? 0 : kPoison;
    EXPECT_TRUE(std::all_of(found.begin() + static_cast<std::ptrdiff_t>(used), found.end(),
                            [&](uint8_t byte) { return byte == tail; }))
        << name << ", zero_tail " << zero_tail;
    double error = 0, norm = 0;
    for (size_t i = 0; i < used / size_bytes(type); ++i) {
      const auto at = static_cast<int64_t>(i);
      const double value = load_element(expected.data(), at, type);
      if (std::isinf(value)) {  // products of outliers, in f16
        EXPECT_EQ(load_element(found.data(), at, type), value) << name;
        continue;
      }
      error += std::pow(load_element(found.data(), at, type) - value, 2);
      norm += value * value;
    }
    EXPECT_LE(std::sqrt(error), 4e-3 * std::sqrt(norm)) << name;
    EXPECT_TRUE(together.guards_are_whole()) << name;
  }

  // cuBLASLt computes a linear's GEMMs in high precision.
  static void expect_alike(const ExpertsDesc& desc, Gemm gemm, const DeviceBuffer& together,
                           const DeviceBuffer& alone, size_t used, bool zero_tail,
                           const std::string& name) {
    if (kEmulated || desc.recipe.at(gemm).is_fp8()) {
      expect_equal(together, alone, used, zero_tail, name);
    } else {
      const bool of_weight = gemm == Gemm::kGradWeight;
      expect_close(together, alone, used, zero_tail,
                   of_weight ? desc.grad_weight_dtype : desc.tensor_dtype, name);
    }
  }

  // What a step of an expert linear has beside its tensors.
  struct Buffers {
    Buffers(const Context& context, const Experts& of, const GroupLayoutPlan& layouts_of,
            const std::vector<int32_t>& ends)
        : experts(of),
          layouts(layouts_of),
          layout(context, std::vector<uint8_t>(layouts.bytes())),
          offsets(context, ends),
          saved(context, experts.saved_bytes()),
          workspace(context, experts.workspace_bytes()),
          scales(experts.context(), experts) {}

    [[nodiscard]] Status make_layout(int64_t m, Stream stream = nullptr) const {
      return layouts.run({.offsets = offsets.as<int32_t>(), .m = m, .layout = {layout.as()}},
                         stream);
    }
    [[nodiscard]] ExpertsForwardCall forward(const Groups& groups, int64_t m,
                                             bool zero_tail = false) const {
      return {.m = m,
              .x = {groups.x.as()},
              .w = {groups.w.as()},
              .y = {groups.y.as()},
              .layout = {layout.as()},
              .saved = {saved.as()},
              .workspace = {workspace.as()},
              .zero_tail = zero_tail,
              .scales = scales.slots()};
    }
    [[nodiscard]] ExpertsBackwardCall backward(const Groups& groups, int64_t m,
                                               bool zero_tail = false) const {
      return {.m = m,
              .dy = {groups.dy.as()},
              .dx = {groups.dx.as()},
              .dw = {groups.dw.as(), 0, GetParam().accumulate},
              .layout = {layout.as()},
              .saved = {saved.as()},
              .workspace = {workspace.as()},
              .w = {reads_weight() ? groups.w.as() : nullptr},
              .zero_tail = zero_tail,
              .scales = scales.slots(),
              .x = {groups.x.as()}};
    }

    [[nodiscard]] bool reads_weight() const {
      return experts.desc().recompute_weight ||
             !experts.desc().recipe.at(Gemm::kGradInput).is_fp8();
    }

    const Experts& experts;
    const GroupLayoutPlan& layouts;
    DeviceBuffer layout, offsets, saved, workspace;
    Scales scales;
  };

  // `routing` is what becomes of the offsets `given`.
  void check(const Routing& routing, const std::vector<int32_t>& given, int64_t n, int64_t k) {
    const ExpertsDesc desc = describe(routing, n, k);
    const auto experts = Experts::plan(context_, desc);
    F8_ASSERT_OK(experts);
    Groups groups(context(), routing, desc);
    const auto layouts = GroupLayoutPlan::create(context_, desc.shape.m, desc.experts);
    F8_ASSERT_OK(layouts);
    Buffers buffers(context(), **experts, *layouts, given);
    run_dense(**experts, routing, groups, buffers.scales.slots());
    std::vector<uint32_t> recorded = buffers.scales.words();
    if (routing.m > 0 && !(*experts)->scale_slots().empty()) {
      // Experts without rows are cast too.
      recorded[static_cast<size_t>(Tensor::kWeight)] = groups.weight_amax(desc);
    }
    for (const bool zero_tail : {false, true}) {
      groups.poison_results(desc);
      buffers.scales.reset(buffers.scales.image());
      F8_ASSERT_OK(buffers.make_layout(routing.m));
      F8_ASSERT_OK((*experts)->forward(buffers.forward(groups, routing.m, zero_tail), nullptr));
      buffers.workspace.poison();
      F8_ASSERT_OK((*experts)->backward(buffers.backward(groups, routing.m, zero_tail), nullptr));
      const bool zeroed = zero_tail && routing.m > 0;
      const size_t used = static_cast<size_t>(routing.ends.back()) * groups.element_bytes;
      expect_alike(desc, Gemm::kOutput, groups.y, groups.y_alone, used * static_cast<size_t>(n),
                   zeroed, routing.name + ", y");
      expect_alike(desc, Gemm::kGradInput, groups.dx, groups.dx_alone,
                   used * static_cast<size_t>(k), zeroed, routing.name + ", dx");
      expect_alike(desc, Gemm::kGradWeight, groups.dw, groups.dw_alone, groups.dw.bytes(), false,
                   routing.name + ", dw");
      EXPECT_TRUE(buffers.saved.guards_are_whole() && buffers.workspace.guards_are_whole())
          << routing.name;
      EXPECT_EQ(buffers.scales.words(), recorded) << routing.name << ", amaxes";
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    Recipes, ExpertsTest,
    ::testing::Values(ExpertsCase{"tensorwise"}, ExpertsCase{"rowwise"},
                      ExpertsCase{"rowwise", Dtype::kF16, Dtype::kF32},
                      ExpertsCase{"rowwise", Dtype::kBf16, Dtype::kF32, true},
                      ExpertsCase{"tensorwise", Dtype::kBf16, Dtype::kBf16, true},
                      ExpertsCase{"tensorwise", Dtype::kF32}, ExpertsCase{"blockwise"},
                      ExpertsCase{"tensorwise", Dtype::kBf16, Dtype::kBf16, false, true},
                      ExpertsCase{"rowwise", Dtype::kBf16, Dtype::kF32, true, true},
                      ExpertsCase{"blockwise", Dtype::kBf16, Dtype::kBf16, false, true},
                      ExpertsCase{"blockwise", Dtype::kF16, Dtype::kF32, true},
                      ExpertsCase{"rowwise_with_gw_hp"},
                      ExpertsCase{"rowwise_with_gw_hp", Dtype::kF16, Dtype::kF32, true, true},
                      ExpertsCase{"bf16"}, ExpertsCase{"bf16", Dtype::kF16, Dtype::kF32, true},
                      ExpertsCase{"delayed"},
                      ExpertsCase{"delayed", Dtype::kF32, Dtype::kF32, true, true}),
    [](const auto& suite) {
      return f8::format("{}_{}_{}{}", suite.param.recipe, to_string(suite.param.tensor_dtype),
                        to_string(suite.param.grad_weight_dtype),
                        suite.param.accumulate ? "_add" : "") +
             (suite.param.recompute_weight ? "_recompute" : "");
    });

TEST_P(ExpertsTest, AreLinearsOfEachExpert) {
  for (const Routing& routing : routings(by_device(1024, 40))) {
    // N and K of several blocks, which these do not divide, and with many experts small ones.
    const bool small = routing.ends.size() > 100;
    check(routing, routing.ends, small ? 80 : by_device(400, 144),
          small ? 48 : by_device(528, 272));
    if (HasFailure()) return;
  }
}

// Bad offsets are clamped: no row beyond x is read or written, and the call is that of good ones.
TEST_P(ExpertsTest, BadOffsetsAreClamped) {
  for (uint64_t seed = 1; seed <= static_cast<uint64_t>(by_device(40, 10)); ++seed) {
    const Routing bad = bad_routing(seed);
    Routing good{f8::format("bad offsets {}", seed), {}, bad.m};
    const reference::Groups groups = reference::groups(bad.ends, bad.m);
    for (size_t e = 0; e < bad.ends.size(); ++e) {
      good.ends.push_back(groups.starts[e] + groups.lengths[e]);
    }
    check(good, bad.ends, 80, 48);
    if (HasFailure()) return;
  }
}

// A forward for which no backward follows saves nothing, and gives the same y.
TEST_P(ExpertsTest, ForwardAlone) {
  const Routing routing = routings(by_device(1024, 40))[1];
  const ExpertsDesc desc = describe(routing, 144, 272);
  const auto experts = Experts::plan(context_, desc);
  F8_ASSERT_OK(experts);
  const Groups groups(context(), routing, desc);
  const auto layouts = GroupLayoutPlan::create(context_, desc.shape.m, desc.experts);
  F8_ASSERT_OK(layouts);
  const Buffers buffers(context(), **experts, *layouts, routing.ends);
  F8_ASSERT_OK(buffers.make_layout(routing.m));
  ExpertsForwardCall call = buffers.forward(groups, routing.m);
  F8_ASSERT_OK((*experts)->forward(call, nullptr));
  call.saved = {};
  call.y.data = groups.y_alone.as();
  F8_ASSERT_OK((*experts)->forward(call, nullptr));
  EXPECT_EQ(groups.y.download<uint8_t>(), groups.y_alone.download<uint8_t>());
}

// In a first step all groups have the scale of their amaxes together, the weights that of all, and the
// state has these amaxes; in a validation it stays as it is.
TEST_P(ExpertsTest, AFirstStepFindsOneScale) {
  const Routing routing = routings(by_device(1024, 40))[1];
  const ExpertsDesc desc = describe(routing, 144, 272);
  const auto experts = Experts::plan(context_, desc);
  F8_ASSERT_OK(experts);
  const std::vector<DelayedSlot>& slots = (*experts)->scale_slots();
  if (slots.empty()) return;
  Groups groups(context(), routing, desc);
  const auto layouts = GroupLayoutPlan::create(context_, desc.shape.m, desc.experts);
  F8_ASSERT_OK(layouts);
  Buffers buffers(context(), **experts, *layouts, routing.ends);
  F8_ASSERT_OK(buffers.make_layout(routing.m));
  const std::vector<uint32_t> before = buffers.scales.image();
  float8_step step{.first_step = 1, .evaluate = 1};
  ExpertsForwardCall forward = buffers.forward(groups, routing.m);
  ExpertsBackwardCall backward = buffers.backward(groups, routing.m);
  forward.step = backward.step = &step;
  F8_ASSERT_OK((*experts)->forward(forward, nullptr));
  EXPECT_EQ(buffers.scales.words(), before);
  const std::vector<uint8_t> evaluated = groups.y.download<uint8_t>();
  step.evaluate = 0;
  F8_ASSERT_OK((*experts)->forward(forward, nullptr));
  F8_ASSERT_OK((*experts)->backward(backward, nullptr));
  const std::vector<uint32_t> recorded = buffers.scales.words();
  // Linears with these scales.
  std::vector<uint32_t> found = before;
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto amax = std::bit_cast<float>(recorded[i]);
    EXPECT_GT(amax, 0) << "slot " << i;
    buffers.scales.set_scale(found, i, scale_from_amax(amax, slots[i].dtype, slots[i].pow2));
  }
  buffers.scales.reset(found);
  run_dense(**experts, routing, groups, buffers.scales.slots());
  const std::vector<uint32_t> again = buffers.scales.words();
  EXPECT_EQ(recorded[static_cast<size_t>(Tensor::kWeight)], groups.weight_amax(desc));
  for (const Tensor tensor : {Tensor::kInput, Tensor::kGradOutput}) {
    EXPECT_EQ(recorded[static_cast<size_t>(tensor)], again[static_cast<size_t>(tensor)]);
  }
  const size_t used = static_cast<size_t>(routing.ends.back()) * groups.element_bytes;
  expect_equal(groups.y, groups.y_alone, used * 144, false, "y");
  expect_equal(groups.dx, groups.dx_alone, used * 272, false, "dx");
  expect_equal(groups.dw, groups.dw_alone, groups.dw.bytes(), false, "dw");
  EXPECT_EQ(evaluated, groups.y.download<uint8_t>());
}

// A step that is captured once gives with other offsets, replay by replay, what it gives eagerly: the
// host reads none of them.
TEST_P(ExpertsTest, AGraphTakesOtherOffsets) {
  constexpr size_t kExperts = 8;
  const int32_t m = by_device(4096, 200);
  const auto routing_number = [&](uint64_t seed) {
    Routing routing = random_routing(
        "replay", seed % 2 == 0 ? zipf(kExperts) : std::vector<double>(kExperts, 1.0),
        m - static_cast<int32_t>(seed % 40), seed);
    routing.m = m;
    return routing;
  };
  const ExpertsDesc desc = describe(routing_number(0), 144, 272);
  const auto experts = Experts::plan(context_, desc);
  F8_ASSERT_OK(experts);
  const auto layouts = GroupLayoutPlan::create(context_, m, kExperts);
  F8_ASSERT_OK(layouts);
  Groups groups(context(), routing_number(0), desc);
  Buffers buffers(context(), **experts, *layouts, routing_number(0).ends);
  const auto step = [&](Stream stream) -> Status {
    F8_TRY(buffers.make_layout(m, stream));
    F8_TRY((*experts)->forward(buffers.forward(groups, m, true), stream));
    return (*experts)->backward(buffers.backward(groups, m, true), stream);
  };
  const auto results = [&] {
    std::vector<std::vector<uint8_t>> all;
    for (const DeviceBuffer* buffer : {&groups.y, &groups.dx, &groups.dw}) {
      all.push_back(buffer->download<uint8_t>());
    }
    return all;
  };
  const DeviceStream stream(context());
  const DeviceGraph graph(context(), stream, [&] { return step(stream.get()); });
  for (uint64_t seed = 1; seed <= static_cast<uint64_t>(repeats(100)); ++seed) {
    const Routing routing = routing_number(seed);
    buffers.offsets.upload(routing.ends.data(), routing.ends.size() * sizeof(int32_t));
    groups.poison_results(desc);
    F8_ASSERT_OK(step(nullptr));
    const auto expected = results();
    groups.poison_results(desc);
    graph.replay();
    ASSERT_EQ(results(), expected) << "offsets " << seed;
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
