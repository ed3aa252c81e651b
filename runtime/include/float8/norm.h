/* RMSNorm over the rows of a matrix, in one launch, and its gradients in two. */
#ifndef FLOAT8_NORM_H_
#define FLOAT8_NORM_H_

#include "float8/call.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where the result is rounded, with rstd = 1 / sqrt(mean(x x) + eps) of a row, in fp32. */
typedef enum float8_norm_rounding {
  /* y = x rstd (weight_offset + weight), rounded once: torch.nn.RMSNorm, and with an offset of 1 Gemma's. */
  FLOAT8_ROUND_ONCE = 0,
  /* y = (x rstd) weight, where x rstd is rounded to x's type before: Llama's. */
  FLOAT8_ROUND_NORMALIZED = 1
} float8_norm_rounding;

typedef struct float8_rms_norm_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_rms_norm_args));
  float8_matrix x FLOAT8_DEFAULT({});      /* [rows][cols] of dtype; without fp8 */
  const void* weight FLOAT8_DEFAULT(NULL); /* [cols] of weight_dtype, aligned to 16 bytes */
  float8_result y FLOAT8_DEFAULT({});      /* [rows][cols] of out_dtype; it adds to nothing */
  float* rstd FLOAT8_DEFAULT(NULL);       /* [rows], which backward reads; NULL: it is not wanted */
  int64_t rows FLOAT8_DEFAULT(0);         /* 0 is legal: nothing is read */
  int64_t cols FLOAT8_DEFAULT(0);         /* a multiple of 8, up to 32768 */
  float eps FLOAT8_DEFAULT(0);            /* finite, 0 or more */
  float weight_offset FLOAT8_DEFAULT(0);  /* 0 where the rounding is FLOAT8_ROUND_NORMALIZED */
  int32_t rounding FLOAT8_DEFAULT(0);     /* a float8_norm_rounding */
  int32_t dtype FLOAT8_DEFAULT(0);        /* a float8_dtype, as the next two */
  int32_t weight_dtype FLOAT8_DEFAULT(0); /* dtype, or FLOAT8_F32 */
  int32_t out_dtype FLOAT8_DEFAULT(0);    /* dtype, or FLOAT8_F32 */
} float8_rms_norm_args;

/* Matrices and weights are aligned to 16 bytes, and rows are multiples of 16 bytes apart; what is written overlaps
 * nothing. It is enqueued on the stream, allocates nothing, and may be called from any thread. The first call of a
 * context with these types and this many columns, up to the next power of two, loads the kernel; make one ahead of a
 * capture. FLOAT8_INVALID_ARGUMENT names the field that cannot be. */
FLOAT8_API float8_status float8_rms_norm(float8_context* context, const float8_rms_norm_args* args,
                                         float8_stream stream);

typedef struct float8_rms_norm_backward_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_rms_norm_backward_args));
  float8_matrix dy FLOAT8_DEFAULT({}); /* the gradient of y, of out_dtype; without fp8 */
  float8_matrix x FLOAT8_DEFAULT({});  /* these three are as in the forward */
  const void* weight FLOAT8_DEFAULT(NULL);
  const float* rstd FLOAT8_DEFAULT(NULL);
  /* The gradients, of x's type and of the weight's. One whose data is NULL is not wanted; dweight alone may add to
   * what is there. */
  float8_result dx FLOAT8_DEFAULT({});
  float8_result dweight FLOAT8_DEFAULT({});
  /* float8_rms_norm_backward_workspace_bytes(), where dweight is wanted. */
  float8_buffer workspace FLOAT8_DEFAULT({});
  int64_t rows FLOAT8_DEFAULT(0); /* with 0 of them dweight is 0 */
  int64_t cols FLOAT8_DEFAULT(0);
  float weight_offset FLOAT8_DEFAULT(0); /* these are as in the forward */
  int32_t rounding FLOAT8_DEFAULT(0);
  int32_t dtype FLOAT8_DEFAULT(0);
  int32_t weight_dtype FLOAT8_DEFAULT(0);
  int32_t out_dtype FLOAT8_DEFAULT(0);
  int32_t reserved FLOAT8_DEFAULT(0); /* 0 */
} float8_rms_norm_backward_args;

/* With g = dy (weight_offset + weight) and n = x rstd it writes dx = rstd (g - n mean(g n)), in fp32 and rounded
 * once, and dweight, the sum over rows of dy n in fp32, where n is rounded as in the forward. It is one launch, and
 * with dweight two. Sums have one order on GPUs with as many SMs, so that the bits are the same every time. All else
 * is as in the forward. */
FLOAT8_API float8_status float8_rms_norm_backward(float8_context* context,
                                                  const float8_rms_norm_backward_args* args,
                                                  float8_stream stream);
/* Returns the bytes of its workspace; 0 for NULL, and for sizes that a call refuses. */
FLOAT8_API size_t float8_rms_norm_backward_workspace_bytes(const float8_context* context,
                                                           int64_t rows, int64_t cols);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_NORM_H_ */
