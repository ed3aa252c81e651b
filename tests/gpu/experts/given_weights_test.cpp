// Calls that are given the weights of all experts in fp8, as one tensor's cast, two tensors' or a rank's, have
// the results and amaxes of calls that cast them.
#include <algorithm>
#include <bit>
#include <optional>
#include <vector>

#include "runtime/experts/expert_quantizer.hpp"
#include "runtime/experts/experts.hpp"
#include "runtime/experts/group_layout.hpp"
#include "tests/call_args.hpp"
#include "tests/gpu/experts/routings.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

class GivenWeightsTest : public GpuTestWith<const char*> {
 protected:
  static constexpr int64_t kN = 256, kK = 272, kExperts = 8;
  static constexpr int64_t kHalf = kN / 2 * kK * 2;  // bytes of half of an expert's rows

  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    ExpertsDesc desc;
    desc.shape = {routing_.m, kN, kK};
    desc.experts = kExperts;
    desc.recipe = find_recipe(GetParam()).value();
    desc.recompute_weight = true;
    const auto planned = Experts::plan(context_, desc);
    F8_ASSERT_OK(planned);
    experts_ = *planned;
    delayed_.emplace(DelayedScales::plan(context_, experts_->scale_slots()).value());
    // Scales of earlier steps, which are no powers of two.
    std::vector<uint32_t> words = delayed_->initial();
    for (size_t i = 0; i < delayed_->count(); ++i) {
      const size_t at = delayed_->layout().scale / 4 + i * kernels::kScaleStride;
      words[at] = std::bit_cast<uint32_t>(37.5F);
      words[at + kernels::kInverse] = std::bit_cast<uint32_t>(1 / 37.5F);
    }
    words.resize(std::max<size_t>(words.size(), 1));
    state_.emplace(context(), words);
    image_ = words;
  }
  [[nodiscard]] static std::vector<uint8_t> elements(int64_t rows, int64_t cols, uint64_t seed) {
    using reference::Distribution;
    return reference::to_bytes(
        reference::rounded_to(reference::random_matrix(rows, cols, seed, Distribution::kOutliers),
                              Dtype::kBf16),
        Dtype::kBf16);
  }
  [[nodiscard]] float8_scale_slots slots() const {
    return delayed_->count() == 0 ? float8_scale_slots{} : delayed_->slots(state_->as(), 0);
  }
  // The bytes of y and dx, and the words of the state, behind a step.
  std::vector<std::vector<uint8_t>> step(const float8_matrix& w, const float8_step* how) {
    const auto m = static_cast<int64_t>(routing_.m);
    const auto layouts = GroupLayoutPlan::create(context_, m, kExperts);
    const DeviceBuffer layout(context(), std::vector<uint8_t>(layouts->bytes()));
    const DeviceBuffer offsets(context(), routing_.ends);
    EXPECT_TRUE(
        layouts->run({.offsets = offsets.as<int32_t>(), .m = m, .layout = {layout.as()}}, nullptr));
    const DeviceBuffer x(context(), elements(m, kK, 1)), dy(context(), elements(m, kN, 3));
    const DeviceBuffer y(context(), dy.bytes()), dx(context(), x.bytes());
    const DeviceBuffer saved(context(), experts_->saved_bytes());
    const DeviceBuffer workspace(context(), experts_->workspace_bytes());
    const Status forward = experts_->forward({.m = m,
                                              .x = {x.as()},
                                              .w = w,
                                              .y = {y.as()},
                                              .layout = {layout.as()},
                                              .saved = {saved.as()},
                                              .workspace = {workspace.as()},
                                              .step = how,
                                              .scales = slots()},
                                             nullptr);
    EXPECT_TRUE(forward) << forward.error().message;
    const Status backward = experts_->backward({.m = m,
                                                .dy = {dy.as()},
                                                .dx = {dx.as()},
                                                .layout = {layout.as()},
                                                .saved = {saved.as()},
                                                .workspace = {workspace.as()},
                                                .w = w,
                                                .step = how,
                                                .scales = slots()},
                                               nullptr);
    EXPECT_TRUE(backward) << backward.error().message;
    return {y.download<uint8_t>(), dx.download<uint8_t>(), state_->download<uint8_t>()};
  }
  void reset_state() { state_->upload(image_.data(), image_.size() * sizeof(uint32_t)); }

  Routing routing_ = routings(by_device(512, 24))[1];
  std::shared_ptr<const Experts> experts_;
  std::optional<DelayedScales> delayed_;
  std::optional<DeviceBuffer> state_;
  std::vector<uint32_t> image_;
};

INSTANTIATE_TEST_SUITE_P(Recipes, GivenWeightsTest,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp",
                                           "blockwise", "delayed"));

TEST_P(GivenWeightsTest, HaveTheBitsOfCallsThatCast) {
  const std::vector<uint8_t> all = elements(kExperts * kN, kK, 2);
  std::vector<uint8_t> halves[2];
  for (int64_t i = 0; i < 2 * kExperts; ++i) {
    std::vector<uint8_t>& to = halves[i % 2];
    to.insert(to.end(), all.begin() + i * kHalf, all.begin() + (i + 1) * kHalf);
  }
  const DeviceBuffer w(context(), all), first(context(), halves[0]), second(context(), halves[1]);
  for (const float8_step* how : {first_step_if(false), first_step_if(true)}) {
    reset_state();
    const auto expected = step({w.as()}, how);
    for (const bool over_ranks : {false, true}) {
      for (const bool two : {false, true}) {
        SCOPED_TRACE(f8::format("first step {}, over ranks {}, two tensors {}", how != nullptr,
                                over_ranks, two));
        ExpertQuantizerDesc desc;
        desc.experts = kExperts;
        desc.rows = kN;
        desc.cols = kK;
        desc.recipe = experts_->desc().recipe;
        desc.over_ranks = over_ranks;
        desc.two_tensors = two;
        const auto quantizer = ExpertQuantizer::plan(context_, desc);
        F8_ASSERT_OK(quantizer);
        const float8_layout& at = (*quantizer)->layout();
        const DeviceBuffer tensor(context(), at.tensor_bytes - at.transposed_bytes);
        const DeviceBuffer transposed(context(), at.transposed_bytes);
        const DeviceBuffer workspace(context(), (*quantizer)->workspace_bytes());
        const DeviceBuffer amax(context(), at.amax_words * sizeof(uint32_t));
        const DeviceBuffer row_amax(context(), at.row_amax_words * sizeof(uint32_t));
        ExpertQuantizeCall call{.w = {two ? first.as() : w.as()},
                                .tensor = {tensor.as()},
                                .transposed = {transposed.as()},
                                .workspace = {workspace.as()},
                                .step = how,
                                .scales = slots()};
        if (two) call.second_w = {second.as()};
        if (over_ranks) {
          call.amax = amax.as<uint32_t>();
          call.row_amax = row_amax.as<uint32_t>();
          F8_ASSERT_OK((*quantizer)->find_amax(call, nullptr));
        }
        reset_state();
        F8_ASSERT_OK((*quantizer)->run(call, nullptr));
        const auto scales = [](const DeviceBuffer& of, size_t offset) {
          return reinterpret_cast<const float*>(of.as<uint8_t>() + offset);
        };
        float8_tensor view{};
        view.rows = kExperts * kN;
        view.cols = kK;
        view.q = tensor.as();
        view.qt = transposed.as();
        view.q_inverse_scale =
            scales(at.q_scale_apart != 0 ? transposed : tensor, at.q_inverse_scale);
        view.qt_inverse_scale = scales(transposed, at.qt_inverse_scale);
        view.ld_q = at.ld_q;
        view.ld_qt = at.ld_qt;
        view.q_setting = cast_setting(desc.recipe.at(Gemm::kOutput).b);
        view.qt_setting = cast_setting(desc.recipe.at(Gemm::kGradInput).b);
        EXPECT_EQ(step({nullptr, 0, &view}, how), expected);
        for (const DeviceBuffer* buffer : {&tensor, &transposed, &workspace, &amax, &row_amax}) {
          EXPECT_TRUE(buffer->guards_are_whole());
        }
      }
    }
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
