#include "runtime/device/memory.hpp"

#include <iterator>

#include "recipes/problem.hpp"

namespace f8::runtime {

bool is_row_stride(int64_t ld, int64_t cols, Dtype type) {
  return ld == 0 ||
         (ld >= cols && ld <= kMaxDim && ld * static_cast<int64_t>(size_bytes(type)) % 16 == 0);
}

Status set_words(const Driver& driver, uint32_t* words, uint32_t value, size_t count,
                 Stream stream) {
  return driver.check(
      driver.memset_d32_async(reinterpret_cast<CUdeviceptr>(words), value, count, stream),
      "cuMemsetD32Async");
}

const void* allocation_end(const Driver& driver, const void* address) {
  CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                 CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  CUdeviceptr start = 0;
  size_t size = 0;
  void* values[] = {&start, &size};
  const CUresult result = driver.pointer_get_attributes(std::size(which), which, values,
                                                        reinterpret_cast<CUdeviceptr>(address));
  return result == CUDA_SUCCESS ? reinterpret_cast<const void*>(start + size) : nullptr;
}

Status copy_lines(const Driver& driver, void* to, size_t to_pitch, const void* from,
                  size_t from_pitch, size_t width, size_t lines, Stream stream) {
  const auto to_at = reinterpret_cast<CUdeviceptr>(to);
  const auto from_at = reinterpret_cast<CUdeviceptr>(from);
  if (width == 0 || lines == 0) return {};
  if (lines == 1 || (to_pitch == width && from_pitch == width)) {
    return driver.check(driver.memcpy_dtod_async(to_at, from_at, width * lines, stream),
                        "cuMemcpyDtoDAsync");
  }
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = from_at;
  copy.srcPitch = from_pitch;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = to_at;
  copy.dstPitch = to_pitch;
  copy.WidthInBytes = width;
  copy.Height = lines;
  return driver.check(driver.memcpy_2d_async(&copy, stream), "cuMemcpy2DAsync");
}

Status zero(const Driver& driver, CUcontext primary, void* d, int64_t rows, size_t row_bytes,
            size_t pitch_bytes, Stream stream) {
  const ScopedContext current(driver, primary);
  F8_TRY(current.status());
  const auto at = reinterpret_cast<CUdeviceptr>(d);
  const auto height = static_cast<size_t>(rows);
  if (pitch_bytes == row_bytes) {
    return driver.check(driver.memset_d8_async(at, 0, height * row_bytes, stream),
                        "cuMemsetD8Async");
  }
  return driver.check(driver.memset_d2d8_async(at, pitch_bytes, 0, row_bytes, height, stream),
                      "cuMemsetD2D8Async");
}

}  // namespace f8::runtime
