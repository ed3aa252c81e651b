// From a spec to CUDA source: the device template's text, then a stub that instantiates it with
// every parameter named, under a comment with the spec's key and the command that re-creates it.
#pragma once

#include <string>
#include <vector>

#include "codegen/kernel_spec.hpp"

namespace f8::codegen {

// Bumped when emitted kernels change meaning (arguments, layouts) without their text showing it.
inline constexpr int kGeneratorVersion = 1;

struct KernelSource {
  std::string key;                   // of the spec
  std::string entry;                 // the extern "C" name of the __global__ function
  std::string source;                // complete: no header outside it
  std::vector<std::string> options;  // for NVRTC, no install paths
};

[[nodiscard]] Result<KernelSource> emit(const KernelSpec& spec);

}  // namespace f8::codegen
