// Operands on the device. Each kind of data is one pool: a random pattern of a prime number of
// elements, repeated over the whole pool by copies on the device. Tensors are suballocated from it
// at aligned places, so they all differ, and the host knows every element without copying one back.
// Pools are read only; results go to an Arena.
//
// The pattern is uniform in [-1, 1]. An fp8 pattern is the same one after the recipe's cast, by the
// CPU reference, which the kernels equal bitwise.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "recipes/recipe.hpp"
#include "runtime/device/driver.hpp"

namespace f8::tuner {

inline constexpr size_t kPatternElements = 1048573;  // prime
inline constexpr size_t kSuballocationAlignment = 1024;

struct Pattern {
  Dtype dtype = Dtype::kBf16;
  float inv_scale = 1;
  std::vector<uint8_t> bytes;
  std::vector<float> values;  // what the kernels read, before the scale

  // `cast` null: bf16.
  [[nodiscard]] static Pattern make(const CastSetting* cast, uint64_t seed);
};

// A tensor in a pool.
struct PoolTensor {
  const void* data = nullptr;
  const Pattern* pattern = nullptr;
  size_t first = 0;  // index of its first element in the pool
  [[nodiscard]] float value(int64_t element) const {
    return pattern->values[(first + static_cast<size_t>(element)) % kPatternElements];
  }
};

// Device memory that frees itself.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  [[nodiscard]] static Result<DeviceBuffer> allocate(const runtime::Driver& driver, size_t bytes,
                                                     const char* what);
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer() { reset(); }
  void reset();

  [[nodiscard]] CUdeviceptr address() const { return address_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  const runtime::Driver* driver_ = nullptr;
  CUdeviceptr address_ = 0;
  size_t bytes_ = 0;
};

// Suballocates a buffer from its start; rewind() starts over. It grows by a new allocation.
class Arena {
 public:
  // Makes room for `bytes` in all. Where the buffer has to grow, earlier suballocations are lost.
  [[nodiscard]] Status reserve(const runtime::Driver& driver, size_t bytes, const char* what);
  [[nodiscard]] CUdeviceptr suballocate(size_t bytes);  // reserve() has made sure that it fits
  void rewind() { used_ = 0; }
  void release();
  [[nodiscard]] size_t capacity() const { return buffer_.bytes(); }

 private:
  DeviceBuffer buffer_;
  size_t used_ = 0;
};

[[nodiscard]] constexpr size_t suballocation_bytes(size_t bytes) {
  return (bytes + kSuballocationAlignment - 1) / kSuballocationAlignment * kSuballocationAlignment;
}

[[nodiscard]] inline size_t bytes_of(int64_t elements, Dtype type) {
  return static_cast<size_t>(elements) * size_bytes(type);
}

[[nodiscard]] inline const void* pointer(CUdeviceptr address) {
  return reinterpret_cast<const void*>(address);
}
[[nodiscard]] inline void* mutable_pointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}

class Pool {
 public:
  explicit Pool(Pattern pattern) : pattern_(std::move(pattern)) {}
  // Makes sure that at least `bytes` of the pattern are on the device.
  [[nodiscard]] Status reserve(const runtime::Driver& driver, size_t bytes);
  [[nodiscard]] PoolTensor suballocate(int64_t elements);
  void rewind() { used_ = 0; }
  void release() { buffer_.reset(); }
  [[nodiscard]] size_t capacity() const { return buffer_.bytes(); }
  [[nodiscard]] const Pattern& pattern() const { return pattern_; }

 private:
  Pattern pattern_;
  DeviceBuffer buffer_;
  size_t used_ = 0;
};

}  // namespace f8::tuner
