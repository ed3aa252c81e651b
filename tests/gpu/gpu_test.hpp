// The common part of the GPU tests: the device, or a visible skip if there is no Hopper GPU, and
// device memory that shows what was not written and what was written beside it.
//
// The tests that the CPU can run in time are also in a program for an emulated device: the same
// assertions hold there without a GPU.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/format.hpp"
#include "recipes/reference/reference.hpp"
#include "runtime/device/context_state.hpp"
#include "tests/sanitized.hpp"

namespace f8::runtime::gpu {

extern const bool kEmulated;

// Gives the size for a device, or a smaller one that does not take a CPU minutes.
template <class T>
[[nodiscard]] T by_device(T real, T emulated) {
  return kEmulated ? emulated : real;
}

// Gives the number of repeats for what must come out the same every time.
[[nodiscard]] inline int repeats(int often) {
  return kEmulated || sanitized() ? 3 : often;
}

inline constexpr uint8_t kPoison = 0xff;  // NaN in bf16, f32 and the fp8 formats
inline constexpr uint8_t kGuard = 0xa5;
inline constexpr size_t kGuardBytes = 1024;

// Fails the test with the error's words, and stops it.
#define F8_ASSERT_OK(...)                                            \
  do {                                                               \
    const auto& f8_result = (__VA_ARGS__);                           \
    ASSERT_TRUE(f8_result.has_value()) << f8_result.error().message; \
  } while (false)

// Device memory: `bytes` of poison between two guards.
class DeviceBuffer {
 public:
  DeviceBuffer(const Context& context, size_t bytes);
  template <class T>
  DeviceBuffer(const Context& context, std::span<const T> values)
      : DeviceBuffer(context, values.size_bytes()) {
    upload(values.data(), values.size_bytes());
  }
  template <class T>
  DeviceBuffer(const Context& context, const std::vector<T>& values)
      : DeviceBuffer(context, std::span<const T>(values)) {}
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  template <class T = void>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(address_ + kGuardBytes);
  }
  [[nodiscard]] size_t bytes() const { return bytes_; }
  void upload(const void* from, size_t bytes);
  void poison();
  template <class T>
  [[nodiscard]] std::vector<T> download() const {
    std::vector<T> out(bytes_ / sizeof(T));
    download(out.data(), out.size() * sizeof(T));
    return out;
  }
  [[nodiscard]] std::vector<double> bf16() const;
  [[nodiscard]] std::vector<double> f32() const;
  // True if nothing was written before the first or behind the last byte.
  [[nodiscard]] bool guards_are_whole() const;

 private:
  void download(void* to, size_t bytes) const;
  void finish() const;

  const Driver& driver_;
  CUdeviceptr address_ = 0;
  size_t bytes_;
};

class DeviceStream {
 public:
  explicit DeviceStream(const Context& context);
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;
  [[nodiscard]] Stream get() const { return stream_; }
  void synchronize() const;

 private:
  const Driver& driver_;
  CUstream stream_ = nullptr;
};

// Captures what a function enqueues on a stream instead of running it.
class DeviceGraph {
 public:
  DeviceGraph(const Context& context, const DeviceStream& stream,
              const std::function<Status()>& enqueue);
  ~DeviceGraph();
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;
  // Waits for what the default stream still does, replays, and waits.
  void replay() const;

 private:
  const Driver& driver_;
  const DeviceStream& stream_;
  CUgraph graph_ = nullptr;
  CUgraphExec exec_ = nullptr;
};

// Skips where there is no Hopper GPU; the context is one for all tests, so kernels load once.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;
  [[nodiscard]] Context& context() const { return *context_; }
  [[nodiscard]] const Driver& driver() const { return context_->state().driver; }
  // Compiles these side by side, so that loading them one by one takes no time.
  void compile(const std::vector<codegen::KernelSpec>& specs);

  std::shared_ptr<Context> context_;
};

template <class Parameter>
class GpuTestWith : public GpuTest, public ::testing::WithParamInterface<Parameter> {};

[[nodiscard]] inline DeviceBuffer to_device(const Context& context, const reference::Matrix& x) {
  return {context, reference::to_bf16_bits(x)};
}

}  // namespace f8::runtime::gpu
