// The fields of every struct of the public headers that begins with struct_size, for the one check of
// all of them: a struct_size that ends inside a field is no version's. The build makes the lists from
// the headers. read_struct() of a struct without one does not compile, and neither does a list that
// lacks a struct's latest field.
#pragma once

#include <array>
#include <cstddef>
#include <type_traits>

#include "float8/float8.h"

namespace f8::c_abi {

struct Field {
  size_t begin = 0;
  size_t end = 0;
  bool is_pointer = false;
};

// Lays the fields out as the C ABI does: each at the next offset that its type may have.
template <class Struct, class... Types>
constexpr std::array<Field, sizeof...(Types)> lay_out(Types Struct::*...) {
  std::array<Field, sizeof...(Types)> fields{};
  size_t i = 0;
  size_t end = 0;
  const auto add = [&](size_t size, size_t align, bool is_pointer) {
    const size_t begin = (end + align - 1) / align * align;
    end = begin + size;
    fields[i++] = {begin, end, is_pointer};
  };
  (add(sizeof(Types), alignof(Types), std::is_pointer_v<Types>), ...);
  return fields;
}

template <class Struct>
struct StructFields;

#include "runtime/c_abi/struct_fields.inc"  // by struct_fields.cmake

// True where a struct of so many bytes has whole fields alone. A struct's size is a multiple of its
// alignment, in every version.
template <class Struct>
constexpr bool has_whole_fields(size_t bytes) {
  constexpr auto& fields = StructFields<Struct>::kAll;
  static_assert(
      fields.back().end == sizeof(Struct),
      "the list of fields is not the struct's: struct_fields.cmake did not understand the header");
  if (bytes % alignof(Struct) != 0) return false;
  for (const Field& field : fields) {
    if (bytes > field.begin && bytes < field.end) return false;
  }
  return true;
}

}  // namespace f8::c_abi
