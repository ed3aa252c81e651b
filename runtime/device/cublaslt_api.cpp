#include "runtime/device/cublaslt_api.hpp"

#include <atomic>

#include "base/dynlib.hpp"

namespace f8::runtime {
namespace {

std::atomic<const CublasLt*> g_injected_cublaslt{nullptr};
std::atomic<bool> g_gone{false};

Result<CublasLt> load_cublaslt() {
  const DynamicLibrary library =
      F8_TRY(DynamicLibrary::open("libcublasLt.so.13", "cuBLASLt of CUDA 13.0",
                                  "install the CUDA 13 toolkit, or the wheel nvidia-cublas"));
  CublasLt table;
#define F8_CUBLASLT_RESOLVE(field, function) F8_TRY(library.resolve(#function, table.field));
  F8_CUBLASLT_FUNCTIONS(F8_CUBLASLT_RESOLVE)
#undef F8_CUBLASLT_RESOLVE
  return table;
}

// This object is made after the library's own static objects, so it is destroyed before them. What
// lives longer, such as a context in static memory, must leave the library alone.
struct Loaded {
  Result<CublasLt> table = load_cublaslt();
  Loaded() = default;
  ~Loaded() { g_gone.store(true, std::memory_order_release); }
  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;
};

}  // namespace

Result<const CublasLt*> cublaslt() {
  if (const CublasLt* table = g_injected_cublaslt.load(std::memory_order_acquire)) return table;
  if (g_gone.load(std::memory_order_acquire)) {
    return fail(ErrorCode::kEnvironment, "cuBLASLt has gone: the process is ending");
  }
  static const Loaded loaded;
  if (!loaded.table) return std::unexpected(loaded.table.error());
  return &*loaded.table;
}

void set_cublaslt_for_testing(const CublasLt* table) {
  g_injected_cublaslt.store(table, std::memory_order_release);
}

Status CublasLt::check(cublasStatus_t status, const char* call) const {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  const ErrorCode code = status == CUBLAS_STATUS_ALLOC_FAILED    ? ErrorCode::kOutOfMemory
                         : status == CUBLAS_STATUS_NOT_SUPPORTED ? ErrorCode::kUnsupported
                                                                 : ErrorCode::kCuda;
  return fail(code, "{}: {}", call, status_name(status));
}

}  // namespace f8::runtime
