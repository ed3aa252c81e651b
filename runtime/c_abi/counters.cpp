// Counters of casts.
#include "runtime/c_abi/common.hpp"

using namespace f8::c_abi;

float8_status float8_counters_clear(float8_context* context, float8_cast_counters* counters,
                                    size_t count, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(context, "context"));
    if (count == 0) return {};
    return f8::runtime::clear_counters(*context->context, counters, count, stream);
  });
}

float8_status float8_counters_snapshot(float8_context* context,
                                       const float8_cast_counters* counters, size_t count,
                                       float8_cast_counters* to, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(context, "context"));
    if (count == 0) return {};
    return f8::runtime::snapshot_counters(*context->context, counters, count, to, stream);
  });
}

float8_status float8_counters_text(const char* name, const float8_cast_counters* counters,
                                   char* text, size_t bytes, size_t* needed) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(name, "name"));
    F8_TRY(need(counters, "counters"));
    return copy_text(f8::runtime::format_counters(name, {counters, f8::runtime::kCountersOfLinear}),
                     text, bytes, needed);
  });
}
