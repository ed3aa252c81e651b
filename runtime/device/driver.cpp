// Filling the driver table by symbol name. cuda.h renames functions to the version whose type it
// declares (cuMemAlloc to cuMemAlloc_v2), so the name after its macros is the one to look up.
// cuGetProcAddress is no substitute: asked for CUDA 13 it gives a cuCtxSynchronize that takes an
// argument, which cuda.h declares without.
#include "runtime/device/driver.hpp"

#include <atomic>
#include <mutex>
#include <type_traits>

#include "base/dynlib.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kSoname = "libcuda.so.1";
constexpr const char* kRemedy =
    "there is no NVIDIA driver here: install one of branch 580 or newer, or use what needs no GPU: "
    "an emulated device (float8_context_options.emulate), filters, queries, emitting and compiling";

std::atomic<const Driver*> g_injected_driver{nullptr};

Result<const Driver*> real_driver() {
  static std::mutex mutex;
  static std::atomic<const Driver*> loaded{nullptr};
  if (const Driver* table = loaded.load(std::memory_order_acquire)) return table;
  const std::lock_guard lock(mutex);
  if (const Driver* table = loaded.load(std::memory_order_acquire)) return table;
  static Driver table;
  table = F8_TRY(load_driver(kSoname));
  loaded.store(&table, std::memory_order_release);
  return &table;
}

}  // namespace

Result<Driver> load_driver(const char* soname) {
  const DynamicLibrary library = F8_TRY(DynamicLibrary::open(soname, "branch 580", kRemedy));
  Driver table;
  const char* missing = nullptr;
#define F8_NAME_OF(symbol) #symbol
#define F8_DRIVER_FILL(field, function) \
  if (!library.resolve(F8_NAME_OF(function), table.field)) missing = #function;
  F8_DRIVER_FUNCTIONS(F8_DRIVER_FILL)
#undef F8_DRIVER_FILL
#undef F8_NAME_OF
  if (missing != nullptr) {
    return fail(ErrorCode::kEnvironment,
                "the NVIDIA driver ({}) has no {}: it is too old; install branch 580 or newer",
                soname, missing);
  }
  return table;
}

bool is_sticky(CUresult result) {
  switch (result) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
      return true;
    default:
      return false;
  }
}

Status Driver::failure(CUresult result, const char* call) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (get_error_name(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown error";
  if (get_error_string(result, &text) != CUDA_SUCCESS || text == nullptr) text = "no description";
  const ErrorCode code =
      result == CUDA_ERROR_OUT_OF_MEMORY ? ErrorCode::kOutOfMemory : ErrorCode::kCuda;
  return fail(code, "{}: {} ({}, code {}){}", call, name, text, static_cast<int>(result),
              is_sticky(result)
                  ? "; an earlier kernel broke the CUDA context: no further CUDA call "
                    "can succeed, restart the process"
                  : "");
}

Result<const Driver*> driver() {
  const Driver* table = g_injected_driver.load(std::memory_order_acquire);
  if (table == nullptr) table = F8_TRY(real_driver());
  const CUresult result = table->init(0);
  if (result == CUDA_ERROR_NO_DEVICE) return table;  // a driver that shows no device: count 0
  F8_TRY(table->check(result, "cuInit"));
  return table;
}

void set_driver_for_testing(const Driver* table) {
  g_injected_driver.store(table, std::memory_order_release);
}

}  // namespace f8::runtime
