// The content of a context. Everything but the kernels, the cluster remap and the table is fixed
// once it is made.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "codegen/cubin_cache.hpp"
#include "runtime/device/calls/call_records.hpp"
#include "runtime/device/context.hpp"
#include "runtime/device/cta_scheduling.hpp"
#include "runtime/device/cublaslt_api.hpp"
#include "runtime/device/driver.hpp"

namespace f8::runtime {

// What tuning at first use has done (runtime/model/first_use.hpp).
struct FirstUse {
  std::mutex mutex;
  std::set<std::string> tried;
  int measured = 0;
  std::string failure;  // the latest
};

struct CudnnHandle;  // runtime/attention/cudnn.cpp

struct Context::State {
  explicit State(const Driver& cuda) : driver(cuda) {}

  const Driver& driver;
  DeviceInfo info;
  ContextOptions options;
  CUdevice device = 0;
  CUcontext primary = nullptr;               // retained
  std::optional<codegen::CubinCache> cache;  // none where the device is emulated

  std::mutex kernels_mutex;  // held for look-ups and loading, not while compiling
  std::map<std::string, std::unique_ptr<const Kernel>, std::less<>> kernels;
  std::vector<CUmodule> modules;
  std::atomic<const Kernel*> fingerprint_kernel =
      nullptr;  // one of them, which calls need no lock for
  std::array<std::atomic<const Kernel*>, 40> adamw_kernels = {};  // likewise; by adamw.cpp's index
  std::array<std::atomic<const Kernel*>, 54> rotary_kernels =
      {};                                                         // likewise; by rotary.cpp's index
  std::array<std::atomic<const Kernel*>, 480> norm_kernels = {};  // by rms_norm.cpp's index
  std::array<std::atomic<const Kernel*>, 3> bias_grad_kernels = {};  // by a float8_dtype
  // The remap of clusters of two in a grid that takes the whole device; probed when the first such
  // kernel is loaded.
  std::optional<ClusterRemap> cluster_remap;

  mutable std::mutex table_mutex;
  std::shared_ptr<const TuningTable> table;

  FirstUse first_use;

  // Calls keep records where pointers are checked or the device is emulated, and only there.
  [[nodiscard]] bool keeps_records() const { return options.check_pointers || options.emulate; }
  CallRecords records;

  std::mutex cublaslt_mutex;
  cublasLtHandle_t cublaslt = nullptr;  // made when a plan first asks for it
  std::mutex cudnn_mutex;
  std::shared_ptr<CudnnHandle> cudnn;  // likewise
};

// A kernel that calls need no lock for. The first of them loads it.
template <class Spec>
[[nodiscard]] Result<const Kernel*> kept_kernel(Context& context, std::atomic<const Kernel*>& kept,
                                                const Spec& spec) {
  const Kernel* kernel = kept.load(std::memory_order_acquire);
  if (kernel == nullptr) [[unlikely]] {
    kernel = F8_TRY(context.kernel(spec));
    kept.store(kernel, std::memory_order_release);
  }
  return kernel;
}

}  // namespace f8::runtime
