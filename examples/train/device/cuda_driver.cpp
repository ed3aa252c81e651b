#include "device/cuda_driver.hpp"

#include "device/dynamic_library.hpp"

namespace train {

Driver::Driver() {
  const DynamicLibrary library("libcuda.so.1", "install an NVIDIA driver, or use --emulate");
#define TRAIN_NAME(function) #function
#define TRAIN_FIND(function) library.find(TRAIN_NAME(function), function);
  TRAIN_DRIVER_FUNCTIONS(TRAIN_FIND)
#undef TRAIN_FIND
#undef TRAIN_NAME
  check(cuInit(0), "cuInit");
}

void Driver::check(CUresult result, const char* call) const {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS) name = "unknown error";
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS) text = "no description";
  fail(result == CUDA_ERROR_OUT_OF_MEMORY ? FLOAT8_OUT_OF_MEMORY : FLOAT8_CUDA,
       "%s: %s (%s, code %d)", call, name, text, static_cast<int>(result));
}

}  // namespace train
