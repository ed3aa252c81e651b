// The CUDA driver's functions that the trainer calls, found in libcuda at run time. cuda.h renames
// a function to the version whose type it declares (cuMemAlloc to cuMemAlloc_v2); its macros rename
// these fields alike, so that a call reads as in any CUDA program.
#pragma once

#include <cuda.h>

namespace train {

#define TRAIN_DRIVER_FUNCTIONS(X) \
  X(cuInit)                       \
  X(cuGetErrorName)               \
  X(cuGetErrorString)             \
  X(cuDeviceGet)                  \
  X(cuDeviceGetAttribute)         \
  X(cuDevicePrimaryCtxRetain)     \
  X(cuDevicePrimaryCtxRelease)    \
  X(cuCtxSetCurrent)              \
  X(cuModuleLoadData)             \
  X(cuModuleUnload)               \
  X(cuModuleGetFunction)          \
  X(cuLaunchKernel)               \
  X(cuMemAlloc)                   \
  X(cuMemFree)                    \
  X(cuMemsetD8Async)              \
  X(cuMemcpyHtoDAsync)            \
  X(cuMemcpyDtoHAsync)            \
  X(cuStreamCreate)               \
  X(cuStreamDestroy)              \
  X(cuStreamSynchronize)          \
  X(cuStreamBeginCapture)         \
  X(cuStreamEndCapture)           \
  X(cuEventCreate)                \
  X(cuEventDestroy)               \
  X(cuEventRecord)                \
  X(cuEventElapsedTime)           \
  X(cuGraphInstantiateWithFlags)  \
  X(cuGraphLaunch)                \
  X(cuGraphDestroy)               \
  X(cuGraphExecDestroy)

struct Driver {
#define TRAIN_FIELD(function) decltype(&::function) function = nullptr;
  TRAIN_DRIVER_FUNCTIONS(TRAIN_FIELD)
#undef TRAIN_FIELD

  Driver();
  // Throws unless `result` is a success; `call` names what gave it.
  void check(CUresult result, const char* call) const;
};

}  // namespace train
