// The memory of a call of a group of linears, for its checks: what a linear writes overlaps nothing of
// another's. Y's and dy's may be columns of one buffer.
#pragma once

#include <array>
#include <string>

#include "runtime/device/call_memory.hpp"

namespace f8::runtime {

inline constexpr int kOfGroup = -1;  // in the place of a linear's index

// Replaces the structs of one linear's calls in a message by those of the group's call.
[[nodiscard]] std::string in_group(std::string message, int linear);
[[nodiscard]] Status in_group(Status status, int linear);

class GroupMemory {
 public:
  explicit GroupMemory(const char* call) : call_(call) {}
  // Adds the memory of a linear, or of the group, after the checks that need no other memory.
  [[nodiscard]] Status add(const CallMemory& memory, int linear, Context& context, Stream stream);
  [[nodiscard]] Status check_overlaps() const;

 private:
  struct OfLinear {
    Region region;
    int linear;
  };
  [[nodiscard]] static std::string name(const OfLinear& of);

  const char* call_;
  std::array<OfLinear, 16 * 12 + 4> regions_;
  size_t count_ = 0;
};

}  // namespace f8::runtime
