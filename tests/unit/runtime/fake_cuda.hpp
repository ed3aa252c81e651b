// The emulated driver in the place of libcuda, for tests: launches are recorded, calls fail on
// demand, and the device can be another one. Contexts on it go the way of a real device:
// they emit kernels and ask the cubin cache, whose "compiler" here leaves the spec's key in the
// cubin. One fake at a time; its functions are static because the driver's are.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "codegen/cubin_cache.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::testing {

[[nodiscard]] inline bool says(std::string_view message, std::string_view part) {
  return message.find(part) != std::string_view::npos;
}
[[nodiscard]] inline bool says(const Error& error, std::string_view part) {
  return says(error.message, part);
}

struct FakeLaunch : emulation::Launch {
  std::string_view kernel;  // the spec's key; good for as long as the fake, whatever is unloaded
  CUstream stream = nullptr;
  kernels::GemmArgs gemm{};  // of a matmul
};

// Memory that the driver knows.
struct FakeAllocation {
  const void* begin = nullptr;
  size_t bytes = 0;
  int device = 0;
  CUmemorytype type = CU_MEMORYTYPE_DEVICE;
  bool managed = false;
};

class FakeCuda {
 public:
  FakeCuda();   // takes the driver's place
  ~FakeCuda();  // and gives it back
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;

  // The device.
  int device_count = 1;
  int cc_major = 9;
  int cc_minor = 0;
  int sm_count = 132;
  bool cooperative = true;  // false: contexts without cooperative launches
  int active_clusters = 0;  // 0: the driver cannot tell
  int driver_version = 13000;
  // Calls that fail.
  CUresult init_result = CUDA_SUCCESS;
  CUresult retain_result = CUDA_SUCCESS;
  CUresult load_result = CUDA_SUCCESS;
  CUresult launch_result = CUDA_SUCCESS;
  CUresult memset_result = CUDA_SUCCESS;
  CUresult encode_result = CUDA_SUCCESS;
  CUresult copy_result = CUDA_SUCCESS;
  CUresult synchronize_result = CUDA_SUCCESS;
  // The record of what happened.
  std::vector<FakeLaunch> launches;         // up to its capacity; a launch beyond it fails the test
  std::vector<std::string> faults;          // arguments that a device could not work with
  std::vector<FakeAllocation> allocations;  // for ContextOptions::check_pointers
  CUstream foreign_stream = nullptr;        // of another context
  int memsets = 0;
  int synchronisations = 0;
  int modules_loaded = 0;
  int modules_unloaded = 0;
  int retained = 0;
  int context_switches = 0;
  bool emulate = true;       // false: launches are recorded, nothing is computed
  bool touch_memory = true;  // false: memsets write nothing, for pointers that lead nowhere

  // A context on this device whose kernels need no compiler.
  [[nodiscard]] std::shared_ptr<Context> context(const ContextOptions& options = {});
  [[nodiscard]] static codegen::CubinCache::Compiler compiler();
  [[nodiscard]] const Driver& table() const { return table_; }

  std::vector<const emulation::Module*> modules;  // that are loaded
  std::set<std::string, std::less<>> keys;        // of all that ever were
  CUcontext current = nullptr;

 private:
  Driver table_;
  std::string directory_;
};

// The fake that is in place.
[[nodiscard]] FakeCuda& fake();

// A temporary directory that only its owner can read, removed at the end.
class ScratchDirectory {
 public:
  ScratchDirectory();
  ~ScratchDirectory();
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace f8::runtime::testing
