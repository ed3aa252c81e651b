/* What the arguments of calls have in common: what a call reads, what it writes, its buffers, and what
 * is the same for all calls of a training step. Zeros are the default; m, rows and tokens are the
 * exception, since a call of 0 rows is legal and does nothing: set them in C. */
#ifndef FLOAT8_CALL_H_
#define FLOAT8_CALL_H_

#include "float8/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A matrix that a call reads, row-major: plain, in fp8, or both. */
typedef struct float8_matrix {
  const void* data
      FLOAT8_DEFAULT(NULL);     /* its elements; may be NULL where a call reads fp8 alone */
  int64_t ld FLOAT8_DEFAULT(0); /* the row stride in elements, a multiple of 16 bytes; 0: dense */
  /* The same matrix in fp8 (tensor.h), made under the same recipe. NULL: the call casts it. */
  const float8_tensor* fp8 FLOAT8_DEFAULT(NULL);
} float8_matrix;

/* A matrix, or a vector, that a call writes. */
typedef struct float8_result {
  void* data FLOAT8_DEFAULT(NULL);
  int64_t ld FLOAT8_DEFAULT(0); /* as in float8_matrix; 0 for a vector */
  /* Nonzero: the call adds to what is there (+= instead of =). The plan says where it may. */
  int32_t accumulate FLOAT8_DEFAULT(0);
  int32_t reserved FLOAT8_DEFAULT(0); /* 0 */
} float8_result;

/* Device memory of the caller's, aligned to 16 bytes. */
typedef struct float8_buffer {
  void* data FLOAT8_DEFAULT(NULL);
  size_t bytes FLOAT8_DEFAULT(0); /* its size, which is checked; 0: not checked */
} float8_buffer;

/* What is the same for all calls of a training step. An args' `step` of NULL is an ordinary step on one
 * rank, as is one of zeros. */
typedef struct float8_step {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_step));
  /* Nonzero: operands with delayed scaling are scaled as if dynamic (scales.h). Set it in the first
   * step. */
  int32_t first_step FLOAT8_DEFAULT(0);
  /* Nonzero: calls leave the scale state as it is: no amax is recorded, and with first_step delayed
   * operands are scaled by the call's own tensors, whatever `ranks` is. Set it in validation. A
   * backward does not look at it. */
  int32_t evaluate FLOAT8_DEFAULT(0);
  /* The ranks that hold the other parts of the tensors. With first_step, delayed operands are scaled as
   * if dynamic over all of them. All ranks make the same calls in the same order, since each call
   * reduces its amaxes (one small all-reduce on the stream). NULL: there is one rank. */
  float8_nccl_comm ranks FLOAT8_DEFAULT(NULL);
  /* float8_workspace_reserved_bytes() in place of the workspace's own reserved bytes (convention 6), for
   * a workspace that others use between calls, such as one in a CUDA graph's pool. Without it they are
   * at the front of the workspace. */
  float8_buffer launch_counts FLOAT8_DEFAULT({});
} float8_step;

/* A linear's part of a scale state: float8_scales_slots fills it and calls read it. It is zero if
 * no operand of the linear has delayed scaling. */
typedef struct float8_scale_slots {
  void* opaque[4];
} float8_scale_slots;

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_CALL_H_ */
