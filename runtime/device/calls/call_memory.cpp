#include "runtime/device/calls/call_memory.hpp"

#include <iterator>

#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

// The driver's knowledge of a pointer; it has none of ordinary host memory.
struct Pointer {
  CUmemorytype type{};
  unsigned managed = 0;
  int ordinal = 0;
  CUdeviceptr start = 0;
  size_t size = 0;
};

CUresult look_up(const Driver& driver, uintptr_t address, Pointer& pointer) {
  CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                 CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                 CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                 CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void* values[] = {&pointer.type, &pointer.managed, &pointer.ordinal, &pointer.start,
                    &pointer.size};
  return driver.pointer_get_attributes(std::size(which), which, values,
                                       static_cast<CUdeviceptr>(address));
}

Status check_region(const char* call, const Driver& driver, int device, const Region& region) {
  Pointer pointer;
  F8_TRY(driver.check(look_up(driver, region.begin, pointer), "cuPointerGetAttributes"));
  const bool known = pointer.type != CUmemorytype{};
  if (!known || pointer.type == CU_MEMORYTYPE_HOST) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} is {} memory of the host; it must be memory of device {}", call,
                name_of(region), known ? "pinned" : "ordinary", device);
  }
  if (pointer.managed == 0 && pointer.ordinal != device) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} is memory of device {}, the context is of device {}", call, name_of(region),
                pointer.ordinal, device);
  }
  const size_t left = pointer.size - (region.begin - static_cast<uintptr_t>(pointer.start));
  if (left < region.bytes()) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} needs {} bytes, its allocation ends {} bytes behind it", call,
                name_of(region), region.bytes(), left);
  }
  return {};
}

}  // namespace

std::string name_of(const Region& region, const char* suffix) {
  return region.args == nullptr ? region.name
                                : f8::format("{}.{}{}", region.args, region.name, suffix);
}

bool overlap(const Region& a, const Region& b) {
  const Region& low = a.begin <= b.begin ? a : b;
  const Region& high = a.begin <= b.begin ? b : a;
  const size_t apart = high.begin - low.begin;
  if (apart >= low.bytes()) return false;
  if (low.pitch != high.pitch) return true;
  const size_t column = apart % low.pitch;
  return column < low.row || column + high.row > low.pitch;
}

Status CallMemory::check_alignment(const char* call) const {
  for (const Region& region : regions()) {
    if ((region.begin & (region.alignment - 1)) != 0) [[unlikely]] {
      return fail(ErrorCode::kInvalidArgument, "{}: {} is not aligned to {} bytes", call,
                  name_of(region), region.alignment);
    }
    if (!region.strided) continue;
    const size_t element = size_bytes(region.type);
    const auto cols = static_cast<int64_t>(region.row / element);
    if (is_row_stride(region.ld(), cols, region.type)) [[likely]] {
      continue;
    }
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} is {}; rows of {} {} elements lie at least as many apart, a multiple of {} "
                "elements "
                "(16 bytes); 0 if they are dense",
                call, name_of(region, ".ld"), region.ld(), cols, to_string(region.type),
                16 / element);
  }
  return {};
}

Status CallMemory::check(const char* call, Context& context, Stream stream) const {
  F8_TRY(check_alignment(call));
  F8_TRY(check_overlaps(call));
  return check_device(call, context, stream);
}

Status CallMemory::check_overlaps(const char* call) const {
  for (const Region& written : regions()) {
    if (written.access != Access::kWrite) continue;
    for (const Region& other : regions()) {
      if (written.end <= other.begin || other.end <= written.begin || &other == &written)
          [[likely]] {
        continue;
      }
      if (other.access == Access::kNone || !overlap(written, other)) {
        continue;
      }
      return fail(
          ErrorCode::kInvalidArgument,
          "{}: {} ({} bytes) and {} ({} bytes) overlap; {} is written, give it memory of its "
          "own",
          call, name_of(written), written.bytes(), name_of(other), other.bytes(), name_of(written));
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
  for (const Region& region : regions()) {
    if (region.access != Access::kNone) F8_TRY(check_region(call, driver, device, region));
  }
  return {};
}

}  // namespace f8::runtime
