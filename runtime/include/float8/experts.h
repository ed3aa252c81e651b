/* Expert linears: y_e = x_e w_e^T for each expert e of a mixture, where x has the rows of all experts,
 * one group after the other, and the device alone knows where each group ends. Groups are of any size,
 * also empty, and are not padded. */
#ifndef FLOAT8_EXPERTS_H_
#define FLOAT8_EXPERTS_H_

#include "float8/call.h"
#include "float8/context.h"
#include "float8/recipe.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FLOAT8_MAX_EXPERTS 1024

/* The layout of a routing: what the calls of expert linears read in place of the offsets. One layout
 * serves all expert linears with as many experts and the same m_max, in forward and backward. */
typedef struct float8_group_layout_desc {
  size_t struct_size;
  int64_t m_max;    /* the largest m that a call will have; 1 to 2^30 */
  int32_t experts;  /* 1 to FLOAT8_MAX_EXPERTS */
  int32_t reserved; /* 0 */
} float8_group_layout_desc;

FLOAT8_API float8_status float8_group_layout_plan_create(float8_context* context,
                                                         const float8_group_layout_desc* desc,
                                                         float8_group_layout_plan** out);
FLOAT8_API void float8_group_layout_plan_destroy(float8_group_layout_plan* plan);
/* Returns the bytes of a layout, which follow from m_max and experts alone; 0 for NULL. */
FLOAT8_API size_t float8_group_layout_bytes(const float8_group_layout_plan* plan);

typedef struct float8_group_layout_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_group_layout_args));
  /* int32[experts] on the device, aligned to 4 bytes: the rows of expert e are offsets[e - 1] (0 for
   * the first) to offsets[e], without it. Rows from the last offset to m belong to no expert. */
  const int32_t* offsets FLOAT8_DEFAULT(NULL);
  int64_t m FLOAT8_DEFAULT(-1); /* the rows of x, 0 to m_max; float8.hpp: -1 is m_max */
  /* float8_group_layout_bytes(), written: zeros before the first call, and written by these calls
   * alone. */
  float8_buffer layout FLOAT8_DEFAULT({});
} float8_group_layout_args;

/* Makes the layout of these offsets, in one launch: call it once for each routing. Offsets that fall,
 * are negative or lie beyond m are replaced by the largest up to them, and that by m: no call leaves a
 * buffer, whatever they are. The first of them is kept in the layout. */
FLOAT8_API float8_status float8_group_layout(const float8_group_layout_plan* plan,
                                             const float8_group_layout_args* args,
                                             float8_stream stream);

typedef enum float8_group_error_code {
  FLOAT8_NO_GROUP_ERROR = 0,
  FLOAT8_NEGATIVE_END = 1, /* an offset is negative */
  FLOAT8_FALLING_END = 2,  /* an offset is below the one before */
  FLOAT8_END_BEYOND_M = 3  /* an offset is above m */
} float8_group_error_code;

typedef struct float8_group_error {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_group_error));
  int32_t code FLOAT8_DEFAULT(0);    /* a float8_group_error_code */
  int32_t expert FLOAT8_DEFAULT(-1); /* whose offset it is; -1 without an error */
} float8_group_error;

/* Waits for the stream, and fills *error with the first error of a layout since it was asked for the
 * last time; the caller sets error->struct_size. It is not for a captured stream. */
FLOAT8_API float8_status float8_group_layout_error(const float8_group_layout_plan* plan,
                                                   void* layout, float8_stream stream,
                                                   float8_group_error* error);

/* An expert linear is a linear of each expert, of one n and k. Its results are those of so many
 * float8_linear, bit for bit where these have the same kernels: each group has the scales that its rows
 * have alone, and each expert's weight those of its matrix. An empty group has none. */
typedef struct float8_experts_desc {
  size_t struct_size;
  int64_t m_max;        /* the largest m that a call will have, all experts together; 1 to 2^30 */
  int64_t n;            /* out_features of an expert, a multiple of 16 */
  int64_t k;            /* in_features, a multiple of 16 */
  int32_t experts;      /* 1 to FLOAT8_MAX_EXPERTS */
  int32_t tensor_dtype; /* a float8_dtype, the type of x, w, y, dy and dx */
  /* As in float8_linear_desc. FLOAT8_UNSUPPORTED: GEMMs in high precision of fp32 tensors. Delayed scales
   * are one each for x and for dy of all experts, and one for w of all. */
  const char* recipe;
  const float8_recipe* custom_recipe;
  int32_t grad_weight_dtype;      /* a float8_dtype, the type of dw */
  int32_t accumulate_grad_weight; /* nonzero: a backward may add to the dw that is there */
  int32_t no_grad_input;          /* nonzero: no backward will ask for dx */
  int32_t non_finite;             /* a float8_non_finite */
  int32_t sm_limit;               /* the most SMs that a GEMM takes; 0: all */
  /* Nonzero: `saved` has no fp8 copy of w, experts x n x k bytes, and a backward that computes dx is
   * given w and casts it again. The results are the same. */
  int32_t recompute_weight;
  /* Nonzero: ranks have k columns each of x, or n columns each of dy, and a call is given the maxima of the
   * whole. FLOAT8_UNSUPPORTED: delayed scales and others of that tensor, and columns that cut its blocks
   * of 128. */
  int32_t x_over_ranks;
  int32_t dy_over_ranks;
  /* Nonzero: the weights are frozen; no backward will ask for dw, so that x and dy have no copy for it, and no
   * delayed scale of one, and forward saves none of x. */
  int32_t no_grad_weight;
  int32_t reserved; /* 0 */
} float8_experts_desc;

/* Chooses, compiles and loads the kernels, as float8_linear_plan does. On failure *out is NULL. */
FLOAT8_API float8_status float8_experts_plan(float8_context* context,
                                             const float8_experts_desc* desc, float8_experts** out);
FLOAT8_API void float8_experts_destroy(float8_experts* experts);
/* Return the bytes of scratch that a call needs, which are free between calls, and the bytes that forward
 * fills for backward, at any m up to m_max; 0 for NULL. */
FLOAT8_API size_t float8_experts_workspace_bytes(const float8_experts* experts);
FLOAT8_API size_t float8_experts_saved_bytes(const float8_experts* experts);

typedef struct float8_experts_forward_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_experts_forward_args));
  /* that of the layout, 0 to m_max; 0: no expert has a row; float8.hpp: -1 is m_max */
  int64_t m FLOAT8_DEFAULT(-1);
  /* [m][k], read up to the last group's end. Here and below fp8 is NULL, but for w. */
  float8_matrix x FLOAT8_DEFAULT({});
  /* [experts][n][k], without a gap between matrices; ld is the stride of each one's rows. With fp8
   * (expert_quantizer.h) its q is read and data is not; a forward that saves then takes
   * desc.recompute_weight or desc.no_grad_input. With delayed scaling the quantizer has recorded the amax
   * of w, and the call does not. fp8 is not for a GEMM in high precision. */
  float8_matrix w FLOAT8_DEFAULT({});
  float8_result y FLOAT8_DEFAULT({}); /* [m][n]; accumulate is 0 */
  /* As float8_group_layout left it for this m; read. Its plan has the same m_max and experts. */
  float8_buffer layout FLOAT8_DEFAULT({});
  /* float8_experts_saved_bytes(), written; empty: there is no backward */
  float8_buffer saved FLOAT8_DEFAULT({});
  float8_buffer workspace FLOAT8_DEFAULT({}); /* float8_experts_workspace_bytes() */
  /* Nonzero: the rows of y that belong to no expert, from the last group's end to m, become 0. Else they
   * are not written. */
  int32_t zero_tail FLOAT8_DEFAULT(0);
  int32_t reserved FLOAT8_DEFAULT(0); /* 0 */
  /* As in float8_forward_args. FLOAT8_UNSUPPORTED: ranks in a first step with delayed scales, which are
   * then those of the call's own tensors. */
  const float8_step* step FLOAT8_DEFAULT(NULL);
  float8_scale_slots scales FLOAT8_DEFAULT({}); /* needed if the recipe has delayed scaling */
  /* With desc.x_over_ranks, the maxima over ranks, each the bits of |x| as fp32: [experts], those of groups,
   * where a copy of x has one scale for each, and [m], those of rows, where q has. Others are not read.
   * Of delayed scales x_amax is [1], and is read in a first step alone. */
  const uint32_t* x_amax FLOAT8_DEFAULT(NULL);
  const uint32_t* x_row_amax FLOAT8_DEFAULT(NULL);
  /* In a first step with delayed scales: [1], the maximum of w over the ranks that share it. NULL: the w of
   * the call is whole. */
  const uint32_t* w_amax FLOAT8_DEFAULT(NULL);
} float8_experts_forward_args;

/* A gradient whose data is NULL is not wanted, and its work is skipped. */
typedef struct float8_experts_backward_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_experts_backward_args));
  int64_t m FLOAT8_DEFAULT(-1);        /* the forward's */
  float8_matrix dy FLOAT8_DEFAULT({}); /* [m][n], read up to the last group's end */
  float8_result dx FLOAT8_DEFAULT({}); /* [m][k]; accumulate is 0 */
  /* [experts][n][k] in grad_weight_dtype, without a gap between matrices; that of an expert without rows
   * becomes 0. To accumulate takes desc.accumulate_grad_weight, and leaves such an expert's as it is. */
  float8_result dw FLOAT8_DEFAULT({});
  float8_buffer layout FLOAT8_DEFAULT({});    /* the forward's; read */
  float8_buffer saved FLOAT8_DEFAULT({});     /* as the forward left it; read */
  float8_buffer workspace FLOAT8_DEFAULT({}); /* as in the forward */
  /* With desc.recompute_weight, or grad_input in high precision, where dx is wanted: the forward's; else
   * unread. Of fp8 its qt is read. */
  float8_matrix w FLOAT8_DEFAULT({});
  int32_t zero_tail FLOAT8_DEFAULT(0); /* as in the forward, of dx */
  int32_t reserved FLOAT8_DEFAULT(0);  /* 0 */
  /* As in the forward. With desc.recompute_weight delayed scales must still be those that it had. */
  const float8_step* step FLOAT8_DEFAULT(NULL);
  float8_scale_slots scales FLOAT8_DEFAULT({});
  /* Where grad_weight is in high precision, and dw is wanted: the forward's; else unread. */
  float8_matrix x FLOAT8_DEFAULT({});
  /* With desc.dy_over_ranks, those of dy, as the forward's of x. */
  const uint32_t* dy_amax FLOAT8_DEFAULT(NULL);
  const uint32_t* dy_row_amax FLOAT8_DEFAULT(NULL);
  const uint32_t* w_amax FLOAT8_DEFAULT(NULL); /* the forward's, where w is cast again */
} float8_experts_backward_args;

/* Enqueue the casts and a GEMM for each result. They read the layout on the device alone, allocate
 * nothing and wait for nothing: they may be captured in a CUDA graph, whose replays have other
 * offsets. */
FLOAT8_API float8_status float8_experts_forward(const float8_experts* experts,
                                                const float8_experts_forward_args* args,
                                                float8_stream stream);
FLOAT8_API float8_status float8_experts_backward(const float8_experts* experts,
                                                 const float8_experts_backward_args* args,
                                                 float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_EXPERTS_H_ */
