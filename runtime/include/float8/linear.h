/* Linears: y[M,N] = x[M,K] w[N,K]^T, where M is tokens, N out_features and K in_features. This is all
 * that a first program needs:
 *
 *     float8_context* context;
 *     if (float8_context_create(0, NULL, &context) != FLOAT8_OK) puts(float8_last_error());
 *     // Without a GPU: float8_context_options options = {.struct_size = sizeof options, .emulate = 1};
 *     // float8_context_create(0, &options, &context); memory is malloc's then, and stream NULL.
 *     float8_linear_desc desc = {.struct_size = sizeof desc, .m_max = 16384, .n = 4096, .k = 4096,
 *                                .recipe = "rowwise"};
 *     float8_linear* linear;
 *     float8_linear_plan(context, &desc, &linear);            // once; it may compile kernels
 *     // Allocate float8_linear_workspace_bytes(linear) and float8_linear_saved_bytes(linear) on the
 *     // device. x [m][k], w [n][k], y and dy [m][n] are bf16 there, row-major.
 *     float8_forward_args forward = {.struct_size = sizeof forward, .m = 16384, .x.data = x, .w.data = w,
 *                                    .y.data = y, .saved.data = saved, .workspace.data = workspace};
 *     float8_linear_forward(linear, &forward, stream);
 *     float8_backward_args backward = {.struct_size = sizeof backward, .m = 16384, .dy.data = dy,
 *                                      .dx.data = dx, .dw.data = dw, .saved.data = saved,
 *                                      .workspace.data = workspace};
 *     float8_linear_backward(linear, &backward, stream);
 *     float8_linear_destroy(linear);
 *     float8_context_destroy(context);
 *
 * float8.h lists what else there is, and has the conventions of all calls. */
#ifndef FLOAT8_LINEAR_H_
#define FLOAT8_LINEAR_H_

#include "float8/call.h"
#include "float8/context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct float8_linear_desc {
  size_t struct_size;
  int64_t m_max; /* the largest M that a call will have; at least 1 */
  int64_t n;     /* out_features, a multiple of 16 */
  int64_t k;     /* in_features, a multiple of 16 */
  /* "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise" or "bf16" (recipe.h); NULL
   * where custom_recipe is set */
  const char* recipe;
  /* A float8_dtype, the type of dw: FLOAT8_F32 for a trainer that accumulates gradients in fp32. If
   * grad_weight is in high precision, it is tensor_dtype or FLOAT8_F32. */
  int32_t grad_weight_dtype;
  int32_t bias;                       /* nonzero: y = x w^T + bias */
  int32_t accumulate_grad_weight;     /* nonzero: a backward may add to the dw that is there */
  int32_t no_grad_input;              /* nonzero: a first layer; no backward will ask for dx */
  const float8_recipe* custom_recipe; /* replaces `recipe`; it is read during the call alone */
  int32_t tensor_dtype;               /* a float8_dtype, the type of x, w, bias, y, dy and dx */
  /* Nonzero: forward saves no copy. backward reads x, and w if it has no w.fp8, and casts
   * them again to the same bits. Where a dynamic scale is that of a whole tensor, forward saves it,
   * a few bytes. Delayed scales must still be those that forward had. */
  int32_t recompute;
  int32_t bias_grad;       /* nonzero: a backward may be asked for db */
  int32_t bias_grad_dtype; /* a float8_dtype, the type of db */
  /* A float8_non_finite (recipe.h) for dynamic scales; float8_scales_desc has its own. */
  int32_t non_finite;
  int32_t count; /* nonzero: casts add to the counters of a call, which takes some time */
  int32_t accumulate_grad_input; /* nonzero: a backward may add to the dx that is there */
  /* The most SMs that a GEMM takes, for work that runs beside it, such as communication; 0: all.
   * Where it is set, the cost model chooses the GEMMs' kernels. */
  int32_t sm_limit;
  /* Nonzero: qt of a w.fp8 may lie in shards, which grad_input reads in place. FLOAT8_UNSUPPORTED
   * where cuBLASLt is the choice for grad_input, since it reads one piece. */
  int32_t weight_shards;
  /* Nonzero: a frozen weight; no backward will ask for dw, so that x and dy have no copy for it, and no
   * delayed scale of one, and forward saves none of x. */
  int32_t no_grad_weight;
} float8_linear_desc;

/* Chooses, compiles and loads the linear's kernels. That takes seconds for the first linear of a
 * kind on a machine, and milliseconds once the cache has the kernels. On failure *out is NULL. */
FLOAT8_API float8_status float8_linear_plan(float8_context* context, const float8_linear_desc* desc,
                                            float8_linear** out);
FLOAT8_API void float8_linear_destroy(float8_linear* linear);

/* Returns the bytes of scratch that a call needs at any M up to m_max, 0 for NULL. Between calls
 * they are free for other work on the stream, except for the reserved bytes (convention 6). */
FLOAT8_API size_t float8_linear_workspace_bytes(const float8_linear* linear);
/* Return the same for a forward or a backward alone that is given tensors in fp8 (nonzero), of which it makes no
 * copies there. An x.fp8 of which backward takes the scale alone, to cast x again, does not count. */
FLOAT8_API size_t float8_linear_forward_workspace_bytes(const float8_linear* linear, int32_t x_fp8,
                                                        int32_t w_fp8);
FLOAT8_API size_t float8_linear_backward_workspace_bytes(const float8_linear* linear, int32_t x_fp8,
                                                         int32_t w_fp8, int32_t dy_fp8);
/* Returns the bytes that forward fills for backward: the fp8 copies of x and w that the gradients
 * need. The result is 0 for NULL, and where backward needs none: then `saved` may be empty in both.
 */
FLOAT8_API size_t float8_linear_saved_bytes(const float8_linear* linear);
/* Returns the same for calls with x.fp8 (`x_fp8` nonzero), and with w.fp8 (`w_fp8` nonzero), which hold
 * their parts. */
FLOAT8_API size_t float8_linear_saved_bytes_with_tensors(const float8_linear* linear, int32_t x_fp8,
                                                         int32_t w_fp8);

/* The bytes of `saved`, which follow from the description. Calls with x.fp8 save none of `x`, those with
 * w.fp8 none of `w`. The workspace depends on the kernels that a plan chooses. */
typedef struct float8_saved_bytes {
  size_t struct_size;
  size_t x;
  size_t w;
} float8_saved_bytes;
/* Fills *sizes for a linear of this description, without a plan and a device. The caller sets
 * sizes->struct_size. */
FLOAT8_API float8_status float8_linear_sizes(const float8_linear_desc* desc,
                                             float8_saved_bytes* sizes);

/* Describes what was planned in a few lines of text: for each GEMM its operands, the kernel that
 * computes it and why that one (the tuning table's row, the cost model, ...), the launches of a
 * call at m_max, and the bytes of each buffer. The call copies up to `bytes` of the text to `text`,
 * cut short if they are too few; the copy always ends in a NUL if bytes > 0. *needed, if it is not
 * NULL, receives the bytes of the whole text with its NUL. The text is for people: its wording may
 * change. */
FLOAT8_API float8_status float8_linear_info(const float8_linear* linear, char* text, size_t bytes,
                                            size_t* needed);

/* Tensors without a type are in tensor_dtype. */
typedef struct float8_forward_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_forward_args));
  int64_t m FLOAT8_DEFAULT(-1); /* 0 to m_max; float8.hpp: -1 is m_max */
  /* [m][k]. An x.fp8 may serve several linears; `saved` then holds nothing of x, and x.data is read
   * only if `output` is in high precision. */
  float8_matrix x FLOAT8_DEFAULT({});
  /* [n][k]. A w.fp8 serves until the weight changes; `saved` then holds nothing of w, and w.data is
   * read only if `output` is in high precision. */
  float8_matrix w FLOAT8_DEFAULT({});
  const void* bias FLOAT8_DEFAULT(NULL); /* [n], if the linear has one; else NULL */
  float8_result y FLOAT8_DEFAULT({});    /* [m][n]; accumulate is 0 */
  /* float8_linear_saved_bytes(), written; empty: no backward, or none are needed */
  float8_buffer saved FLOAT8_DEFAULT({});
  float8_buffer workspace FLOAT8_DEFAULT({}); /* float8_linear_workspace_bytes() */
  const float8_step* step FLOAT8_DEFAULT(NULL);
  float8_scale_slots scales FLOAT8_DEFAULT({}); /* needed if the recipe has delayed scaling */
  /* FLOAT8_LINEAR_COUNTERS of them, which the casts add to, if desc.count is set; or NULL. */
  float8_cast_counters* counters FLOAT8_DEFAULT(NULL);
} float8_forward_args;

/* A gradient whose data is NULL is not wanted, and its work is skipped. */
typedef struct float8_backward_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_backward_args));
  int64_t m FLOAT8_DEFAULT(-1); /* the forward's */
  /* [m][n]. With dy.fp8, from a quantizer of FLOAT8_GRAD_OUTPUT, no cast is made: q is read for dx, qt
   * for dw, and dy.data by db and by gradients in high precision alone. With recompute, an x that dw reads in
   * fp8 is then given in fp8 too; w is cast again where it is not. */
  float8_matrix dy FLOAT8_DEFAULT({});
  /* The forward's. x.data is read if grad_weight is in high precision, or with recompute; w.data if
   * grad_input is, or with recompute and no w.fp8. An fp8 is given in both calls or in neither. With
   * recompute, an x.fp8 without qt is cast again, with the scale in front of its q_inverse_scale if the
   * tensor has one: q may be gone. */
  float8_matrix x FLOAT8_DEFAULT({});
  float8_matrix w FLOAT8_DEFAULT({});
  float8_result dx FLOAT8_DEFAULT({}); /* [m][k]; to accumulate takes desc.accumulate_grad_input */
  /* [n][k] in grad_weight_dtype; to accumulate takes desc.accumulate_grad_weight */
  float8_result dw FLOAT8_DEFAULT({});
  /* [n] in bias_grad_dtype: the sum of dy over its rows, added up in fp32 in one order and rounded once.
   * It needs desc.bias_grad. */
  float8_result db FLOAT8_DEFAULT({});
  float8_buffer saved FLOAT8_DEFAULT({});     /* as the forward of the same m left it; read */
  float8_buffer workspace FLOAT8_DEFAULT({}); /* these are as in the forward */
  const float8_step* step FLOAT8_DEFAULT(NULL);
  float8_scale_slots scales FLOAT8_DEFAULT({});
  float8_cast_counters* counters FLOAT8_DEFAULT(NULL);
} float8_backward_args;

FLOAT8_API float8_status float8_linear_forward(const float8_linear* linear,
                                               const float8_forward_args* args,
                                               float8_stream stream);
FLOAT8_API float8_status float8_linear_backward(const float8_linear* linear,
                                                const float8_backward_args* args,
                                                float8_stream stream);

/* Fills views with what a forward with `m` rows left in `saved` (x: qt alone, w: qt alone).
 * `w_fp8`: nonzero if that forward had a w.fp8; then *w has no copies. The caller sets
 * struct_size of each view; a view that is NULL is not filled. FLOAT8_INVALID_ARGUMENT: the linear
 * saves nothing. It enqueues nothing. */
FLOAT8_API float8_status float8_linear_saved_tensors(const float8_linear* linear, const void* saved,
                                                     int64_t m, int32_t w_fp8, float8_tensor* x,
                                                     float8_tensor* w);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_LINEAR_H_ */
