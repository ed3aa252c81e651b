/* What the arguments of several calls have in common. */
#ifndef FLOAT8_CALL_H_
#define FLOAT8_CALL_H_

#include "float8/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A linear's part of a scale state: float8_scales_slots fills it and calls read it. It is zero if
 * no operand of the linear has delayed scaling. */
typedef struct float8_scale_slots {
  void* opaque[4];
} float8_scale_slots;

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_CALL_H_ */
