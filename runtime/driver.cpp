// Filling the driver table: cuGetProcAddress finds, for every function, the version that cuda.h's
// types speak of.
#include "runtime/driver.hpp"

#include <atomic>
#include <mutex>
#include <type_traits>

#include "base/dynlib.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kSoname = "libcuda.so.1";
constexpr const char* kRemedy =
    "there is no NVIDIA driver here: install one of branch 580 or newer, or use the parts of "
    "float8 "
    "that need no GPU (filters, queries, emitting and compiling kernels)";

std::atomic<const Driver*> g_injected{nullptr};

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
  const DynamicLibrary library = F8_TRY(DynamicLibrary::open(soname, kRemedy));
  decltype(&::cuDriverGetVersion) get_version = nullptr;
  F8_TRY(library.resolve("cuDriverGetVersion", get_version));
  // cuda.h renames cuGetProcAddress to this symbol, whose signature is the newer one.
  decltype(&::cuGetProcAddress) find = nullptr;
  F8_TRY(library.resolve("cuGetProcAddress_v2", find));
  int version = 0;
  if (get_version(&version) != CUDA_SUCCESS || version > CUDA_VERSION) version = CUDA_VERSION;
  Driver table;
  const char* missing = nullptr;
  const auto fill = [&](const char* name, auto& field) {
    void* address = nullptr;
    CUdriverProcAddressQueryResult found{};
    if (find(name, &address, version, CU_GET_PROC_ADDRESS_DEFAULT, &found) != CUDA_SUCCESS ||
        address == nullptr) {
      missing = missing == nullptr ? name : missing;
      return;
    }
    field = reinterpret_cast<std::remove_reference_t<decltype(field)>>(address);
  };
#define F8_DRIVER_FILL(field, function) fill(#function, table.field);
  F8_DRIVER_FUNCTIONS(F8_DRIVER_FILL)
#undef F8_DRIVER_FILL
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
  const Driver* table = g_injected.load(std::memory_order_acquire);
  if (table == nullptr) table = F8_TRY(real_driver());
  const CUresult result = table->init(0);
  if (result == CUDA_ERROR_NO_DEVICE) return table;  // a driver that shows no device: count 0
  F8_TRY(table->check(result, "cuInit"));
  return table;
}

void set_driver_for_testing(const Driver* table) {
  g_injected.store(table, std::memory_order_release);
}

}  // namespace f8::runtime
