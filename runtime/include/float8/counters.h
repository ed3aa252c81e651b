/* Counters: what casts lose, read without waiting for a step. */
#ifndef FLOAT8_COUNTERS_H_
#define FLOAT8_COUNTERS_H_

#include "float8/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Counts what casts did to the elements of one fp8 copy of a tensor. A linear has
 * FLOAT8_LINEAR_COUNTERS of them, in the caller's device memory, aligned to 8 bytes: [0], [2] and
 * [4] are for x, w and dy as they lie, [1], [3] and [5] for their transposed copies. The counters
 * of a copy that the recipe never makes stay zero. */
struct float8_cast_counters {
  float amax;          /* the largest |x| since the counters were cleared */
  float scale;         /* the latest cast's, where the tensor has one scale; else 0 */
  uint64_t elements;   /* how many were cast */
  uint64_t saturated;  /* finite ones that rounding would have taken beyond the largest value */
  uint64_t flushed;    /* finite ones, not zero, that became zero */
  uint64_t non_finite; /* infinite ones and NaN */
};
#define FLOAT8_LINEAR_COUNTERS 6

/* Sets `count` counters on the device to zero. */
FLOAT8_API float8_status float8_counters_clear(float8_context* context,
                                               float8_cast_counters* counters, size_t count,
                                               float8_stream stream);
/* Copies `count` counters to host memory at `to`, in stream order: they are there once the stream
 * has come so far. If `to` is pinned memory the call waits for nothing; in a CUDA graph it must be.
 */
FLOAT8_API float8_status float8_counters_snapshot(float8_context* context,
                                                  const float8_cast_counters* counters,
                                                  size_t count, float8_cast_counters* to,
                                                  float8_stream stream);
/* Writes a linear's FLOAT8_LINEAR_COUNTERS counters, which are in host memory, as lines for people:
 * one for each copy that was cast, each beginning with `name`. The other arguments are those of
 * float8_linear_info. */
FLOAT8_API float8_status float8_counters_text(const char* name,
                                              const float8_cast_counters* counters, char* text,
                                              size_t bytes, size_t* needed);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_COUNTERS_H_ */
