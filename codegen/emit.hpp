// The emitter: from a spec to CUDA source. The source is a comment with the spec's key and the
// command that re-creates it, the text of the device templates, and a stub that instantiates them
// with every parameter named and asserts what the host restates of the kernel.
#pragma once

#include <string>
#include <vector>

#include "codegen/kernel_spec.hpp"

namespace f8::codegen {

// It is bumped when emitted kernels change meaning (arguments, layouts) without their text showing
// it.
inline constexpr int kGeneratorVersion = 1;

struct KernelSource {
  std::string key;                   // of the spec
  std::string entry;                 // the extern "C" name of the __global__ function
  std::string source;                // complete: no header outside it
  std::vector<std::string> options;  // for NVRTC, no install paths
};

[[nodiscard]] Result<KernelSource> emit(const KernelSpec& spec);

}  // namespace f8::codegen
