#include "tests/gpu/gpu_test.hpp"

#include <algorithm>

namespace f8::runtime::gpu {
namespace {

void expect_success(const Driver& driver, CUresult result, const char* call) {
  const Status status = driver.check(result, call);
  EXPECT_TRUE(status.has_value()) << (status ? "" : status.error().message);
}

const Driver& driver_of(const Context& context) {
  return const_cast<Context&>(context).state().driver;
}

}  // namespace

DeviceBuffer::DeviceBuffer(const Context& context, size_t bytes)
    : driver_(driver_of(context)), bytes_(bytes) {
  expect_success(driver_, driver_.mem_alloc(&address_, bytes_ + 2 * kGuardBytes), "cuMemAlloc");
  expect_success(driver_, driver_.memset_d8(address_, kGuard, bytes_ + 2 * kGuardBytes),
                 "cuMemsetD8");
  poison();
}

DeviceBuffer::~DeviceBuffer() {
  driver_.mem_free(address_);
}

void DeviceBuffer::poison() {
  if (bytes_ > 0) {
    expect_success(driver_, driver_.memset_d8(address_ + kGuardBytes, kPoison, bytes_),
                   "cuMemsetD8");
  }
  finish();
}

// Filling device memory is asynchronous and on the default stream, which others do not wait for.
void DeviceBuffer::finish() const {
  expect_success(driver_, driver_.stream_synchronize(nullptr), "cuStreamSynchronize");
}

void DeviceBuffer::upload(const void* from, size_t bytes) {
  ASSERT_LE(bytes, bytes_);
  expect_success(driver_, driver_.memcpy_htod(address_ + kGuardBytes, from, bytes), "cuMemcpyHtoD");
  finish();
}

void DeviceBuffer::download(void* to, size_t bytes) const {
  expect_success(driver_, driver_.ctx_synchronize(), "cuCtxSynchronize");
  expect_success(driver_, driver_.memcpy_dtoh(to, address_ + kGuardBytes, bytes), "cuMemcpyDtoH");
}

std::vector<double> DeviceBuffer::bf16() const {
  const auto bits = download<uint16_t>();
  std::vector<double> out(bits.size());
  std::ranges::transform(bits, out.begin(),
                         [](uint16_t b) { return static_cast<double>(decode_bf16(b)); });
  return out;
}

std::vector<double> DeviceBuffer::f32() const {
  const auto values = download<float>();
  return {values.begin(), values.end()};
}

bool DeviceBuffer::guards_are_whole() const {
  std::vector<uint8_t> guard(kGuardBytes);
  for (const CUdeviceptr at : {address_, address_ + kGuardBytes + bytes_}) {
    expect_success(driver_, driver_.ctx_synchronize(), "cuCtxSynchronize");
    expect_success(driver_, driver_.memcpy_dtoh(guard.data(), at, guard.size()), "cuMemcpyDtoH");
    if (std::ranges::any_of(guard, [](uint8_t b) { return b != kGuard; })) return false;
  }
  return true;
}

DeviceStream::DeviceStream(const Context& context) : driver_(driver_of(context)) {
  expect_success(driver_, driver_.stream_create(&stream_, CU_STREAM_NON_BLOCKING),
                 "cuStreamCreate");
}

DeviceStream::~DeviceStream() {
  driver_.stream_destroy(stream_);
}

void DeviceStream::synchronize() const {
  expect_success(driver_, driver_.stream_synchronize(stream_), "cuStreamSynchronize");
}

DeviceGraph::DeviceGraph(const Context& context, const DeviceStream& stream,
                         const std::function<Status()>& enqueue)
    : driver_(driver_of(context)), stream_(stream) {
  expect_success(driver_,
                 driver_.stream_begin_capture(stream.get(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
                 "cuStreamBeginCapture");
  const Status captured = enqueue();
  expect_success(driver_, driver_.stream_end_capture(stream.get(), &graph_), "cuStreamEndCapture");
  EXPECT_TRUE(captured) << captured.error().message;
  if (graph_ == nullptr) return;
  expect_success(driver_, driver_.graph_instantiate(&exec_, graph_, 0), "cuGraphInstantiate");
}

DeviceGraph::~DeviceGraph() {
  if (exec_ != nullptr) driver_.graph_exec_destroy(exec_);
  if (graph_ != nullptr) driver_.graph_destroy(graph_);
}

void DeviceGraph::replay() const {
  ASSERT_NE(exec_, nullptr);
  expect_success(driver_, driver_.ctx_synchronize(), "cuCtxSynchronize");
  expect_success(driver_, driver_.graph_launch(exec_, stream_.get()), "cuGraphLaunch");
  stream_.synchronize();
}

void GpuTest::SetUp() {
  static const Result<std::shared_ptr<Context>> shared =
      Context::create(0, {.builtin_table = false, .emulate = kEmulated});
  if (!shared) {
    const ErrorCode code = shared.error().code;
    if (code == ErrorCode::kEnvironment || code == ErrorCode::kUnsupported) {
      GTEST_SKIP() << "no Hopper GPU: " << shared.error().message;
    }
    FAIL() << shared.error().message;
  }
  context_ = *shared;
  F8_ASSERT_OK(context_->make_current());
}

void GpuTest::TearDown() {
  if (context_ == nullptr) return;
  expect_success(driver(), driver().ctx_synchronize(), "cuCtxSynchronize");
}

void GpuTest::compile(const std::vector<codegen::KernelSpec>& specs) {
  F8_ASSERT_OK(context_->compile(specs));
}

}  // namespace f8::runtime::gpu
