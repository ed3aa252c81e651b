#include "runtime/distributed/nccl_api.hpp"

#include <atomic>

#include "base/dynlib.hpp"
#include "runtime/distributed/emulated_ranks.hpp"

namespace f8::runtime {
namespace {

std::atomic<const Nccl*> g_injected_nccl{nullptr};

Result<Nccl> load() {
  const DynamicLibrary library = F8_TRY(DynamicLibrary::open(
      "libnccl.so.2", "NCCL 2.4",
      "install NCCL for CUDA 13: package libnccl2, or the wheel nvidia-nccl-cu13"));
  Nccl table;
#define F8_NCCL_RESOLVE(field, function) F8_TRY(library.resolve(#function, table.field));
  F8_NCCL_FUNCTIONS(F8_NCCL_RESOLVE)
#undef F8_NCCL_RESOLVE
  return table;
}

}  // namespace

Result<const Nccl*> nccl() {
  if (const Nccl* table = g_injected_nccl.load(std::memory_order_acquire)) return table;
  static const Result<Nccl> loaded = load();
  if (!loaded) return std::unexpected(loaded.error());
  return &*loaded;
}

Result<const Nccl*> nccl_of(const ncclComm* communicator) {
  if (is_emulated(communicator)) return &emulated_nccl();
  return nccl();
}

void set_nccl_for_testing(const Nccl* table) {
  g_injected_nccl.store(table, std::memory_order_release);
}

Status Nccl::check(ncclResult_t result, const char* call) const {
  if (result == ncclSuccess) return {};
  const ErrorCode code =
      result == ncclInvalidArgument ? ErrorCode::kInvalidArgument : ErrorCode::kCuda;
  return fail(code, "{}: {} (code {}){}", call, get_error_string(result), static_cast<int>(result),
              hint);
}

}  // namespace f8::runtime
