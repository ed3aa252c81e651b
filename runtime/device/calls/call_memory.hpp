// The memory that a call reads and writes, for its checks: every pointer is aligned, row strides hold
// a row, what is written overlaps nothing else, and with ContextOptions::check_pointers all of it is
// memory of the context's device. Every call builds and compares it on the stack.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "recipes/dtype.hpp"
#include "runtime/device/context.hpp"

namespace f8::runtime {

enum class Access : uint8_t {
  kNone,  // given, not touched: only its alignment is checked
  kRead,
  kWrite
};

// A region is rows of bytes, `pitch` apart.
struct Region {
  uintptr_t begin;
  uintptr_t end;
  size_t row;
  size_t pitch;
  const char* args;  // the struct whose field it is, or null
  const char* name;
  uint32_t alignment;  // a power of two
  Access access;
  bool strided;  // with the caller's stride
  Dtype type;    // of rows

  [[nodiscard]] size_t bytes() const { return end - begin; }
  [[nodiscard]] int64_t ld() const {  // as the caller gave it
    return strided ? static_cast<int64_t>(pitch) / static_cast<int64_t>(size_bytes(type)) : 0;
  }
};
// Its name in messages: "float8_forward_args.x" (with a suffix "float8_forward_args.x.ld"), or
// "workspace".
[[nodiscard]] std::string name_of(const Region& region, const char* suffix = "");
// Interleaved columns of one buffer do not overlap.
[[nodiscard]] bool overlap(const Region& a, const Region& b);

// Refuses a field of a call's struct that is NULL.
[[nodiscard]] inline Status need(const char* args, const char* field, const void* pointer) {
  if (pointer != nullptr) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{}.{} is NULL", args, field);
}

class CallMemory {
 public:
  // `args`: the struct of float8.h whose fields the regions are, for messages.
  explicit CallMemory(const char* args = nullptr) : args_(args) {}

  // A null `at` adds nothing. `ld` is a row stride in elements as in the calls; 0 is dense.
  void add(const char* name, const void* at, size_t bytes, Access access, uint32_t alignment = 16) {
    add(args_, name, at, 1, bytes, bytes, access, alignment, false, {});
  }
  // Memory that is no field of the struct.
  void add_beside(const char* name, const void* at, size_t bytes, Access access,
                  uint32_t alignment = 16) {
    add(nullptr, name, at, 1, bytes, bytes, access, alignment, false, {});
  }
  void add_rows(const char* name, const void* at, int64_t rows, int64_t cols, int64_t ld,
                Dtype type, Access access) {
    const size_t row = static_cast<size_t>(cols) * size_bytes(type);
    add(args_, name, at, static_cast<size_t>(rows), row,
        ld == 0 ? row : static_cast<size_t>(ld) * size_bytes(type), access, 16, ld != 0, type);
  }
  [[nodiscard]] std::span<const Region> regions() const { return {regions_.data(), count_}; }
  // The errors (kInvalidArgument) name the call and the tensors.
  [[nodiscard]] Status check_alignment(const char* call) const;  // of pointers and rows
  [[nodiscard]] Status check_overlaps(const char* call) const;
  // Asks the driver about every pointer and about the stream's context, with check_pointers alone.
  [[nodiscard]] Status check_device(const char* call, Context& context, Stream stream) const;
  // All of these, in this order.
  [[nodiscard]] Status check(const char* call, Context& context, Stream stream) const;

 private:
  void add(const char* args, const char* name, const void* at, size_t rows, size_t row,
           size_t pitch, Access access, uint32_t alignment, bool strided, Dtype type) {
    if (at == nullptr || rows == 0 || row == 0) return;
    const auto begin = reinterpret_cast<uintptr_t>(at);
    const uintptr_t end = begin + (rows - 1) * pitch + row;
    regions_[count_++] = {begin, end, row, pitch, args, name, alignment, access, strided, type};
  }

  const char* args_;
  std::array<Region, 32> regions_;  // the first count_
  size_t count_ = 0;
};

}  // namespace f8::runtime
