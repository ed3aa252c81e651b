// A rank trains on a Device: a GPU, by the CUDA driver and NVRTC, or the host, which computes the same kernels beside
// float8's emulated device. Work is in order, and copies wait for the work before.
#pragma once

#include <cuda.h>
#include <dlfcn.h>
#include <nvrtc.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <float8/float8.hpp>
#include <memory>
#include <new>
#include <vector>

#include "kernels.cuh"

namespace train {

// Gives what printf would print.
template <class... Arguments>
[[nodiscard]] std::string format(const char* format, Arguments... arguments) {
  std::string text(static_cast<size_t>(std::snprintf(nullptr, 0, format, arguments...)), '\0');
  std::snprintf(text.data(), text.size() + 1, format, arguments...);
  return text;
}

// A failure is a float8::Exception, as with value() of the public header: a status, and one line that says
// what happened and what to do about it.
[[noreturn]] inline void fail(float8_status code, std::string message) {
  throw float8::Exception({code, std::move(message)});
}

// Throws where a call of float8 has failed.
inline void check(const float8::Status& status) {
  if (!status) fail(status.code(), status.message());
}

// A function of a library that is opened when it is needed, so that the program emulates without CUDA's.
template <class Function>
Function* function_of(const std::string& library, const char* name) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const found = handle == nullptr ? nullptr : dlsym(handle, name);
  if (found == nullptr) {
    fail(FLOAT8_ENVIRONMENT, format("%s; install a driver and CUDA, or use --emulate", dlerror()));
  }
  return reinterpret_cast<Function*>(found);
}
// cuda.h renames some functions by macros, such as cuMemAlloc to cuMemAlloc_v2.
#define TRAIN_NAME(function) #function
#define TRAIN_FUNCTION(library, function)                                                        \
  [&] {                                                                                          \
    static auto* const found = function_of<decltype(::function)>(library, TRAIN_NAME(function)); \
    return found;                                                                                \
  }()
#define TRAIN_DRIVER(function) TRAIN_FUNCTION("libcuda.so.1", function)
#define CUDA(function, ...) check_result(TRAIN_DRIVER(function)(__VA_ARGS__), #function)

inline void check_result(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* words = "unknown error";
  TRAIN_DRIVER(cuGetErrorString)(result, &words);
  fail(result == CUDA_ERROR_OUT_OF_MEMORY ? FLOAT8_OUT_OF_MEMORY : FLOAT8_CUDA,
       format("%s: %s (code %d)", call, words, static_cast<int>(result)));
}

// The kernels for Hopper, as NVRTC compiles them.
[[nodiscard]] inline std::string compile_kernels() {
  const std::string library = format("libnvrtc.so.%d", CUDA_VERSION / 1000);
  // NVRTC opens its builtins by name, and finds them where they are open already.
  int major = 0, minor = 0;
  TRAIN_FUNCTION(library, nvrtcVersion)(&major, &minor);
  dlopen(format("libnvrtc-builtins.so.%d.%d", major, minor).c_str(), RTLD_NOW);

  constexpr const char* kText =
#include "kernels_text.inc"
      ;
  nvrtcProgram program = nullptr;
  TRAIN_FUNCTION(library, nvrtcCreateProgram)(&program, kText, "kernels.cuh", 0, nullptr, nullptr);
  const char* const options[] = {"--gpu-architecture=sm_90a", "--std=c++17", "--use_fast_math"};
  const bool compiles =
      TRAIN_FUNCTION(library, nvrtcCompileProgram)(program, 3, options) == NVRTC_SUCCESS;
  size_t bytes = 0;
  (compiles ? TRAIN_FUNCTION(library, nvrtcGetCUBINSize)
            : TRAIN_FUNCTION(library, nvrtcGetProgramLogSize))(program, &bytes);
  std::string out(bytes, '\0');
  (compiles ? TRAIN_FUNCTION(library, nvrtcGetCUBIN) : TRAIN_FUNCTION(library, nvrtcGetProgramLog))(
      program, out.data());
  TRAIN_FUNCTION(library, nvrtcDestroyProgram)(&program);
  if (!compiles) fail(FLOAT8_COMPILE, "the kernels do not compile: " + out);
  return out;
}

class Device {
 public:
  // One rank alone has no communicator; it gathers and reduces nothing.
  const float8::Communicator* communicator = nullptr;
  int rank = 0, ranks = 1;

  // `index` is CUDA's, or that of an emulated device.
  Device(int index, bool emulate)
      : context_(float8::Context::create(index, {.emulate = emulate}).value()), emulate_(emulate) {
    if (emulate) return;
    static const std::string kernels = compile_kernels();
    CUDA(cuInit, 0);
    CUDA(cuDeviceGet, &device_, index);
    CUDA(cuDevicePrimaryCtxRetain, &primary_, device_);
    attach();
    CUDA(cuModuleLoadData, &module_, kernels.data());
    CUDA(cuStreamCreate, &stream_, CU_STREAM_NON_BLOCKING);
  }
  // After a lost CUDA context every call fails, and nothing is left to free.
  ~Device() {
    if (emulate_) {
      for (void* const memory : memory_) ::operator delete(memory, kAlignment);
      return;
    }
    TRAIN_DRIVER(cuCtxSetCurrent)(primary_);
    for (void* const memory : memory_) TRAIN_DRIVER(cuMemFree)(address(memory));
    TRAIN_DRIVER(cuStreamDestroy)(stream_);
    TRAIN_DRIVER(cuModuleUnload)(module_);
    TRAIN_DRIVER(cuDevicePrimaryCtxRelease)(device_);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] float8::Context& context() { return context_; }
  [[nodiscard]] float8_stream stream() const { return stream_; }
  // Makes the calling thread the one that uses the device.
  void attach() const {
    if (!emulate_) CUDA(cuCtxSetCurrent, primary_);
  }

  // The memory is zeroed, aligned to 256 bytes, and freed with the device.
  [[nodiscard]] void* allocate(size_t bytes) {
    bytes = std::max<size_t>(bytes, 1);
    CUdeviceptr memory = 0;
    if (!emulate_) CUDA(cuMemAlloc, &memory, bytes);
    memory_.push_back(emulate_ ? ::operator new(bytes, kAlignment)
                               : reinterpret_cast<void*>(memory));
    if (!emulate_) CUDA(cuMemsetD8Async, memory, 0, bytes, stream_);
    return emulate_ ? std::memset(memory_.back(), 0, bytes) : memory_.back();
  }
  template <class T>
  [[nodiscard]] T* take(i64 count) {
    return static_cast<T*>(allocate(static_cast<size_t>(count) * sizeof(T)));
  }
  template <class T>
  void upload(T* to, const std::vector<T>& values) {
    copy(to, values.data(), values.size() * sizeof(T));
  }
  template <class T>
  [[nodiscard]] std::vector<T> download(const T* from, i64 count) {
    std::vector<T> values(static_cast<size_t>(count));
    wait("a copy to the host");
    copy(values.data(), from, values.size() * sizeof(T));
    return values;
  }

  // LAUNCH(device, kernel, items, parameters...) computes all items.
  template <class... Parameters>
  void launch(const char* name, void (*kernel)(i64, Parameters...), i64 items,
              std::type_identity_t<Parameters>... parameters) {
    for (i64 item = 0; emulate_ && item < items; ++item) kernel(item, parameters...);
    if (emulate_ || items == 0) return;
    const void* all[] = {&items, &parameters...};
    CUfunction function = nullptr;
    CUDA(cuModuleGetFunction, &function, module_, name);
    CUDA(cuLaunchKernel, function, static_cast<unsigned>(items), 1, 1, 256, 1, 1, 0, stream_,
         const_cast<void**>(all), nullptr);
  }
#define LAUNCH(device, kernel, ...) (device).launch(#kernel, kernel, __VA_ARGS__)

  [[nodiscard]] float8_nccl_comm handle() const {
    return communicator == nullptr ? nullptr : communicator->get();
  }
  // Gathers `count` elements of each rank in `whole`; returns where all of them are.
  template <class T>
  [[nodiscard]] const T* gather(const T* shard, T* whole, i64 count) {
    if (communicator == nullptr) return shard;
    const auto dtype = sizeof(T) == 2 ? FLOAT8_BF16 : FLOAT8_F32;
    check(communicator->all_gather(shard, whole, static_cast<size_t>(count), dtype, stream_));
    return whole;
  }
  // Sums over ranks; of a scatter each rank gets `count` elements.
  void all_reduce(const float* from, float* to, i64 count) {
    if (communicator == nullptr) return;
    check(communicator->all_reduce(from, to, static_cast<size_t>(count), FLOAT8_F32, stream_));
  }
  void reduce_scatter(const float* from, float* to, i64 count) {
    if (communicator == nullptr) return;
    check(communicator->reduce_scatter(from, to, static_cast<size_t>(count), FLOAT8_F32, stream_));
  }
  // Waits for the work. An error of a rank, or a rank that does not come, ends the wait.
  void wait(const std::string& what, i64 timeout_ms = 0) const {
    if (emulate_) return;  // a call is done when it returns
    const auto most = static_cast<int>(std::min<i64>(timeout_ms, 1 << 30));
    if (communicator != nullptr) check(communicator->wait(context_, what, stream_, most));
    CUDA(cuStreamSynchronize, stream_);
  }

 private:
  static constexpr std::align_val_t kAlignment{256};
  static CUdeviceptr address(const void* memory) {
    return reinterpret_cast<CUdeviceptr>(memory);
  }
  void copy(void* to, const void* from, size_t bytes) {
    if (emulate_ && bytes > 0) std::memcpy(to, from, bytes);
    if (emulate_ || bytes == 0) return;
    CUDA(cuMemcpyAsync, address(to), address(from), bytes, stream_);
    CUDA(cuStreamSynchronize, stream_);
  }

  float8::Context context_;  // comes first, for it says clearly that there is no GPU
  bool emulate_;
  CUdevice device_ = 0;
  CUcontext primary_ = nullptr;
  CUmodule module_ = nullptr;
  CUstream stream_ = nullptr;
  std::vector<void*> memory_;
};

// The items of a kernel that takes chunks.
[[nodiscard]] constexpr i64 chunks(i64 count) {
  return (count + kChunk - 1) / kChunk;
}

}  // namespace train
