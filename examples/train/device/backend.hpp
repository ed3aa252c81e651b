// A backend is where a model is trained: it has memory, the small kernels, and a step to repeat.
// One backend is a Hopper GPU (NVRTC compiles the kernels, the step is a CUDA graph); the other is
// the host (plain C++, float8's emulated device), so that all of the trainer but its speed can be
// tested without a GPU.
//
// Work is in order. Addresses that a backend gives are for its own kernels and linears; the caller
// reads and writes them by upload and download, which wait for the work before.
#pragma once

#include <float8/float8.hpp>
#include <functional>
#include <memory>
#include <variant>

#include "device/kernels/args.cuh"

namespace train {

using KernelCall =
    std::variant<SampleArgs, EmbedArgs, EmbedGradArgs, NormArgs, NormGradArgs, SumRowsArgs,
                 GeluArgs, GeluGradArgs, LossArgs, SquareSumArgs, AdamArgs, FinishArgs, AddArgs>;

class Backend {
 public:
  Backend() = default;
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  // The memory is zeroed, aligned to 256 bytes, and freed with the backend.
  [[nodiscard]] virtual void* allocate(size_t bytes) = 0;
  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  virtual void download(void* to, const void* from, size_t bytes) = 0;

  virtual void launch(const KernelCall& call) = 0;
  // A kernel that leaves partial sums is best cut into this many shares.
  [[nodiscard]] virtual int share_count() const = 0;

  // float8's linears run on these.
  [[nodiscard]] virtual float8::Context& context() = 0;
  [[nodiscard]] virtual float8_stream stream() = 0;

  // Makes the calling thread the one that uses the backend.
  virtual void attach() = 0;
  // Waits are then for the ranks of `communicator` too, and end in an error where one is gone, or does
  // not come for `timeout_ms` (0: 60 s).
  virtual void set_communicator(const float8::Communicator* communicator, int timeout_ms) = 0;

  // Keeps `step` for repeat(). The GPU records it here, with all addresses and launches that `step`
  // makes, and runs nothing.
  virtual void record(const std::function<void()>& step) = 0;
  // Runs the recorded step `times` times and waits; gives the milliseconds that it took.
  [[nodiscard]] virtual double repeat(int64_t times) = 0;
};

// A GPU's backend is made for a model of this width and context.
[[nodiscard]] std::unique_ptr<Backend> make_gpu_backend(int device, int64_t width, int64_t context);
// `device` is 0 to 7: an emulated one.
[[nodiscard]] std::unique_ptr<Backend> make_host_backend(int device = 0);

}  // namespace train
