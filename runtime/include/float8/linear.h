/* Linears. */
#ifndef FLOAT8_LINEAR_H_
#define FLOAT8_LINEAR_H_

#include "float8/call.h"
#include "float8/context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct float8_linear_desc {
  size_t struct_size;
  int64_t m_max;      /* the largest M that a call will have; at least 1 */
  int64_t n;          /* out_features, a multiple of 16 */
  int64_t k;          /* in_features, a multiple of 16 */
  const char* recipe; /* a name of float8_recipe_named's; NULL where custom_recipe is set */
  /* A float8_dtype, the type of dw: FLOAT8_F32 for a trainer that accumulates gradients in fp32. If
   * grad_weight is in high precision, it is tensor_dtype or FLOAT8_F32. */
  int32_t grad_weight_dtype;
  int32_t bias;                       /* nonzero: y = x w^T + bias */
  int32_t accumulate_grad_weight;     /* nonzero: a backward may add to the dw that is there */
  int32_t no_grad_input;              /* nonzero: a first layer; no backward will ask for dx */
  const float8_recipe* custom_recipe; /* replaces `recipe`; it is read during the call alone */
  int32_t tensor_dtype;               /* a float8_dtype, the type of x, w, bias, y, dy and dx */
  /* Nonzero: forward saves no copy. backward reads x, and w if it has no w_tensor, and casts
   * them again to the same bits. Where a dynamic scale is that of a whole tensor, forward saves it,
   * a few bytes. Delayed scales must still be those that forward had. */
  int32_t recompute;
  int32_t bias_grad;       /* nonzero: a backward may be asked for db */
  int32_t bias_grad_dtype; /* a float8_dtype, the type of db */
  int32_t non_finite; /* a float8_non_finite for dynamic scales; float8_scales_desc has its own */
  int32_t count;      /* nonzero: casts add to the counters of a call, which takes some time */
  int32_t accumulate_grad_input; /* nonzero: a backward may add to the dx that is there */
  /* The most SMs that a GEMM takes, for work that runs beside it, such as communication; 0: all.
   * Where it is set, the cost model chooses the GEMMs' kernels. */
  int32_t sm_limit;
  /* Nonzero: qt of a w_tensor may lie in shards, which grad_input reads in place. FLOAT8_UNSUPPORTED
   * where cuBLASLt is the choice for grad_input, since it reads one piece. */
  int32_t weight_shards;
  int32_t reserved; /* 0 */
} float8_linear_desc;

/* Chooses, compiles and loads the linear's kernels. That takes seconds for the first linear of a
 * kind on a machine, and milliseconds once the cache has the kernels. On failure *out is NULL. */
FLOAT8_API float8_status float8_linear_plan(float8_context* context, const float8_linear_desc* desc,
                                            float8_linear** out);
FLOAT8_API void float8_linear_destroy(float8_linear* linear);

/* Returns the bytes of scratch that a call needs at any M up to m_max, 0 for NULL. Between calls
 * they are free for other work on the stream, except for the reserved bytes (convention 6). */
FLOAT8_API size_t float8_linear_workspace_bytes(const float8_linear* linear);
/* Returns the bytes that forward fills for backward: the fp8 copies of x and w that the gradients
 * need. The result is 0 for NULL, and where backward needs none: then `saved` may be NULL in both.
 */
FLOAT8_API size_t float8_linear_saved_bytes(const float8_linear* linear);
/* Returns the same for calls with x_tensor (`x_tensor` nonzero), and with w_tensor (`w_tensor`
 * nonzero), which hold their parts. */
FLOAT8_API size_t float8_linear_saved_bytes_with_tensors(const float8_linear* linear,
                                                         int32_t x_tensor, int32_t w_tensor);

/* Describes what was planned in a few lines of text: for each GEMM its operands, the kernel that
 * computes it and why that one (the tuning table's row, the cost model, ...), the launches of a
 * call at m_max, and the bytes of each buffer. The call copies up to `bytes` of the text to `text`,
 * cut short if they are too few; the copy always ends in a NUL if bytes > 0. *needed, if it is not
 * NULL, receives the bytes of the whole text with its NUL. The text is for people: its wording may
 * change. */
FLOAT8_API float8_status float8_linear_info(const float8_linear* linear, char* text, size_t bytes,
                                            size_t* needed);

/* In the args below ld_x and the like are row strides in elements: 0 if rows follow each other,
 * else at least a row and a multiple of 16 bytes. Tensors without a type are in tensor_dtype. */
typedef struct float8_forward_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_forward_args));
  const void* x FLOAT8_ZERO; /* [m][k] */
  const void* w FLOAT8_ZERO; /* [n][k]; not read if w_tensor is given and `output` is fp8 */
  void* y FLOAT8_ZERO;       /* [m][n], written */
  /* float8_linear_saved_bytes(), written; NULL: no backward, or none are needed */
  void* saved FLOAT8_ZERO;
  int64_t m FLOAT8_DEFAULT(-1); /* 0 to m_max; float8.hpp: -1 is m_max */
  int64_t ld_x FLOAT8_ZERO;
  int64_t ld_w FLOAT8_ZERO;
  int64_t ld_y FLOAT8_ZERO;
  const void* bias FLOAT8_ZERO;          /* [n], if the linear has one; else NULL */
  float8_scale_slots scales FLOAT8_ZERO; /* needed if the recipe has delayed scaling */
  int32_t first_step FLOAT8_ZERO;        /* nonzero: delayed operands are scaled as if dynamic */
  int32_t reserved FLOAT8_ZERO;          /* 0 */
  /* The sizes of workspace and saved are checked where they are given; 0: not checked. */
  size_t workspace_bytes FLOAT8_ZERO;
  size_t saved_bytes FLOAT8_ZERO;
  /* FLOAT8_LINEAR_COUNTERS of them, which the casts add to, if desc.count is set; or NULL. */
  float8_cast_counters* counters FLOAT8_ZERO;
  /* The ranks that hold the other parts of the tensors. With first_step, delayed operands are
   * scaled as if dynamic over all of them. All ranks make the same calls in the same order, since
   * each call reduces its amaxes (one small all-reduce on `stream`). NULL: there is one rank. */
  float8_nccl_comm ranks FLOAT8_ZERO;
  /* Nonzero: the call leaves the scale state as it is, with or without `saved`: no amax is
   * recorded, and with first_step delayed operands are scaled by this call's own tensors, whatever
   * `ranks` is. Set it in validation; 0 in training. */
  int32_t evaluate FLOAT8_ZERO;
  int32_t reserved_2 FLOAT8_ZERO; /* 0 */
  /* x in fp8 with m rows, as float8_quantize made it under the same recipe; it may serve several
   * linears. `x` is then read only if `output` is in high precision, and `saved` holds nothing of it.
   * NULL: x is cast here. */
  const float8_tensor* x_tensor FLOAT8_ZERO;
  /* w in fp8, as a float8_quantizer of FLOAT8_WEIGHT makes it under the same recipe, for all calls
   * until the weight changes. `saved` then holds nothing of it. NULL: w is cast here. */
  const float8_tensor* w_tensor FLOAT8_ZERO;
  /* float8_workspace_reserved_bytes() of device memory, aligned to 16 bytes, in place of the
   * workspace's own reserved bytes (convention 6), for a workspace that others use between calls, such
   * as one in a CUDA graph's pool. NULL: they are at the front of the workspace. */
  void* launch_counts FLOAT8_ZERO;
} float8_forward_args;

typedef struct float8_backward_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_backward_args));
  const void* dy FLOAT8_ZERO;    /* [m][n] */
  const void* saved FLOAT8_ZERO; /* as the forward of the same m left it */
  void* dx FLOAT8_ZERO;          /* [m][k], written; NULL: not wanted, and its work is skipped */
  void* dw FLOAT8_ZERO;          /* [n][k] in grad_weight_dtype, overwritten; NULL likewise */
  int64_t m FLOAT8_DEFAULT(-1);  /* the forward's */
  int64_t ld_dy FLOAT8_ZERO;
  int64_t ld_dx FLOAT8_ZERO;
  int64_t ld_dw FLOAT8_ZERO;
  int64_t ld_x FLOAT8_ZERO;
  int64_t ld_w FLOAT8_ZERO;
  /* the forward's; read if grad_weight is in high precision, or with recompute */
  const void* x FLOAT8_ZERO;
  /* The forward's; read if grad_input is in high precision, or with recompute and no w_tensor. */
  const void* w FLOAT8_ZERO;
  float8_scale_slots scales FLOAT8_ZERO; /* as in the forward */
  int32_t first_step FLOAT8_ZERO;        /* as in the forward */
  /* nonzero: dw += instead of dw =; see accumulate_grad_weight */
  int32_t accumulate FLOAT8_ZERO;
  size_t workspace_bytes FLOAT8_ZERO; /* as in the forward */
  size_t saved_bytes FLOAT8_ZERO;
  float8_cast_counters* counters FLOAT8_ZERO; /* as in the forward */
  /* [n] in bias_grad_dtype, written: the sum of dy over its rows, added up in fp32 in one order and
   * rounded once. NULL: not wanted. It needs desc.bias_grad. */
  void* db FLOAT8_ZERO;
  int32_t accumulate_bias FLOAT8_ZERO; /* nonzero: db += instead of db = */
  int32_t reserved FLOAT8_ZERO;        /* 0 */
  float8_nccl_comm ranks FLOAT8_ZERO;  /* as in the forward */
  /* The forward's: each is given in both or in neither. With recompute, an x_tensor without qt is cast
   * again, with the scale in front of its q_inverse_scale if the tensor has one: q may be gone. */
  const float8_tensor* x_tensor FLOAT8_ZERO;
  const float8_tensor* w_tensor FLOAT8_ZERO;
  /* nonzero: dx += instead of dx =, as linears that share x need; see accumulate_grad_input */
  int32_t accumulate_dx FLOAT8_ZERO;
  int32_t reserved_2 FLOAT8_ZERO;  /* 0 */
  void* launch_counts FLOAT8_ZERO; /* as in the forward */
  /* dy in fp8, as a float8_quantizer of FLOAT8_GRAD_OUTPUT casts it: q is read for dx, qt for dw. No
   * cast is made, and dy is read by db and by gradients in high precision alone; else it may be NULL.
   * With recompute, x and the weight are given in fp8 too. */
  const float8_tensor* dy_tensor FLOAT8_ZERO;
} float8_backward_args;

/* `workspace` is float8_linear_workspace_bytes() of device memory. */
FLOAT8_API float8_status float8_linear_forward(const float8_linear* linear,
                                               const float8_forward_args* args, void* workspace,
                                               float8_stream stream);
FLOAT8_API float8_status float8_linear_backward(const float8_linear* linear,
                                                const float8_backward_args* args, void* workspace,
                                                float8_stream stream);

/* Fills views with what a forward with `m` rows left in `saved` (x: qt alone, w: qt alone).
 * `w_tensor`: nonzero if that forward had a w_tensor; then *w has no copies. The caller sets
 * struct_size of each view; a view that is NULL is not filled. FLOAT8_INVALID_ARGUMENT: the linear
 * saves nothing. It enqueues nothing. */
FLOAT8_API float8_status float8_linear_saved_tensors(const float8_linear* linear, const void* saved,
                                                     int64_t m, int32_t w_tensor, float8_tensor* x,
                                                     float8_tensor* w);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_LINEAR_H_ */
