// Training without a GPU: host memory, the kernels' plain counterparts, float8's emulated device.
// Everything is done when the call returns, so there is nothing to record or to wait for.
#include <chrono>
#include <cstring>
#include <new>
#include <vector>

#include "backend.hpp"
#include "host_kernels.hpp"

namespace f8::train {
namespace {

constexpr std::align_val_t kAlignment{256};

class HostBackend final : public Backend {
 public:
  explicit HostBackend(float8::Context context) : context_(std::move(context)) {}

  Result<void*> allocate(size_t bytes) override {
    void* memory = ::operator new(std::max<size_t>(bytes, 1), kAlignment, std::nothrow);
    if (memory == nullptr) {
      return fail(ErrorCode::kOutOfMemory, "no {} bytes of host memory; choose a smaller model",
                  bytes);
    }
    memory_.emplace_back(memory);
    std::memset(memory, 0, bytes);
    return memory;
  }
  Status upload(void* to, const void* from, size_t bytes) override {
    std::memcpy(to, from, bytes);
    return {};
  }
  Status download(void* to, const void* from, size_t bytes) override {
    std::memcpy(to, from, bytes);
    return {};
  }
  Status launch(const KernelCall& call) override {
    std::visit([](const auto& args) { host::run(args); }, call);
    return {};
  }
  int share_count() const override { return 4; }
  float8::Context& context() override { return context_; }
  float8_stream stream() override { return nullptr; }

  Status record(std::function<Status()> step) override {
    step_ = std::move(step);
    return {};
  }
  Result<double> repeat(int64_t times) override {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < times; ++i) F8_TRY(step_());
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
        .count();
  }

 private:
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
  };
  float8::Context context_;
  std::vector<std::unique_ptr<void, Free>> memory_;
  std::function<Status()> step_;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_host_backend() {
  float8::ContextOptions options;
  options.emulate = true;
  auto context = F8_TRY(to_result(float8::Context::create(0, options)));
  return std::make_unique<HostBackend>(std::move(context));
}

}  // namespace f8::train
