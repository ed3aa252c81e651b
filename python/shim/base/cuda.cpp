// CUDA by way of what is loaded in the process.
#include "python/shim/base/cuda.hpp"

#include <dirent.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

namespace float8_torch {

namespace {

// A function of PyTorch's that a build without CUDA lacks.
template <class Function>
Function* torch_cuda(const char* name) {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* symbol = library == nullptr ? nullptr : dlsym(library, name);
  if (symbol == nullptr) {
    throw std::runtime_error(std::string("float8: this PyTorch has no ") + name);
  }
  return reinterpret_cast<Function*>(symbol);
}

// Null where there is no driver.
template <class Function>
Function* driver_function(const char* name) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  return driver == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(driver, name));
}

constexpr int kCaptureActive = 1;       // CU_STREAM_CAPTURE_STATUS_ACTIVE
constexpr int kCaptureModeRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

}  // namespace

float8_stream current_stream(int32_t device) {
  static auto* const get =
      torch_cuda<AOTITorchError(int32_t, void**)>("aoti_torch_get_current_cuda_stream");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get(device, &stream));
  return static_cast<float8_stream>(stream);
}

void set_current_stream(int32_t device, float8_stream stream) {
  static auto* const set =
      torch_cuda<AOTITorchError(void*, int32_t)>("torch_set_current_cuda_stream");
  TORCH_ERROR_CODE_CHECK(set(stream, device));
}

bool is_capturing(float8_stream stream) {
  static auto* const get = driver_function<int(float8_stream, int*)>("cuStreamIsCapturing");
  int status = 0;
  return get != nullptr && get(stream, &status) == 0 && status == kCaptureActive;
}

uint64_t capture_id(float8_stream stream) {
  using Info = int(float8_stream, int*, uint64_t*, void*, void*, void*);
  static auto* const get = driver_function<Info>("cuStreamGetCaptureInfo_v2");
  int status = 0;
  uint64_t id = 0;
  const bool known = get != nullptr && get(stream, &status, &id, nullptr, nullptr, nullptr) == 0;
  return known && status == kCaptureActive ? id : 0;
}

void allow_allocation_in_captures() {
  static auto* const exchange = driver_function<int(int*)>("cuThreadExchangeStreamCaptureMode");
  int mode = kCaptureModeRelaxed;
  if (exchange != nullptr) exchange(&mode);
}

void load_cuda_libraries() {
  Dl_info torch;
  if (dladdr(reinterpret_cast<void*>(&aoti_torch_get_dtype), &torch) == 0) return;
  // <site-packages>/torch/lib/libtorch_cpu.so
  const auto site =
      std::filesystem::path(torch.dli_fname).parent_path().parent_path().parent_path();
  const std::filesystem::path folder = site / "nvidia" / "cu13" / "lib";
  // The standard library's iterator ends the process where memory is short.
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(opendir(folder.c_str()), &closedir);
  while (const dirent* entry = stream == nullptr ? nullptr : readdir(stream.get())) {
    const std::string_view name = entry->d_name;
    if (name == "libnvrtc.so.13" || name == "libcublasLt.so.13" ||
        name.starts_with("libnvrtc-builtins.so.13.")) {
      (void)dlopen((folder / name).c_str(), RTLD_LAZY | RTLD_LOCAL);
    }
  }
}

}  // namespace float8_torch
