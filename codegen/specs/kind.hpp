// What every kind of kernel says of itself. A kind is a struct in a file of its own in this folder, a
// member of KernelSpec's list, and its emulate() in runtime/emulation.
#pragma once

#include <concepts>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "recipes/dtype.hpp"
#include "recipes/recipe.hpp"

namespace f8::codegen {

// A GEMM with block scales has the mode of b; a's are always 1x128.
using ScaleMode = Granularity;

// What instantiates a device template.
struct Stub {
  std::string_view file;  // the template
  std::string entry;      // the extern "C" name of the __global__ function
  std::string text;
};

struct LaunchTraits {
  int threads = 256;  // of a block
  int dynamic_smem_bytes = 0;
  int cluster_size = 1;
  bool cooperative = false;        // its blocks wait for each other, so that all must be resident
  bool occupancy_limited = false;  // the launch limits how many of its blocks fit an SM
};

// The bytes of a kernel's parameters, in order; 0: there are no more.
struct ParameterBytes {
  size_t first = 0;
  size_t second = 0;
};

// kKinds are the first fields of its keys; parse() takes one of them and what is behind its "/".
template <class Spec>
concept Kind = std::equality_comparable<Spec> &&
    requires(const Spec& spec, std::string_view kind, std::string_view rest) {
  { Spec::kKinds[0] } -> std::convertible_to<std::string_view>;
  { Spec::parse(kind, rest) } -> std::same_as<Result<Spec>>;
  { spec.key() } -> std::same_as<std::string>;
  { spec.validate() } -> std::same_as<Status>;
  { spec.stub() } -> std::same_as<Stub>;
  { spec.launch() } -> std::same_as<LaunchTraits>;
  { spec.parameters() } -> std::same_as<ParameterBytes>;
};

// The type of x in memory.
template <class Spec>
[[nodiscard]] constexpr Dtype memory_type(const Spec& spec) {
  return spec.from_f32 ? Dtype::kF32 : spec.in;
}

}  // namespace f8::codegen
