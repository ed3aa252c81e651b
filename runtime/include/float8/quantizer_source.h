/* What a quantizer casts: an operand of a linear, or what an activation or a norm makes of it; and which copies it makes. */
#ifndef FLOAT8_QUANTIZER_SOURCE_H_
#define FLOAT8_QUANTIZER_SOURCE_H_

#ifdef __cplusplus
extern "C" {
#endif

/* An operand of a linear. With the recipe it decides which copies are made of a tensor. */
typedef enum float8_operand {
  FLOAT8_INPUT = 0,      /* x [m][k] */
  FLOAT8_WEIGHT = 1,     /* w [n][k] */
  FLOAT8_GRAD_OUTPUT = 2 /* dy [m][n] */
} float8_operand;

/* Which copies a quantizer makes, of those that the recipe has. */
typedef enum float8_copies {
  FLOAT8_BOTH_COPIES = 0,
  FLOAT8_Q_ALONE = 1, /* there is no backward */
  FLOAT8_QT_ALONE =
      2, /* what backward alone reads, of a tensor whose q is made elsewhere or not at all */
  /* q of an input, for linears with recompute. Their backward casts the input again, and needs the
   * tensor's scale for that, if it has one: it lies apart, in the place of qt. There lie also the maxima of the
   * columns of an activation (FLOAT8_ACTIVATION, FLOAT8_GLU), fp32 [cols], where q has a scale of each row and qt of each
   * column: the launch that finds those of rows finds them too. The view has them as qt_inverse_scale. */
  FLOAT8_Q_FOR_RECOMPUTE = 3,
  /* qt of such an input, made in backward for all linears that read it: they are given it by x.fp8, and
   * cast nothing. Calls are given the view of q by x.fp8, whose scale or maxima are taken. Not in lists. */
  FLOAT8_QT_FOR_RECOMPUTE = 4
} float8_copies;

/* What a quantizer casts. Gradients are for FLOAT8_GRAD_OUTPUT, others that are computed for FLOAT8_INPUT.
 * What is computed is computed in fp32 and rounded once to dtype. Delayed scales and
 * those of blocks need one launch, and it is never in memory. Scales of a tensor or of rows need two: the
 * first one finds maxima, and leaves an activation or its gradients in the workspace for the second one. That
 * computes what norms make, and the gradients of a GLU under scales of rows, once more.
 *
 * With float8_quantizer_desc.over_ranks float8_quantize_amax is the first launch, and reads all operands. It and
 * float8_quantize are given one workspace, which nobody else writes to between them, and in which gradients of a GLU
 * are never left. */
typedef enum float8_source {
  FLOAT8_PLAIN = 0, /* x */
  FLOAT8_GLU = 1,   /* activation(x) * up, where x is a gate: SwiGLU, GeGLU */
  /* The gradients of that product with respect to x, a gate, and to up, where `grad` is the product's. One
   * call fills two tensors, in as many launches, each of which reads x, up and grad once. */
  FLOAT8_GLU_BACKWARD = 2,
  /* (x rstd) norm_weight, what an RMSNorm makes of x, whose rstd is given for each row, by these two
   * products. */
  FLOAT8_RMS_NORM = 3,
  FLOAT8_ACTIVATION = 4, /* activation(x) */
  FLOAT8_ACTIVATION_BACKWARD =
      5, /* its gradient with respect to x, where `grad` is the activation's */
  /* ((x - mean) rstd) norm_weight + norm_bias, what a LayerNorm makes of x, whose mean and rstd are given for
   * each row: the difference and the first product are rounded, the second one and the sum are one fma, as in
   * PyTorch's own kernel of the norm and in those of its compiler on GPUs. Without norm_bias it is the
   * products. */
  FLOAT8_LAYER_NORM = 6,
  /* FLOAT8_GLU_BACKWARD of a linear that makes gate and up in one: x is [rows][cols], whose first half of columns is
   * gate and whose second half up, each of whole 128s, and the one tensor that is filled has the gradients of both in
   * their places, with the scales of both. `grad` is [rows][cols / 2], and there is no `up`. Scales of a tensor or of rows
   * need two launches, which both compute the gradients. Not with over_ranks. */
  FLOAT8_MERGED_GLU_BACKWARD = 7,
  /* The same where up is the first half, and gate the second. */
  FLOAT8_MERGED_GLU_BACKWARD_UP_FIRST = 8
} float8_source;

/* The activation of an MLP, of which the last step alone is rounded; the same bits on every device. */
typedef enum float8_activation {
  FLOAT8_SILU = 0,      /* x / (1 + exp(-x)) */
  FLOAT8_GELU = 1,      /* x times the normal distribution at x */
  FLOAT8_GELU_TANH = 2, /* its approximation x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))) */
  FLOAT8_RELU2 = 3      /* x^2 where x is positive, else 0 */
} float8_activation;

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_QUANTIZER_SOURCE_H_ */
