// NVRTC: CUDA source to a cubin, without a GPU and without CUDA headers. The library is opened at
// first use. All functions are thread-safe; compiles run in parallel on as many threads as call.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "codegen/emit.hpp"

namespace f8::codegen {

struct Cubin {
  std::string key;  // of the spec
  std::string entry;
  std::vector<std::byte> image;
  std::string log;  // NVRTC's and ptxas's, as printed
  int registers = 0;
  int spill_bytes = 0;  // stores and loads together
  int smem_bytes = 0;   // static
  double compile_ms = 0;
  bool from_cache = false;
};

struct NvrtcVersion {
  int major = 0;
  int minor = 0;
};

[[nodiscard]] Result<NvrtcVersion> nvrtc_version();
// A C75xx line in the log (serialised wgmma, ignored setmaxnreg) is a failure that quotes the line.
[[nodiscard]] Result<Cubin> compile(const KernelSource& source);
[[nodiscard]] Result<std::string> compile_to_ptx(const KernelSource& source);

}  // namespace f8::codegen
