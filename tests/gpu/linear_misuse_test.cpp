// What the host cannot know without the driver: pointers and streams that are not the device's. And
// a scale state out of the device and back while it trains.
#include <cstring>

#include "runtime/scale_checkpoint.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

constexpr Shape kShape = {256, 128, 384};

class LinearMisuse : public GpuTest {
 protected:
  [[nodiscard]] std::shared_ptr<Context> checking() const {
    ContextOptions options = context_->options();
    options.check_pointers = true;
    return Context::create(context_->device().ordinal, options).value();
  }
};

TEST_F(LinearMisuse, PointersAndStreamsAreCheckedOnRequest) {
  const auto context = checking();
  const auto planned = Linear::plan(context, describe("tensorwise", kShape));
  F8_ASSERT_OK(planned);
  const Linear& linear = **planned;
  const Tensors t(*context, linear, kShape.m, 1);
  const DeviceStream stream(*context);
  F8_ASSERT_OK(linear.forward(t.forward(), t.workspace.as(), stream.get()));
  F8_ASSERT_OK(linear.backward(t.backward(), t.workspace.as(), stream.get()));
  stream.synchronize();

  const auto refused = [&](const ForwardCall& call, std::string_view words) {
    const Status status = linear.forward(call, t.workspace.as(), stream.get());
    ASSERT_FALSE(status) << words;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(status.error().message.find(words), std::string::npos) << status.error().message;
  };
  // x ends 16 bytes behind its allocation and the guard in it; these are no other tensor's.
  constexpr size_t kLarge = size_t{8} << 20;
  const DeviceBuffer large(*context, kLarge);
  ForwardCall call = t.forward();
  call.x = large.as<uint8_t>() + kLarge + kGuardBytes + 16 -
           static_cast<size_t>(kShape.m * kShape.k) * 2;
  refused(call, "forward: x needs");
  if (!kEmulated) {  // there all memory is the host's
    std::vector<std::max_align_t> host(static_cast<size_t>(kShape.m * kShape.n) * 2 / 16);
    call = t.forward();
    call.y = host.data();
    refused(call, "forward: y is ordinary memory of the host");
  }
  call = t.forward();
  call.y = const_cast<void*>(call.x);
  refused(call, "forward: y");
}

TEST_F(LinearMisuse, AScaleStateResumesBitwise) {
  const auto planned = Linear::plan(context_, describe("delayed", kShape));
  F8_ASSERT_OK(planned);
  const Linear& linear = **planned;
  Tensors t(*context_, linear, kShape.m, 2);
  const auto scales = DelayedScales::plan(context_, linear.scale_slots(), {.history = 4}).value();
  const DeviceBuffer state(*context_, scales.bytes());
  const DeviceStream stream(*context_);
  F8_ASSERT_OK(scales.init(state.as(), stream.get()));
  t.slots = scales.slots(state.as(), 0);
  const auto step = [&](int i) {
    t.first_step = i == 0;
    // The steps' inputs differ: the first rows alone, more of them each time.
    t.m = kShape.m / 8 * (i + 1);
    F8_ASSERT_OK(linear.forward(t.forward(), t.workspace.as(), stream.get()));
    F8_ASSERT_OK(linear.backward(t.backward(), t.workspace.as(), stream.get()));
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
