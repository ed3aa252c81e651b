// Device memory of the caller's: its alignment, its row strides, the suballocation of a buffer, and
// setting rows to zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "recipes/dtype.hpp"
#include "runtime/device/context.hpp"
#include "runtime/device/driver.hpp"

namespace f8::runtime {

inline constexpr size_t kAlign = 256;

// Suballocates a buffer: hands out offsets from 0, multiples of kAlign.
class Arena {
 public:
  size_t take(size_t bytes) {
    const size_t at = size_;
    size_ += (bytes + kAlign - 1) / kAlign * kAlign;
    return at;
  }
  [[nodiscard]] size_t size() const { return size_; }

 private:
  size_t size_ = 0;
};

[[nodiscard]] inline bool is_aligned(const void* pointer, size_t bytes = 16) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// A row stride in elements is 0 (dense), or at least a row in whole 16 bytes: what bulk copies and
// 16-byte accesses need.
[[nodiscard]] bool is_row_stride(int64_t ld, int64_t cols, Dtype type);

// Sets 32-bit words in stream order.
[[nodiscard]] Status set_words(const Driver& driver, uint32_t* words, uint32_t value, size_t count,
                               Stream stream);
// The first byte behind the allocation that the driver has at `address`; null where it knows none.
[[nodiscard]] const void* allocation_end(const Driver& driver, const void* address);
// Copies lines of `width` bytes, a pitch apart on each side, in stream order.
[[nodiscard]] Status copy_lines(const Driver& driver, void* to, size_t to_pitch, const void* from,
                                size_t from_pitch, size_t width, size_t lines, Stream stream);
// Sets rows to zero in stream order.
[[nodiscard]] Status zero(const Driver& driver, CUcontext primary, void* d, int64_t rows,
                          size_t row_bytes, size_t pitch_bytes, Stream stream);

}  // namespace f8::runtime
