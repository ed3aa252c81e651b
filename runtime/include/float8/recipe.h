/* Recipes: how the operands of a linear's three GEMMs are cast.
 *
 *     GEMM          a        b        sums over   gives
 *     output        x        w        K           y  [M,N]
 *     grad_input    dy       w        N           dx [M,K]
 *     grad_weight   dy       x        M           dw [N,K] */
#ifndef FLOAT8_RECIPE_H_
#define FLOAT8_RECIPE_H_

#include "float8/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum float8_scaling {
  FLOAT8_DYNAMIC = 0, /* the scale comes from the amax of the tensor at hand */
  FLOAT8_DELAYED = 1, /* it comes from the amaxes of earlier steps, in a scale state (below) */
  FLOAT8_HIGH_PRECISION = 2 /* the operand is not cast but multiplied in tensor_dtype: both operands
                               of a GEMM or neither; the rest of the setting is ignored */
} float8_scaling;

/* The elements that share one scale. */
typedef enum float8_granularity {
  FLOAT8_TENSOR = 0,       /* the whole tensor; FLOAT8_DELAYED needs this one */
  FLOAT8_AXIS = 1,         /* each row or column that the GEMM sums over: a row of x in output */
  FLOAT8_BLOCK_1X128 = 2,  /* 128 elements of such a row; the other operand has blocks too */
  FLOAT8_BLOCK_128X128 = 3 /* blocks of 128 by 128; operand b alone */
} float8_granularity;

typedef enum float8_format {
  FLOAT8_E4M3 = 0, /* its largest finite value is 448 */
  FLOAT8_E5M2 = 1  /* its largest finite value is 57344; at most one operand of a GEMM has it */
} float8_format;

typedef struct float8_cast_setting {
  int32_t scaling;     /* a float8_scaling */
  int32_t granularity; /* a float8_granularity */
  int32_t format;      /* a float8_format */
  int32_t pow2;        /* nonzero: scales are rounded down to powers of two */
} float8_cast_setting;

typedef struct float8_gemm_setting {
  float8_cast_setting a;
  float8_cast_setting b;
  /* Nonzero selects fast accumulation: sums stay in the tensor cores, which keep about 14 bits. 0
   * selects promoted fp32 accumulation: they are added up in fp32 every 128 of K. Operands with
   * blocks or in high precision do not have fast accumulation. */
  int32_t fast;
} float8_gemm_setting;

/* The caller's own settings. With all fields 0, every operand is e4m3 with one dynamic scale, and
 * accumulation is promoted. */
struct float8_recipe {
  size_t struct_size;
  const char* name; /* has a-z, 0-9 and _, for messages and the tuning table; NULL: "custom" */
  float8_gemm_setting output;
  float8_gemm_setting grad_input;
  float8_gemm_setting grad_weight;
  int32_t reserved; /* 0 */
};

/* Gives the settings of a named recipe, to start from: "tensorwise", "rowwise",
 * "rowwise_with_gw_hp", "delayed", "blockwise", or "bf16", in which no GEMM is fp8 (the baseline of
 * the others). The caller sets *recipe's struct_size before the call. recipe->name is valid for
 * ever. */
FLOAT8_API float8_status float8_recipe_named(const char* name, float8_recipe* recipe);

/* Checks settings of the caller's own, without a device: FLOAT8_OK if a linear may have them, else
 * FLOAT8_INVALID_ARGUMENT, and float8_last_error() says why not. */
FLOAT8_API float8_status float8_recipe_check(const float8_recipe* recipe);

/* The effect on its scale of an amax that is not finite. */
typedef enum float8_non_finite {
  /* The scale is NaN or 0 and the results are NaN, so that a trainer's check sees them. A cast with
   * a delayed scale makes infinities NaN. The step does not count in delayed scaling: the scales
   * and histories of all operands stay as they are. */
  FLOAT8_PROPAGATE = 0,
  /* Dynamic scales saturate: the scale is 1 and infinities become the format's largest value, which
   * they do with a delayed scale too. Delayed scales freeze: the scale and the history of the
   * operand stay as they are. */
  FLOAT8_SATURATE = 1
} float8_non_finite;

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_RECIPE_H_ */
