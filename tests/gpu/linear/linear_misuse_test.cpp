// Misuse that the host knows from the driver alone: pointers and streams that are not the device's.
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
  F8_ASSERT_OK(linear.forward(t.forward(), stream.get()));
  F8_ASSERT_OK(linear.backward(t.backward(), stream.get()));
  stream.synchronize();

  const auto refused = [&](const ForwardCall& call, std::string_view words) {
    const Status status = linear.forward(call, stream.get());
    ASSERT_FALSE(status) << words;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(status.error().message.find(words), std::string::npos) << status.error().message;
  };
  // x ends 16 bytes behind its allocation and the guard in it; these are no other tensor's.
  constexpr size_t kLarge = size_t{8} << 20;
  const DeviceBuffer large(*context, kLarge);
  ForwardCall call = t.forward();
  call.x.data = large.as<uint8_t>() + kLarge + kGuardBytes + 16 -
                static_cast<size_t>(kShape.m * kShape.k) * 2;
  refused(call, "float8_linear_forward: float8_forward_args.x needs");
  if (!kEmulated) {  // there all memory is the host's
    std::vector<std::max_align_t> host(static_cast<size_t>(kShape.m * kShape.n) * 2 / 16);
    call = t.forward();
    call.y.data = host.data();
    refused(call, "float8_linear_forward: float8_forward_args.y is ordinary memory of the host");
  }
  call = t.forward();
  call.y.data = const_cast<void*>(call.x.data);
  refused(call, "float8_linear_forward: float8_forward_args.y");
}

}  // namespace
}  // namespace f8::runtime::gpu
