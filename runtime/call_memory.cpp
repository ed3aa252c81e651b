#include "runtime/call_memory.hpp"

#include "runtime/context_state.hpp"

namespace f8::runtime {
namespace {

template <class T>
CUresult attribute(const Driver& driver, CUpointer_attribute which, const Region& region, T& out) {
  return driver.pointer_get_attribute(&out, which, static_cast<CUdeviceptr>(region.begin));
}

Status check_region(const char* call, const Driver& driver, int device, const Region& region) {
  CUmemorytype type{};
  const CUresult known = attribute(driver, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, region, type);
  if (known == CUDA_ERROR_INVALID_VALUE || (known == CUDA_SUCCESS && type == CU_MEMORYTYPE_HOST)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} is {} memory of the host; it must be memory of device {}", call,
                region.name, known == CUDA_SUCCESS ? "pinned" : "ordinary", device);
  }
  F8_TRY(driver.check(known, "cuPointerGetAttribute(MEMORY_TYPE)"));
  unsigned managed = 0;
  int ordinal = device;
  F8_TRY(driver.check(attribute(driver, CU_POINTER_ATTRIBUTE_IS_MANAGED, region, managed),
                      "cuPointerGetAttribute(IS_MANAGED)"));
  if (managed == 0) {
    F8_TRY(driver.check(attribute(driver, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, region, ordinal),
                        "cuPointerGetAttribute(DEVICE_ORDINAL)"));
  }
  if (ordinal != device) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} is memory of device {}, the context is of device {}", call, region.name,
                ordinal, device);
  }
  CUdeviceptr start = 0;
  size_t size = 0;
  F8_TRY(driver.check(attribute(driver, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, region, start),
                      "cuPointerGetAttribute(RANGE_START_ADDR)"));
  F8_TRY(driver.check(attribute(driver, CU_POINTER_ATTRIBUTE_RANGE_SIZE, region, size),
                      "cuPointerGetAttribute(RANGE_SIZE)"));
  const size_t left = size - (region.begin - static_cast<uintptr_t>(start));
  if (left < region.bytes()) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} needs {} bytes, its allocation ends {} bytes behind it", call, region.name,
                region.bytes(), left);
  }
  return {};
}

}  // namespace

bool overlap(const Region& a, const Region& b) {
  const Region& low = a.begin <= b.begin ? a : b;
  const Region& high = a.begin <= b.begin ? b : a;
  const size_t apart = high.begin - low.begin;
  if (apart >= low.bytes()) return false;
  if (low.pitch != high.pitch) return true;
  const size_t column = apart % low.pitch;
  return column < low.row || column + high.row > low.pitch;
}

Status CallMemory::check_overlaps(const char* call) const {
  for (const Region& written : regions()) {
    if (written.access != Access::kWrite) continue;
    for (const Region& other : regions()) {
      if (&other == &written || !overlap(written, other)) [[likely]] {
        continue;
      }
      return fail(
          ErrorCode::kInvalidArgument,
          "{}: {} ({} bytes) and {} ({} bytes) overlap; {} is written, give it memory of its "
          "own",
          call, written.name, written.bytes(), other.name, other.bytes(), written.name);
    }
  }
  return {};
}

Status CallMemory::check_device(const char* call, Context& context, Stream stream) const {
  if (!context.options().check_pointers) [[likely]] {
    return {};
  }
  const Driver& driver = context.state().driver;
  CUcontext const primary = context.state().primary;
  const int device = context.device().ordinal;
  const ScopedContext current(driver, primary);
  F8_TRY(current.status());
  if (stream != nullptr) {
    CUcontext owner = nullptr;
    const CUresult known = driver.stream_get_ctx(stream, &owner);
    if (known == CUDA_ERROR_INVALID_HANDLE || known == CUDA_ERROR_INVALID_CONTEXT) {
      return fail(ErrorCode::kInvalidArgument, "{}: the stream is none", call);
    }
    F8_TRY(driver.check(known, "cuStreamGetCtx"));
    if (owner != primary) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: the stream is of another CUDA context than device {}'s primary one; make it "
                  "while that device is current",
                  call, device);
    }
  }
  for (const Region& region : regions()) F8_TRY(check_region(call, driver, device, region));
  return {};
}

}  // namespace f8::runtime
