#include "runtime/quantize/cast_counters.hpp"

#include <algorithm>
#include <limits>

#include "base/format.hpp"
#include "runtime/device/calls/call_memory.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

Status check_counters(const char* call, const char* name, const void* counters) {
  if (counters != nullptr && is_aligned(counters, alignof(CastCounters))) return {};
  return fail(ErrorCode::kInvalidArgument, "{}: {} is {}", call, name,
              counters == nullptr ? "NULL" : "not aligned to 8 bytes");
}

Status check_device(const char* call, Context& context, const CastCounters* counters, size_t count,
                    Access access, Stream stream) {
  F8_TRY(check_counters(call, "counters", counters));
  if (count > std::numeric_limits<size_t>::max() / sizeof(CastCounters)) {
    return fail(ErrorCode::kInvalidArgument, "{}: count is {}", call, count);
  }
  CallMemory memory;
  memory.add("counters", counters, count * sizeof(CastCounters), access);
  return memory.check_device(call, context, stream);
}

// "12 (0.0029%)", or "0".
std::string share(uint64_t count, uint64_t elements) {
  if (count == 0 || elements == 0) return fmt::to_string(count);
  return f8::format("{} ({:.2g}%)", count,
                    100.0 * static_cast<double>(count) / static_cast<double>(elements));
}

}  // namespace

Status clear_counters(Context& context, CastCounters* counters, size_t count, Stream stream) {
  F8_TRY(check_device("float8_counters_clear", context, counters, count, Access::kWrite, stream));
  const Driver& driver = context.state().driver;
  const ScopedContext current(driver, context.state().primary);
  F8_TRY(current.status());
  return driver.check(driver.memset_d32_async(reinterpret_cast<CUdeviceptr>(counters), 0,
                                              count * sizeof(CastCounters) / 4, stream),
                      "cuMemsetD32Async");
}

Status snapshot_counters(Context& context, const CastCounters* counters, size_t count,
                         CastCounters* to, Stream stream) {
  F8_TRY(check_device("float8_counters_snapshot", context, counters, count, Access::kRead, stream));
  F8_TRY(check_counters("float8_counters_snapshot", "to", to));
  const Driver& driver = context.state().driver;
  const ScopedContext current(driver, context.state().primary);
  F8_TRY(current.status());
  return driver.check(driver.memcpy_dtoh_async(to, reinterpret_cast<CUdeviceptr>(counters),
                                               count * sizeof(CastCounters), stream),
                      "cuMemcpyDtoHAsync");
}

std::string format_counters(std::string_view linear, std::span<const CastCounters> counters) {
  std::string text;
  for (size_t i = 0; i < std::min(counters.size(), kCountersOfLinear); ++i) {
    const CastCounters& c = counters[i];
    if (c.elements == 0) continue;
    const std::string scale = c.scale != 0 ? f8::format(" scale {}", c.scale) : "";
    text += f8::format("{} {}: amax {}{} saturated {} flushed {} non-finite {} of {}\n", linear,
                       kCounterNames[i], c.amax, scale, share(c.saturated, c.elements),
                       share(c.flushed, c.elements), share(c.non_finite, c.elements), c.elements);
  }
  return text;
}

}  // namespace f8::runtime
