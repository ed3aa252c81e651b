// host_time: what a call on a prepared plan takes of the calling thread, for every recipe, and what
// the launch of a kernel that does nothing takes beside it.
//
//   host_time [CALLS]         medians of CALLS calls (2000), in microseconds
//
// The driver's launches are included. A stream that is full makes the host wait, so the device is
// emptied every 100 calls. Whatever else the machine does makes calls longer, never shorter, so the
// fastest tenth is printed as well as the median.
#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "base/format.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"
#include "runtime/linear/linear.hpp"

namespace f8::runtime {
namespace {

constexpr int kCallsInFlight = 100;

struct Times {
  double median = 0;
  double fast = 0;  // a tenth of the calls is not slower
};

// Device memory, freed at the end.
class Memory {
 public:
  Memory(const Driver& driver, size_t bytes) : driver_(driver) {
    if (driver_.mem_alloc(&address_, std::max<size_t>(bytes, 16)) != CUDA_SUCCESS) address_ = 0;
    if (address_ != 0) driver_.memset_d8(address_, 0, std::max<size_t>(bytes, 16));
  }
  ~Memory() { driver_.mem_free(address_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  [[nodiscard]] void* get() const { return reinterpret_cast<void*>(address_); }

 private:
  const Driver& driver_;
  CUdeviceptr address_ = 0;
};

// The first call behind an idle device wakes it, and does not count.
Result<Times> time_of(const Driver& driver, int calls, const std::function<Status()>& call) {
  std::vector<double> us;
  for (int i = 0; i < calls; ++i) {
    if (i % kCallsInFlight == 0) {
      F8_TRY(driver.check(driver.ctx_synchronize(), "cuCtxSynchronize"));
      F8_TRY(call());
    }
    const auto begin = std::chrono::steady_clock::now();
    F8_TRY(call());
    const std::chrono::duration<double, std::micro> taken =
        std::chrono::steady_clock::now() - begin;
    us.push_back(taken.count());
  }
  std::ranges::sort(us);
  return Times{.median = us[us.size() / 2], .fast = us[us.size() / 10]};
}

Result<Times> time_of_a_launch(Context& context, int calls) {
  const Kernel* const kernel = F8_TRY(context.kernel(codegen::ScaleUpdateSpec{}));
  const Driver& driver = context.state().driver;
  return time_of(driver, calls, [&] {
    kernels::ScaleUpdateArgs nothing{};
    void* parameters[] = {&nothing};
    return launch(driver, *kernel, 1, parameters, true, nullptr);
  });
}

Status print_linear(const std::shared_ptr<Context>& context, const Recipe& recipe, Shape shape,
                    int calls) {
  LinearDesc desc;
  desc.shape = shape;
  desc.recipe = recipe;
  const auto linear = F8_TRY(Linear::plan(context, desc));
  const Driver& driver = context->state().driver;
  const auto [m, n, k] = shape;
  const auto bytes = [](int64_t rows, int64_t cols) {
    return static_cast<size_t>(rows * cols) * 2;
  };
  const Memory x(driver, bytes(m, k)), w(driver, bytes(n, k)), dy(driver, bytes(m, n));
  const Memory y(driver, bytes(m, n)), dx(driver, bytes(m, k)), dw(driver, bytes(n, k));
  const Memory workspace(driver, linear->workspace_bytes()), saved(driver, linear->saved_bytes());
  ScaleSlots slots;
  const auto scales = F8_TRY(DelayedScales::plan(context, linear->scale_slots()));
  const Memory state(driver, scales.bytes());
  F8_TRY(scales.init(state.get(), nullptr));
  if (scales.count() > 0) slots = scales.slots(state.get(), 0);
  const ForwardCall forward{.m = m,
                            .x = {x.get()},
                            .w = {w.get()},
                            .y = {y.get()},
                            .saved = {saved.get()},
                            .workspace = {workspace.get()},
                            .scales = slots};
  const BackwardCall backward{.m = m,
                              .dy = {dy.get()},
                              .x = {x.get()},
                              .w = {w.get()},
                              .dx = {dx.get()},
                              .dw = {dw.get()},
                              .saved = {saved.get()},
                              .workspace = {workspace.get()},
                              .scales = slots};
  const Times of_forward =
      F8_TRY(time_of(driver, calls, [&] { return linear->forward(forward, nullptr); }));
  const Times of_backward =
      F8_TRY(time_of(driver, calls, [&] { return linear->backward(backward, nullptr); }));
  F8_TRY(driver.check(driver.ctx_synchronize(), "cuCtxSynchronize"));
  print("{:<20} {:<20} {:>8} {:>8.2f} {:>8.2f} {:>9} {:>8.2f} {:>8.2f}\n", recipe.name,
        to_string(shape), linear->forward_steps(forward).size(), of_forward.median, of_forward.fast,
        linear->backward_steps(backward).size(), of_backward.median, of_backward.fast);
  return {};
}

Status run(int calls) {
  // The cost model chooses the kernels, so that figures do not move with the tuning tables.
  const auto context = F8_TRY(Context::create(0, {.builtin_table = false}));
  F8_TRY(context->make_current());
  const Times bare = F8_TRY(time_of_a_launch(*context, calls));
  print(
      "{}, {} calls; a launch of a kernel that does nothing: {:.2f} us (fastest tenth {:.2f})\n\n",
      context->device().name, calls, bare.median, bare.fast);
  print("{:<20} {:<20} {:>8} {:>8} {:>8} {:>9} {:>8} {:>8}\n", "recipe", "shape", "forward", "us",
        "fastest", "backward", "us", "fastest");
  for (const Recipe& recipe : builtin_recipes()) {
    // Tensors that one launch quantizes, and some that take two.
    for (const Shape shape : {Shape{1024, 1024, 1024}, Shape{4096, 4096, 2048}}) {
      F8_TRY(print_linear(context, recipe, shape, calls));
    }
  }
  return {};
}

}  // namespace
}  // namespace f8::runtime

int main(int argc, char** argv) {
  int calls = 2000;
  if (argc > 1) {
    const char* const end = argv[1] + std::strlen(argv[1]);
    const auto [stop, error] = std::from_chars(argv[1], end, calls);
    if (argc > 2 || error != std::errc() || stop != end || calls < 1) {
      std::fprintf(stderr, "host_time [CALLS]\n");
      return 1;
    }
  }
  const f8::Status status = f8::runtime::run(calls);
  if (status) return 0;
  std::fprintf(stderr, "host_time: %s\n", status.error().message.c_str());
  return 2;
}
