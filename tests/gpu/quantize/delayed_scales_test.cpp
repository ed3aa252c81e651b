// Delayed scaling on the device: its steps and updates against the reference, and a state that
// leaves the device and comes back.
#include <bit>
#include <cmath>

#include "runtime/model/scale_checkpoint.hpp"
#include "tests/gpu/gemm_operands.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

// Steps of delayed scaling against the reference: scales bitwise, results within the bounds.
TEST_F(GpuTest, DelayedScalingStepByStep) {
  const auto linear = Linear::plan(context_, describe("delayed", {300, 208, 592})).value();
  const DelayedOptions options{.history = 3};
  const auto scales = DelayedScales::plan(context_, linear->scale_slots(), options).value();
  const DeviceBuffer state(context(), scales.bytes());
  F8_ASSERT_OK(scales.init(state.as(), nullptr));
  std::array<reference::DelayedState, 3> states;
  for (int step = 0; step < 6; ++step) {
    Tensors t(context(), *linear, 300, static_cast<uint64_t>(100 + step));
    t.slots = scales.slots(state.as(), 0);
    t.first_step = step == 0;
    F8_ASSERT_OK(linear->forward(t.forward(), nullptr));
    F8_ASSERT_OK(linear->backward(t.backward(), nullptr));
    reference::DelayedAmax scaled_by;
    if (step > 0) {
      scaled_by = {448.0F / states[0].scale, 448.0F / states[1].scale, 57344.0F / states[2].scale};
    }
    const auto expected =
        reference::linear(linear->desc().recipe, t.x, t.w, t.dy, scaled_by).value();
    EXPECT_LE(reference::relative_error(expected.y, t.y.bf16()), kFastBound) << step;
    EXPECT_LE(reference::relative_error(expected.dx, t.dx.bf16()), 2 * kPreciseBound) << step;
    EXPECT_LE(reference::relative_error(expected.dw, t.dw.bf16()), 2 * kPreciseBound) << step;
    F8_ASSERT_OK(scales.update(state.as(), nullptr));
    const auto words = state.download<float>();
    const auto first = static_cast<size_t>(t.slots.scale - state.as<float>());
    const reference::Matrix* tensors[] = {&t.x, &t.w, &t.dy};
    for (size_t i = 0; i < states.size(); ++i) {
      states[i].amax =
          std::bit_cast<uint32_t>(reference::amax(*tensors[i], reference::AmaxOver::kTensor)[0]);
    }
    reference::scale_update(linear->scale_slots(), options, states);
    for (size_t i = 0; i < states.size(); ++i) {
      EXPECT_EQ(words[first + i * 8], states[i].scale) << "step " << step << " slot " << i;
      EXPECT_EQ(words[first + i * 8 + 4], 1.0F / states[i].scale);
      EXPECT_EQ(words[i], 0.0F) << "the amax is cleared";
    }
  }
  EXPECT_TRUE(state.guards_are_whole());
}

// Every path of the update, many slots at once, bitwise; every fifth step is dropped, by a flag on
// the device or by the host, and every third one has amaxes that are not finite.
TEST_F(GpuTest, ScaleUpdateLikeTheReference) {
  std::vector<DelayedSlot> slots;
  for (size_t i = 0; i < 1000; ++i) {
    slots.push_back({i % 3 == 0 ? Dtype::kE5m2 : Dtype::kE4m3, i % 2 == 0});
  }
  for (const DelayedOptions& options : {DelayedOptions{}, DelayedOptions{.history = 1, .margin = 3},
                                        DelayedOptions{.history = 4,
                                        .scale_from = ScaleFrom::kMostRecent,
                                        .non_finite = NonFinite::kSaturate}}) {
    const auto scales = DelayedScales::plan(context_, slots, options).value();
    DeviceBuffer state(context(), scales.bytes());
    DeviceBuffer found_inf(context(), sizeof(float));
    F8_ASSERT_OK(scales.init(state.as(), nullptr));
    std::vector<reference::DelayedState> expected(slots.size());
    const auto first = static_cast<size_t>(scales.slots(state.as(), 0).scale - state.as<float>());
    for (uint64_t step = 0; step < 20; ++step) {
      const auto random = reference::random_matrix(1, 1000, step);
      auto words = state.download<uint32_t>();
      const float drop = step % 5 == 3 ? 1 : 0;
      float found = drop;
      for (size_t i = 0; i < slots.size(); ++i) {
        uint32_t amax = std::bit_cast<uint32_t>(
            std::ldexp(std::abs(random.values[i]), static_cast<int>(i % 200) - 100));
        if (i % 7 == step % 7 || i == 5) amax = 0;
        if (i == 900 - step && step % 3 == 0) amax = 0x7f800000;
        if (i % 13 == step && step % 6 == 0) amax = 0x7fc00000;
        words[i] = expected[i].amax = amax;
        if (reference::is_non_finite(amax)) found = 1;
      }
      reference::scale_update(slots, options, expected, drop != 0);
      state.upload(words.data(), words.size() * 4);
      found_inf.upload(&drop, sizeof drop);
      F8_ASSERT_OK(scales.find_inf(state.as(), found_inf.as<float>(), nullptr));
      EXPECT_EQ(found_inf.download<float>()[0], found) << step;
      found_inf.upload(&drop, sizeof drop);
      F8_ASSERT_OK(step == 8 ? scales.discard(state.as(), nullptr)
                             : scales.update(state.as(), nullptr, found_inf.as<float>()));
      const auto after = state.download<float>();
      for (size_t i = 0; i < slots.size(); ++i) {
        const float scale = after[first + i * 8];
        ASSERT_EQ(std::bit_cast<uint32_t>(scale), std::bit_cast<uint32_t>(expected[i].scale))
            << "step " << step << " slot " << i;
      }
      const auto histories = scales.histories(state.as(), nullptr);
      F8_ASSERT_OK(histories);
      for (size_t i = 0; i < slots.size(); ++i) {
        ASSERT_EQ((*histories)[i], expected[i].history) << "step " << step << " slot " << i;
      }
    }
  }
}

TEST_F(GpuTest, AScaleStateResumesBitwise) {
  constexpr Shape kOfLinear = {256, 128, 384};
  const auto planned = Linear::plan(context_, describe("delayed", kOfLinear));
  F8_ASSERT_OK(planned);
  const Linear& linear = **planned;
  Tensors t(*context_, linear, kOfLinear.m, 2);
  const auto scales = DelayedScales::plan(context_, linear.scale_slots(), {.history = 4}).value();
  const DeviceBuffer state(*context_, scales.bytes());
  const DeviceStream stream(*context_);
  F8_ASSERT_OK(scales.init(state.as(), stream.get()));
  t.slots = scales.slots(state.as(), 0);
  const auto step = [&](int i) {
    t.first_step = i == 0;
    // The steps' inputs differ: the first rows alone, more of them each time.
    t.m = kOfLinear.m / 8 * (i + 1);
    F8_ASSERT_OK(linear.forward(t.forward(), stream.get()));
    F8_ASSERT_OK(linear.backward(t.backward(), stream.get()));
    F8_ASSERT_OK(scales.update(state.as(), stream.get()));
  };
  for (int i = 0; i < 4; ++i) step(i);
  std::vector<std::byte> saved(saved_state_bytes(scales));
  F8_ASSERT_OK(save_state(scales, state.as(), saved, stream.get()));
  for (int i = 4; i < 8; ++i) step(i);
  stream.synchronize();
  const auto y = t.y.download<uint16_t>();
  const auto dw = t.dw.download<uint16_t>();
  const auto last = state.download<uint32_t>();

  F8_ASSERT_OK(load_state(scales, state.as(), saved, stream.get()));
  for (int i = 4; i < 8; ++i) step(i);
  stream.synchronize();
  EXPECT_EQ(t.y.download<uint16_t>(), y);
  EXPECT_EQ(t.dw.download<uint16_t>(), dw);
  EXPECT_EQ(state.download<uint32_t>(), last);
  EXPECT_TRUE(state.guards_are_whole());

  saved[20] ^= std::byte{1};
  const Status corrupt = load_state(scales, state.as(), saved, stream.get());
  ASSERT_FALSE(corrupt);
  EXPECT_EQ(corrupt.error().code, ErrorCode::kCorrupt);
  EXPECT_EQ(state.download<uint32_t>(), last);
}

}  // namespace
}  // namespace f8::runtime::gpu
