/* AdamW of a model's weights, which finds on the way what casts of them need first, or casts them. */
#ifndef FLOAT8_OPTIMIZER_H_
#define FLOAT8_OPTIMIZER_H_

#include "float8/call.h"
#include "float8/quantizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A weight [rows][cols], its gradient and its states: dense, of one type, columns in whole 16s. */
typedef struct float8_adamw_tensor {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_adamw_tensor));
  void* param FLOAT8_DEFAULT(NULL);
  void* grad FLOAT8_DEFAULT(NULL); /* read; with a grad_scale divided by it, in place */
  void* exp_avg FLOAT8_DEFAULT(NULL);
  void* exp_avg_sq FLOAT8_DEFAULT(NULL);
  void* max_exp_avg_sq FLOAT8_DEFAULT(NULL); /* of AMSGrad; NULL: it is none */
  const float* step FLOAT8_DEFAULT(NULL);    /* the number of this step, from 1 on */
  int64_t rows FLOAT8_DEFAULT(0);            /* 0 is legal: nothing is read */
  int64_t cols FLOAT8_DEFAULT(0);
  int32_t dtype FLOAT8_DEFAULT(0); /* a float8_dtype */
  /* What the casts that follow round the weight to: dtype, or any type where that is FLOAT8_F32. */
  int32_t cast_dtype FLOAT8_DEFAULT(0);
  /* The largest |x| of what the update leaves, rounded to cast_dtype, as the bits of an fp32: of the
   * weight [1], of its rows [rows] and of its columns [cols]. The caller sets the words to 0, and the call
   * raises them: the same words as float8_quantize_amax finds. NULL: they are not wanted. */
  uint32_t* amax FLOAT8_DEFAULT(NULL);
  uint32_t* row_amax FLOAT8_DEFAULT(NULL);
  uint32_t* col_amax FLOAT8_DEFAULT(NULL);
  /* FLOAT8_FINGERPRINT_BYTES that become those of what the update leaves, as float8_weights_compare with
   * this seed would make them: of this weight alone, aligned to 16 bytes, zeros at first. NULL: none. */
  void* fingerprint FLOAT8_DEFAULT(NULL);
  uint64_t seed FLOAT8_DEFAULT(0);
  /* The cast of what the update leaves, in the same launch and to the bits of float8_quantize: a quantizer of
   * these columns and types whose cast needs no maxima before, as with delayed scaling or blocks, and its
   * call, whose x and rows are this weight's. No maxima are wanted then. NULL: there is none. */
  const float8_quantizer* quantizer FLOAT8_DEFAULT(NULL);
  const float8_quantize_args* cast FLOAT8_DEFAULT(NULL);
} float8_adamw_tensor;

typedef struct float8_adamw_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_adamw_args));
  const float8_adamw_tensor* tensors FLOAT8_DEFAULT(NULL); /* an array of `count` */
  size_t count FLOAT8_DEFAULT(0);
  double lr FLOAT8_DEFAULT(0);
  const float* lr_tensor FLOAT8_DEFAULT(NULL); /* in device memory, in place of lr; or NULL */
  double beta1 FLOAT8_DEFAULT(0);
  double beta2 FLOAT8_DEFAULT(0);
  double eps FLOAT8_DEFAULT(0);
  double weight_decay FLOAT8_DEFAULT(0); /* decoupled: it comes first, and not into the states */
  int32_t maximize FLOAT8_DEFAULT(0);
  int32_t reserved FLOAT8_DEFAULT(0); /* 0 */
  /* In device memory, or NULL: what gradients are divided by, and 1 where the step is left out. Maxima and
   * fingerprints are those of the old weights then. */
  const float* grad_scale FLOAT8_DEFAULT(NULL);
  const float* found_inf FLOAT8_DEFAULT(NULL);
} float8_adamw_args;

/* A step of AdamW, in a launch for every 36 weights of one type with the same maxima, and for every 4 that are
 * cast alike. The bits are those of PyTorch's fused kernel. The first call of a context with a type and maxima
 * loads the kernel; make one ahead of a capture. */
FLOAT8_API float8_status float8_adamw(float8_context* context, const float8_adamw_args* args,
                                      float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_OPTIMIZER_H_ */
