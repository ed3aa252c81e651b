// Where a model is trained: a GPU, by the CUDA driver and NVRTC, or the host, which computes the same kernels
// beside float8's emulated device. Work is in order, and copies wait for the work before.
#pragma once

#include <cuda.h>
#include <dlfcn.h>
#include <nvrtc.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <vector>

#include "error.hpp"
#include "kernels.cuh"

namespace train {

// CUDA's libraries are opened when they are needed, so that the program emulates without them. They stay
// open, since they do not survive being closed.
inline void* open_library(const std::string& name, const char* remedy) {
  void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(FLOAT8_ENVIRONMENT, format("%s; %s", dlerror(), remedy));
  return library;
}
template <class Function>
void find(void* library, const char* name, Function*& out) {
  out = reinterpret_cast<Function*>(dlsym(library, name));
  if (out == nullptr) fail(FLOAT8_ENVIRONMENT, format("there is no %s; install CUDA 13", name));
}

// cuda.h renames some functions by macros (cuMemAlloc is cuMemAlloc_v2), and with them these fields.
#define TRAIN_DRIVER(X)                                                                           \
  X(cuInit)                                                                                       \
  X(cuGetErrorString)                                                                             \
  X(cuDeviceGet)                                                                                  \
  X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuDevicePrimaryCtxRelease) X(cuModuleLoadData) \
      X(cuModuleUnload) X(cuModuleGetFunction) X(cuLaunchKernel) X(cuMemAlloc) X(cuMemFree)       \
          X(cuMemsetD8Async) X(cuMemcpyAsync) X(cuStreamCreate) X(cuStreamDestroy)                \
              X(cuStreamSynchronize)
#define TRAIN_NVRTC(X)                                                                  \
  X(nvrtcVersion)                                                                       \
  X(nvrtcCreateProgram)                                                                 \
  X(nvrtcCompileProgram)                                                                \
  X(nvrtcGetProgramLogSize) X(nvrtcGetProgramLog) X(nvrtcGetCUBINSize) X(nvrtcGetCUBIN) \
      X(nvrtcDestroyProgram)
#define TRAIN_FIELD(function) decltype(&::function) function = nullptr;
#define TRAIN_NAME(function) #function
#define TRAIN_FIND(function) find(library, TRAIN_NAME(function), function);

// The kernels for Hopper, which NVRTC compiles once in a program.
[[nodiscard]] inline const std::string& compiled_kernels() {
  static const std::string cubin = [] {
    TRAIN_NVRTC(TRAIN_FIELD)
    void* const library = open_library(format("libnvrtc.so.%d", CUDA_VERSION / 1000),
                                       "install NVRTC, or add its folder to LD_LIBRARY_PATH");
    TRAIN_NVRTC(TRAIN_FIND)
    // NVRTC opens its builtins by name, and finds them where they are open already.
    int major = 0, minor = 0;
    nvrtcVersion(&major, &minor);
    dlopen(format("libnvrtc-builtins.so.%d.%d", major, minor).c_str(), RTLD_NOW);

    constexpr const char* kText =
#include "kernels_text.inc"
        ;
    nvrtcProgram program = nullptr;
    nvrtcCreateProgram(&program, kText, "kernels.cuh", 0, nullptr, nullptr);
    const char* const options[] = {"--gpu-architecture=sm_90a", "--std=c++17", "--use_fast_math"};
    const bool compiles = nvrtcCompileProgram(program, 3, options) == NVRTC_SUCCESS;
    size_t bytes = 0;
    (compiles ? nvrtcGetCUBINSize : nvrtcGetProgramLogSize)(program, &bytes);
    std::string out(bytes, '\0');
    (compiles ? nvrtcGetCUBIN : nvrtcGetProgramLog)(program, out.data());
    nvrtcDestroyProgram(&program);
    if (!compiles) fail(FLOAT8_COMPILE, "the kernels do not compile: " + out);
    return out;
  }();
  return cubin;
}

// A GPU's driver, with what this program has there.
struct Gpu {
  TRAIN_DRIVER(TRAIN_FIELD)
  CUdevice device = 0;
  CUcontext primary = nullptr;
  CUmodule module = nullptr;
  CUstream stream = nullptr;
  std::map<std::string, CUfunction> functions;
  std::vector<CUdeviceptr> memory;

#define TRAIN_CALL(function, ...) check_result(function(__VA_ARGS__), #function)
  void check_result(CUresult result, const char* call) const {
    if (result == CUDA_SUCCESS) return;
    const char* words = "unknown error";
    cuGetErrorString(result, &words);
    fail(result == CUDA_ERROR_OUT_OF_MEMORY ? FLOAT8_OUT_OF_MEMORY : FLOAT8_CUDA,
         format("%s: %s (code %d)", call, words, static_cast<int>(result)));
  }

  explicit Gpu(int index) {
    void* const library = open_library("libcuda.so.1", "install a driver, or use --emulate");
    TRAIN_DRIVER(TRAIN_FIND)
    TRAIN_CALL(cuInit, 0);
    TRAIN_CALL(cuDeviceGet, &device, index);
    TRAIN_CALL(cuDevicePrimaryCtxRetain, &primary, device);
    TRAIN_CALL(cuCtxSetCurrent, primary);
    TRAIN_CALL(cuModuleLoadData, &module, compiled_kernels().data());
    TRAIN_CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
  }
  // After a lost CUDA context every call fails, and nothing is left to free.
  ~Gpu() {
    cuCtxSetCurrent(primary);
    cuStreamSynchronize(stream);
    for (const CUdeviceptr one : memory) cuMemFree(one);
    cuStreamDestroy(stream);
    cuModuleUnload(module);
    cuDevicePrimaryCtxRelease(device);
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  void attach() const {
    TRAIN_CALL(cuCtxSetCurrent, primary);
  }
  void synchronize() const {
    TRAIN_CALL(cuStreamSynchronize, stream);
  }
  void* allocate(size_t bytes) {
    CUdeviceptr out = 0;
    TRAIN_CALL(cuMemAlloc, &out, bytes);
    memory.push_back(out);
    TRAIN_CALL(cuMemsetD8Async, out, 0, bytes, stream);
    return reinterpret_cast<void*>(out);
  }
  void copy(void* to, const void* from, size_t bytes) const {
    const auto address = [](const void* p) { return reinterpret_cast<CUdeviceptr>(p); };
    TRAIN_CALL(cuMemcpyAsync, address(to), address(from), bytes, stream);
    synchronize();
  }
  void launch(const char* kernel, i64 items, const void** parameters) {
    CUfunction& function = functions[kernel];
    if (function == nullptr) TRAIN_CALL(cuModuleGetFunction, &function, module, kernel);
    TRAIN_CALL(cuLaunchKernel, function, static_cast<unsigned>(items), 1, 1, 256, 1, 1, 0, stream,
               const_cast<void**>(parameters), nullptr);
  }
};

// A rank's device. One rank alone has no communicator; it gathers and reduces nothing.
class Device {
 public:
  // `index` is CUDA's, or that of an emulated device.
  Device(int index, bool emulate)
      : context_(float8::Context::create(index, {.emulate = emulate}).value()),
        gpu_(emulate ? nullptr : std::make_unique<Gpu>(index)) {}

  [[nodiscard]] float8::Context& context() { return context_; }
  [[nodiscard]] float8_stream stream() const { return gpu_ ? gpu_->stream : nullptr; }
  // Makes the calling thread the one that uses the device.
  void attach() const {
    if (gpu_) gpu_->attach();
  }

  // The memory is zeroed, aligned to 256 bytes, and freed with the device.
  [[nodiscard]] void* allocate(size_t bytes) {
    bytes = std::max<size_t>(bytes, 1);
    if (gpu_) return gpu_->allocate(bytes);
    void* const memory = ::operator new(bytes, kAlignment);
    host_memory_.emplace_back(memory);
    return std::memset(memory, 0, bytes);
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
    const void* all[] = {&items, &parameters...};
    if (gpu_ && items > 0) gpu_->launch(name, items, all);
    for (i64 item = 0; !gpu_ && item < items; ++item) kernel(item, parameters...);
  }
#define LAUNCH(device, kernel, ...) (device).launch(#kernel, kernel, __VA_ARGS__)

  void join(const float8::Communicator* communicator, int rank, int ranks) {
    communicator_ = communicator;
    rank_ = rank;
    ranks_ = ranks;
  }
  [[nodiscard]] int rank() const {
    return rank_;
  }
  [[nodiscard]] int ranks() const {
    return ranks_;
  }
  [[nodiscard]] const float8::Communicator* communicator() const {
    return communicator_;
  }
  [[nodiscard]] float8_nccl_comm handle() const {
    return communicator_ == nullptr ? nullptr : communicator_->get();
  }
  // Gathers `count` elements of each rank in `whole`; returns where all of them are.
  template <class T>
  [[nodiscard]] const T* gather(const T* shard, T* whole, i64 count) {
    if (communicator_ == nullptr) return shard;
    const auto dtype = sizeof(T) == 2 ? FLOAT8_BF16 : FLOAT8_F32;
    check(communicator_->all_gather(shard, whole, static_cast<size_t>(count), dtype, stream()));
    return whole;
  }
  // Sums over ranks; of a scatter each rank gets `count` elements.
  void all_reduce(const float* from, float* to, i64 count) {
    if (communicator_ == nullptr) return;
    check(communicator_->all_reduce(from, to, static_cast<size_t>(count), FLOAT8_F32, stream()));
  }
  void reduce_scatter(const float* from, float* to, i64 count) {
    if (communicator_ == nullptr) return;
    check(
        communicator_->reduce_scatter(from, to, static_cast<size_t>(count), FLOAT8_F32, stream()));
  }
  // Waits for the work. An error of a rank, or a rank that does not come, ends the wait.
  void wait(const std::string& what, i64 timeout_ms = 0) const {
    if (!gpu_) return;  // a call is done when it returns
    const auto most = static_cast<int>(std::min<i64>(timeout_ms, 1 << 30));
    if (communicator_ != nullptr) check(communicator_->wait(context_, what, stream(), most));
    gpu_->synchronize();
  }

 private:
  static constexpr std::align_val_t kAlignment{256};
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
  };
  void copy(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    if (gpu_) return gpu_->copy(to, from, bytes);
    std::memcpy(to, from, bytes);
  }

  float8::Context context_;   // comes first, for it says clearly that there is no GPU
  std::unique_ptr<Gpu> gpu_;  // null: emulated
  std::vector<std::unique_ptr<void, Free>> host_memory_;
  const float8::Communicator* communicator_ = nullptr;
  int rank_ = 0, ranks_ = 1;
};

// The items of a kernel that takes chunks.
[[nodiscard]] constexpr i64 chunks(i64 count) {
  return (count + kChunk - 1) / kChunk;
}

}  // namespace train
