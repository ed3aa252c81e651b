// Opening cuBLASLt.
#include "runtime/cublaslt_api.hpp"

#include <atomic>

#include "base/dynlib.hpp"

namespace f8::runtime {
namespace {

std::atomic<const CublasLt*> g_injected{nullptr};

Result<CublasLt> load() {
  const DynamicLibrary library = F8_TRY(DynamicLibrary::open(
      "libcublasLt.so.13", "install the CUDA 13 toolkit, or the wheel nvidia-cublas"));
  CublasLt table;
#define F8_CUBLASLT_RESOLVE(field, function) F8_TRY(library.resolve(#function, table.field));
  F8_CUBLASLT_FUNCTIONS(F8_CUBLASLT_RESOLVE)
#undef F8_CUBLASLT_RESOLVE
  return table;
}

}  // namespace

Result<const CublasLt*> cublaslt() {
  if (const CublasLt* table = g_injected.load(std::memory_order_acquire)) return table;
  static const Result<CublasLt> loaded = load();
  if (!loaded) return std::unexpected(loaded.error());
  return &*loaded;
}

void set_cublaslt_for_testing(const CublasLt* table) {
  g_injected.store(table, std::memory_order_release);
}

Status CublasLt::check(cublasStatus_t status, const char* call) const {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  const ErrorCode code = status == CUBLAS_STATUS_ALLOC_FAILED    ? ErrorCode::kOutOfMemory
                         : status == CUBLAS_STATUS_NOT_SUPPORTED ? ErrorCode::kUnsupported
                                                                 : ErrorCode::kCuda;
  return fail(code, "{}: {}", call, status_name(status));
}

}  // namespace f8::runtime
