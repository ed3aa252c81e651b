// The memory that a call reads and writes, for its checks: what is written must overlap nothing
// else, and with ContextOptions::check_pointers all of it must be memory of the context's device.
// Every call builds and compares it on the stack.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "recipes/dtype.hpp"
#include "runtime/device/context.hpp"

namespace f8::runtime {

enum class Access : uint8_t { kRead, kWrite };

// A region is rows of bytes, `pitch` apart.
struct Region {
  const char* name = "";
  uintptr_t begin = 0;
  size_t rows = 1;
  size_t row = 0;
  size_t pitch = 0;
  Access access = Access::kRead;

  [[nodiscard]] size_t bytes() const {
    return rows == 0 || row == 0 ? 0 : (rows - 1) * pitch + row;
  }
};
// Interleaved columns of one buffer do not overlap.
[[nodiscard]] bool overlap(const Region& a, const Region& b);

class CallMemory {
 public:
  // A null `at` adds nothing. `ld` is a row stride in elements as in the calls; 0 is dense.
  void add(const char* name, const void* at, size_t bytes, Access access) {
    add({name, reinterpret_cast<uintptr_t>(at), 1, bytes, bytes, access});
  }
  void add_rows(const char* name, const void* at, int64_t rows, int64_t cols, int64_t ld,
                Dtype type, Access access) {
    const size_t row = static_cast<size_t>(cols) * size_bytes(type);
    add({name, reinterpret_cast<uintptr_t>(at), static_cast<size_t>(rows), row,
         ld == 0 ? row : static_cast<size_t>(ld) * size_bytes(type), access});
  }
  [[nodiscard]] std::span<const Region> regions() const { return {regions_.data(), count_}; }

  // The error (kInvalidArgument) names the call and both tensors.
  [[nodiscard]] Status check_overlaps(const char* call) const;
  // Asks the driver about every pointer and about the stream's context, with check_pointers alone.
  [[nodiscard]] Status check_device(const char* call, Context& context, Stream stream) const;

 private:
  void add(const Region& region) {
    if (region.begin != 0 && region.bytes() > 0) regions_[count_++] = region;
  }

  std::array<Region, 16> regions_;
  size_t count_ = 0;
};

}  // namespace f8::runtime
