#include "tools/tuner/backend/operands.hpp"

#include <algorithm>
#include <cassert>
#include <cmath>

#include "recipes/scales/scale.hpp"
#include "tools/tuner/statistics.hpp"

namespace f8::tuner {

Pattern Pattern::make(const CastSetting* cast, uint64_t seed) {
  Random random(seed);
  std::vector<float> uniform(kPatternElements);
  float amax = 0;
  for (float& value : uniform) {
    value = decode_bf16(encode_bf16(static_cast<float>(2 * random.uniform() - 1)));
    amax = std::max(amax, std::abs(value));
  }
  Pattern pattern;
  if (cast == nullptr) {
    for (const float value : uniform) {
      const uint16_t bits = encode_bf16(value);
      pattern.bytes.push_back(static_cast<uint8_t>(bits & 0xff));
      pattern.bytes.push_back(static_cast<uint8_t>(bits >> 8));
    }
    pattern.values = std::move(uniform);
    return pattern;
  }
  pattern.dtype = cast->dtype;
  const float scale = scale_from_amax(amax, cast->dtype, cast->pow2);
  pattern.inv_scale = inverse_scale(scale);
  pattern.bytes.reserve(kPatternElements);
  pattern.values.reserve(kPatternElements);
  for (const float value : uniform) {
    const uint8_t bits = cast_to_fp8(value, scale, cast->dtype);
    pattern.bytes.push_back(bits);
    pattern.values.push_back(decode_fp8(bits, cast->dtype));
  }
  return pattern;
}

Result<DeviceBuffer> DeviceBuffer::allocate(const runtime::Driver& driver, size_t bytes,
                                            const char* what) {
  DeviceBuffer buffer;
  if (const Status allocated =
          driver.check(driver.mem_alloc(&buffer.address_, bytes), "cuMemAlloc");
      !allocated) {
    return fail(allocated.error().code,
                "{} MiB of device memory for {}: {}; use a smaller M, or free the GPU", bytes >> 20,
                what, allocated.error().message);
  }
  buffer.driver_ = &driver;
  buffer.bytes_ = bytes;
  return buffer;
}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  if (this == &other) return *this;
  reset();
  driver_ = std::exchange(other.driver_, nullptr);
  address_ = std::exchange(other.address_, 0);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

void DeviceBuffer::reset() {
  if (driver_ != nullptr) driver_->mem_free(address_);  // fails only in a lost context
  driver_ = nullptr;
  address_ = 0;
  bytes_ = 0;
}

Status Arena::reserve(const runtime::Driver& driver, size_t bytes, const char* what) {
  if (bytes <= buffer_.bytes()) return {};
  release();
  buffer_ = F8_TRY(DeviceBuffer::allocate(driver, bytes, what));
  return {};
}

CUdeviceptr Arena::suballocate(size_t bytes) {
  const CUdeviceptr at = buffer_.address() + used_;
  used_ += suballocation_bytes(bytes);
  assert(used_ <= buffer_.bytes());
  return at;
}

void Arena::release() {
  buffer_.reset();
  used_ = 0;
}

Status Pool::reserve(const runtime::Driver& driver, size_t bytes) {
  bytes = std::max(bytes, pattern_.bytes.size());
  if (bytes <= buffer_.bytes()) return {};
  buffer_.reset();
  buffer_ = F8_TRY(DeviceBuffer::allocate(driver, bytes, "random operands"));
  F8_TRY(driver.check(
      driver.memcpy_htod(buffer_.address(), pattern_.bytes.data(), pattern_.bytes.size()),
      "cuMemcpyHtoD"));
  // Every copy doubles the part that holds whole repetitions of the pattern.
  for (size_t filled = pattern_.bytes.size(); filled < bytes;) {
    const size_t count = std::min(filled, bytes - filled);
    F8_TRY(driver.check(
        driver.memcpy_dtod_async(buffer_.address() + filled, buffer_.address(), count, nullptr),
        "cuMemcpyDtoDAsync"));
    filled += count;
  }
  return driver.check(driver.ctx_synchronize(), "cuCtxSynchronize");
}

PoolTensor Pool::suballocate(int64_t elements) {
  const size_t element_bytes = size_bytes(pattern_.dtype);
  const PoolTensor tensor{.data = reinterpret_cast<const void*>(buffer_.address() + used_),
                          .pattern = &pattern_,
                          .first = used_ / element_bytes};
  used_ += suballocation_bytes(static_cast<size_t>(elements) * element_bytes);
  assert(used_ <= buffer_.bytes());
  return tensor;
}

}  // namespace f8::tuner
