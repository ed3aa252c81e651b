// Training without a GPU takes host memory, the kernels' plain counterparts and float8's emulated
// device. Everything is done when the call returns, so there is nothing to record or to wait for.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <vector>

#include "device/backend.hpp"
#include "device/host_kernels.hpp"
#include "error.hpp"

namespace train {
namespace {

constexpr std::align_val_t kAlignment{256};

float8::Context emulated_context(int device) {
  float8::ContextOptions options;
  options.emulate = true;
  return float8::Context::create(device, options).value();
}

class HostBackend final : public Backend {
 public:
  explicit HostBackend(int device) : context_(emulated_context(device)) {}
  void* allocate(size_t bytes) override {
    void* memory = ::operator new(std::max<size_t>(bytes, 1), kAlignment, std::nothrow);
    if (memory == nullptr) {
      fail(FLOAT8_OUT_OF_MEMORY, "no %zu bytes of host memory; choose a smaller model", bytes);
    }
    memory_.emplace_back(memory);
    std::memset(memory, 0, bytes);
    return memory;
  }
  void upload(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }

  void launch(const KernelCall& call) override {
    std::visit([](const auto& args) { host::run(args); }, call);
  }
  int share_count() const override { return 4; }
  float8::Context& context() override { return context_; }
  float8_stream stream() override { return nullptr; }

  void attach() override {}
  // A call that ranks make together is done when it returns.
  void set_communicator(const float8::Communicator*, int) override {}
  void record(const std::function<void()>& step) override { step_ = step; }
  double repeat(int64_t times) override {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < times; ++i) step_();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
        .count();
  }

 private:
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
  };
  float8::Context context_;
  std::vector<std::unique_ptr<void, Free>> memory_;
  std::function<void()> step_;
};

}  // namespace

std::unique_ptr<Backend> make_host_backend(int device) {
  return std::make_unique<HostBackend>(device);
}

}  // namespace train
