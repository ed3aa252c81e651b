/* GEMMs of tensors in fp8, apart from a linear. */
#ifndef FLOAT8_GEMM_H_
#define FLOAT8_GEMM_H_

#include "float8/call.h"
#include "float8/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One of the three GEMMs of a linear. */
typedef enum float8_gemm_kind {
  FLOAT8_OUTPUT = 0,     /* y[m][n] = x[m][k] w[n][k]^T: reads q of x and q of w */
  FLOAT8_GRAD_INPUT = 1, /* dx[m][k] = dy[m][n] w[n][k]: reads q of dy and qt of w */
  FLOAT8_GRAD_WEIGHT = 2 /* dw[n][k] = dy[m][n]^T x[m][k]: reads qt of dy and qt of x */
} float8_gemm_kind;

typedef struct float8_gemm_desc {
  size_t struct_size;
  int64_t m_max; /* the linear's shape, as in float8_linear_desc */
  int64_t n;
  int64_t k;
  int32_t gemm;                       /* a float8_gemm_kind */
  int32_t d_dtype;                    /* a float8_dtype, the result's */
  const char* recipe;                 /* as in float8_linear_desc; the GEMM is in fp8 */
  const float8_recipe* custom_recipe; /* as in float8_linear_desc */
  int32_t bias;                       /* nonzero: a bias of d's type is added; of FLOAT8_OUTPUT */
  int32_t accumulate;                 /* nonzero: d += instead of d = */
  int32_t sm_limit;                   /* as in float8_linear_desc */
  int32_t reserved;                   /* 0 */
} float8_gemm_desc;

FLOAT8_API float8_status float8_gemm_plan_create(float8_context* context,
                                                 const float8_gemm_desc* desc,
                                                 float8_gemm_plan** out);
FLOAT8_API void float8_gemm_plan_destroy(float8_gemm_plan* plan);
FLOAT8_API size_t float8_gemm_workspace_bytes(const float8_gemm_plan* plan);

typedef struct float8_gemm_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_gemm_args));
  const float8_tensor* a FLOAT8_DEFAULT(NULL); /* the operand that float8_gemm_kind names first */
  const float8_tensor* b FLOAT8_DEFAULT(NULL);
  const void* bias FLOAT8_DEFAULT(NULL);      /* [n], if the plan has one; else NULL */
  float8_result d FLOAT8_DEFAULT({});         /* its accumulate is the plan's */
  float8_buffer workspace FLOAT8_DEFAULT({}); /* float8_gemm_workspace_bytes() */
} float8_gemm_args;

/* Multiplies two tensors in fp8, whose shapes and settings must be those of the plan. */
FLOAT8_API float8_status float8_gemm(const float8_gemm_plan* plan, const float8_gemm_args* args,
                                     float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_GEMM_H_ */
