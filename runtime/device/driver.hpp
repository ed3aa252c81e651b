// The CUDA driver as a table of functions, filled from libcuda at first need. Nothing links
// libcuda: a program that never launches runs on a machine without it, and a test puts a table of
// its own in the driver's place.
#pragma once

#include <cuda.h>

#include "base/error.hpp"

namespace f8::runtime {

// X(field, function): the field has the type that cuda.h declares and is found by the symbol that
// cuda.h declares, version suffix and all.
#define F8_DRIVER_FUNCTIONS(X)                                   \
  X(init, cuInit)                                                \
  X(driver_get_version, cuDriverGetVersion)                      \
  X(get_error_name, cuGetErrorName)                              \
  X(get_error_string, cuGetErrorString)                          \
  X(device_get_count, cuDeviceGetCount)                          \
  X(device_get, cuDeviceGet)                                     \
  X(device_get_name, cuDeviceGetName)                            \
  X(device_get_uuid, cuDeviceGetUuid)                            \
  X(device_get_attribute, cuDeviceGetAttribute)                  \
  X(device_get_pci_bus_id, cuDeviceGetPCIBusId)                  \
  X(device_total_mem, cuDeviceTotalMem)                          \
  X(device_primary_ctx_retain, cuDevicePrimaryCtxRetain)         \
  X(device_primary_ctx_release, cuDevicePrimaryCtxRelease)       \
  X(ctx_get_current, cuCtxGetCurrent)                            \
  X(ctx_set_current, cuCtxSetCurrent)                            \
  X(ctx_synchronize, cuCtxSynchronize)                           \
  X(module_load_data, cuModuleLoadData)                          \
  X(module_unload, cuModuleUnload)                               \
  X(module_get_function, cuModuleGetFunction)                    \
  X(func_get_attribute, cuFuncGetAttribute)                      \
  X(func_set_attribute, cuFuncSetAttribute)                      \
  X(occupancy_max_active_clusters, cuOccupancyMaxActiveClusters) \
  X(launch_kernel_ex, cuLaunchKernelEx)                          \
  X(tensor_map_encode_tiled, cuTensorMapEncodeTiled)             \
  X(mem_get_info, cuMemGetInfo)                                  \
  X(pointer_get_attributes, cuPointerGetAttributes)              \
  X(mem_alloc, cuMemAlloc)                                       \
  X(mem_free, cuMemFree)                                         \
  X(memcpy_htod, cuMemcpyHtoD)                                   \
  X(memcpy_dtoh, cuMemcpyDtoH)                                   \
  X(memcpy_htod_async, cuMemcpyHtoDAsync)                        \
  X(memcpy_dtoh_async, cuMemcpyDtoHAsync)                        \
  X(memcpy_dtod_async, cuMemcpyDtoDAsync)                        \
  X(memcpy_2d_async, cuMemcpy2DAsync)                            \
  X(memset_d8, cuMemsetD8)                                       \
  X(memset_d8_async, cuMemsetD8Async)                            \
  X(memset_d32_async, cuMemsetD32Async)                          \
  X(memset_d2d8_async, cuMemsetD2D8Async)                        \
  X(stream_create, cuStreamCreate)                               \
  X(stream_destroy, cuStreamDestroy)                             \
  X(stream_synchronize, cuStreamSynchronize)                     \
  X(stream_query, cuStreamQuery)                                 \
  X(stream_get_ctx, cuStreamGetCtx)                              \
  X(stream_wait_event, cuStreamWaitEvent)                        \
  X(stream_begin_capture, cuStreamBeginCapture)                  \
  X(stream_end_capture, cuStreamEndCapture)                      \
  X(event_create, cuEventCreate)                                 \
  X(event_destroy, cuEventDestroy)                               \
  X(event_record, cuEventRecord)                                 \
  X(event_query, cuEventQuery)                                   \
  X(event_synchronize, cuEventSynchronize)                       \
  X(event_elapsed_time, cuEventElapsedTime)                      \
  X(graph_instantiate, cuGraphInstantiateWithFlags)              \
  X(graph_launch, cuGraphLaunch)                                 \
  X(graph_exec_destroy, cuGraphExecDestroy)                      \
  X(graph_destroy, cuGraphDestroy)

struct Driver {
#define F8_DRIVER_FIELD(field, function) decltype(&::function) field = nullptr;
  F8_DRIVER_FUNCTIONS(F8_DRIVER_FIELD)
#undef F8_DRIVER_FIELD

  // kCuda (kOutOfMemory where that is the reason) with the driver's name for it. An error after
  // which no call of this process can succeed says so.
  [[nodiscard]] Status check(CUresult result, const char* call) const {
    if (result == CUDA_SUCCESS) [[likely]] {
      return {};
    }
    return failure(result, call);
  }
  [[nodiscard]] Status failure(CUresult result, const char* call) const;
};

// True where the CUDA context is lost for good: the process must restart.
[[nodiscard]] bool is_sticky(CUresult result);

// The table, after cuInit. kEnvironment where there is no driver.
[[nodiscard]] Result<const Driver*> driver();

// Opens `soname` and fills a table; driver() does so with libcuda.so.1.
[[nodiscard]] Result<Driver> load_driver(const char* soname);

// Puts `table` in the driver's place; null puts the real one back. Contexts keep the table that
// they were made with. For tests alone.
void set_driver_for_testing(const Driver* table);

// Makes `wanted` the thread's current context and the previous one again at the end of the scope.
class ScopedContext {
 public:
  ScopedContext(const Driver& driver, CUcontext wanted) : driver_(driver) {
    if (driver_.ctx_get_current(&previous_) != CUDA_SUCCESS) previous_ = nullptr;
    if (previous_ != wanted) {
      result_ = driver_.ctx_set_current(wanted);
      switched_ = result_ == CUDA_SUCCESS;
    }
  }
  ~ScopedContext() {
    if (switched_) driver_.ctx_set_current(previous_);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

  [[nodiscard]] Status status() const { return driver_.check(result_, "cuCtxSetCurrent"); }

 private:
  const Driver& driver_;
  CUcontext previous_ = nullptr;
  CUresult result_ = CUDA_SUCCESS;
  bool switched_ = false;
};

}  // namespace f8::runtime
