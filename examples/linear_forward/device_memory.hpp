// Device is just enough of the CUDA driver for an example: memory on a device, and copies. It opens
// libcuda at run time, so that the example builds without a toolkit. A trainer has its own allocator.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

class Device {
 public:
  explicit Device(int ordinal = 0) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) throw std::runtime_error(dlerror());
    const auto resolve = [library](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) throw std::runtime_error(std::string("libcuda has no ") + name);
    };
    int (*init)(unsigned) = nullptr;
    int (*retain)(void**, int) = nullptr;
    int (*set_current)(void*) = nullptr;
    resolve(init, "cuInit");
    resolve(retain, "cuDevicePrimaryCtxRetain");
    resolve(set_current, "cuCtxSetCurrent");
    resolve(alloc_, "cuMemAlloc_v2");
    resolve(free_, "cuMemFree_v2");
    resolve(to_device_, "cuMemcpyHtoD_v2");
    resolve(to_host_, "cuMemcpyDtoH_v2");
    void* context = nullptr;
    check(init(0), "cuInit");
    check(retain(&context, ordinal), "cuDevicePrimaryCtxRetain");
    check(set_current(context), "cuCtxSetCurrent");
  }
  ~Device() {
    for (const std::uint64_t pointer : allocated_) free_(pointer);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // The memory is freed with the Device.
  void* allocate(std::size_t bytes) {
    std::uint64_t pointer = 0;
    check(alloc_(&pointer, bytes == 0 ? 1 : bytes), "cuMemAlloc");
    allocated_.push_back(pointer);
    return reinterpret_cast<void*>(pointer);
  }
  template <class T>
  void* upload(const std::vector<T>& values) {
    void* pointer = allocate(values.size() * sizeof(T));
    check(to_device_(reinterpret_cast<std::uint64_t>(pointer), values.data(),
                     values.size() * sizeof(T)),
          "cuMemcpyHtoD");
    return pointer;
  }
  // Waits for the work on the default stream, then copies.
  template <class T>
  std::vector<T> download(const void* pointer, std::size_t count) {
    std::vector<T> values(count);
    check(to_host_(values.data(), reinterpret_cast<std::uint64_t>(pointer), count * sizeof(T)),
          "cuMemcpyDtoH");
    return values;
  }

 private:
  static void check(int result, const char* call) {
    if (result != 0) throw std::runtime_error(call + (" failed: " + std::to_string(result)));
  }

  int (*alloc_)(std::uint64_t*, std::size_t) = nullptr;
  int (*free_)(std::uint64_t) = nullptr;
  int (*to_device_)(std::uint64_t, const void*, std::size_t) = nullptr;
  int (*to_host_)(void*, std::uint64_t, std::size_t) = nullptr;
  std::vector<std::uint64_t> allocated_;
};
