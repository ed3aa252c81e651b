// An array of a caller's structs of float8.h, whose version may have longer or shorter ones than this
// one. All have the struct_size of the first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace f8::runtime {

template <class Call>
struct CallArray {
  size_t count = 0;
  const Call* first = nullptr;

  [[nodiscard]] const Call* given(size_t i) const {
    return reinterpret_cast<const Call*>(reinterpret_cast<const unsigned char*>(first) +
                                         i * first->struct_size);
  }
  // Fields that the caller's version lacks have their default values.
  [[nodiscard]] Call at(size_t i) const {
    Call call;
    std::memcpy(static_cast<void*>(&call), given(i), std::min(first->struct_size, sizeof call));
    return call;
  }
};

}  // namespace f8::runtime
