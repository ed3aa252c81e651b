// Where a model is trained: memory, the small kernels, and a step that is repeated. One on a Hopper
// GPU (kernels compiled by NVRTC, the step a CUDA graph), one on the host (plain C++, float8's
// emulated device), so that all of the trainer but its speed can be tested without a GPU.
//
// Work is in order. Addresses that a backend gives are for its own kernels and linears; the caller
// reads and writes them by upload and download, which wait for the work before.
#pragma once

#include <float8/float8.hpp>
#include <functional>
#include <memory>
#include <variant>

#include "base/error.hpp"
#include "examples/train/kernels/args.cuh"

namespace f8::train {

using KernelCall =
    std::variant<SampleArgs, EmbedArgs, EmbedGradArgs, NormArgs, NormGradArgs, SumRowsArgs,
                 GeluArgs, GeluGradArgs, LossArgs, SquareSumArgs, AdamArgs, FinishArgs>;

class Backend {
 public:
  Backend() = default;
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  // Zeroed, aligned to 256 bytes, freed with the backend.
  [[nodiscard]] virtual Result<void*> allocate(size_t bytes) = 0;
  [[nodiscard]] virtual Status upload(void* to, const void* from, size_t bytes) = 0;
  [[nodiscard]] virtual Status download(void* to, const void* from, size_t bytes) = 0;

  [[nodiscard]] virtual Status launch(const KernelCall& call) = 0;
  // How many shares a kernel that leaves partial sums is best cut into.
  [[nodiscard]] virtual int share_count() const = 0;

  // What float8's linears run on.
  [[nodiscard]] virtual float8::Context& context() = 0;
  [[nodiscard]] virtual float8_stream stream() = 0;

  // Keeps `step` for repeat(); runs nothing. Where steps are recorded they are recorded here, with
  // all addresses and launches that `step` makes.
  [[nodiscard]] virtual Status record(std::function<Status()> step) = 0;
  // Runs the recorded step `times` times and waits; gives the milliseconds that it took.
  [[nodiscard]] virtual Result<double> repeat(int64_t times) = 0;
};

// float8's status and result as the trainer's own.
[[nodiscard]] Status to_status(const float8::Status& status);
[[nodiscard]] Error to_error(float8_status code, const std::string& message);
template <class T>
[[nodiscard]] Result<T> to_result(float8::Result<T> result) {
  if (!result) return std::unexpected(to_error(result.error().code, result.error().message));
  return std::move(result).value();
}

// For a model of this width and context. The host's emulates what the linears do on a GPU.
[[nodiscard]] Result<std::unique_ptr<Backend>> make_gpu_backend(int device, int64_t width,
                                                                int64_t context);
[[nodiscard]] Result<std::unique_ptr<Backend>> make_host_backend();

}  // namespace f8::train
