/* Linears that read one x: Q, K and V, or gate and up.
 *
 * A group computes what its linears compute one by one with a shared x.fp8, to the same bits, in
 * fewer launches: it casts x once, all weights that need it in one list with x, and all dy in
 * another. `saved` holds one transposed x. The gradients of x are added up in one dx: the first
 * linear writes it, and the GEMMs of the others add to it.
 *
 *     const float8_linear* qkv[3] = {q, k, v};
 *     float8_linear_group_plan(context, qkv, 3, &group);
 *     // allocate float8_linear_group_workspace_bytes(group) as workspace
 *     // and float8_linear_group_saved_bytes(group, 0) as saved
 *     float8_grouped_linear_args each[3] = {{.struct_size = sizeof *each, .w.data = wq, .y.data = yq}, ...};
 *     float8_linear_group_args args = {.struct_size = sizeof args, .m = m, .x.data = x, .linears = each,
 *                                      .count = 3, .saved.data = saved, .workspace.data = workspace};
 *     float8_linear_group_forward(group, &args, stream);
 *     // fill in dy and dw of each, and dx
 *     float8_linear_group_backward(group, &args, stream); */
#ifndef FLOAT8_LINEAR_GROUP_H_
#define FLOAT8_LINEAR_GROUP_H_

#include "float8/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The most linears of a group. */
#define FLOAT8_GROUP_LINEARS 16

/* Groups 1 to FLOAT8_GROUP_LINEARS linears of `context`, which are kept alive. They have one m_max,
 * k, tensor_dtype, non_finite, count and no_grad_input, and recipes that cast x alike; none has
 * recompute. All but the first have accumulate_grad_input, unless they have no_grad_input. With
 * delayed scaling, x has the scale of the first linear: its slots are read and record the amax of
 * x, and the slots that the other linears have for x stay unused. The workspace holds the copies of
 * all dy at once. On failure *out is NULL. */
FLOAT8_API float8_status float8_linear_group_plan(float8_context* context,
                                                  const float8_linear* const* linears, size_t count,
                                                  float8_linear_group** out);
FLOAT8_API void float8_linear_group_destroy(float8_linear_group* group);
/* These are as for one linear. `weights` nonzero: calls are given all weights in fp8. */
FLOAT8_API size_t float8_linear_group_workspace_bytes(const float8_linear_group* group);
FLOAT8_API size_t float8_linear_group_saved_bytes(const float8_linear_group* group,
                                                  int32_t weights);
/* Describes the group in a few lines of text, with its launches beside those of the linears one by
 * one. The arguments are those of float8_linear_info. */
FLOAT8_API float8_status float8_linear_group_info(const float8_linear_group* group, char* text,
                                                  size_t bytes, size_t* needed);

/* One linear's part of a call; its fields are as in float8_forward_args and float8_backward_args. A
 * call looks at what it reads or writes alone, so that one struct serves both. */
typedef struct float8_grouped_linear_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_grouped_linear_args));
  float8_matrix w FLOAT8_DEFAULT({}); /* [n][k] */
  const void* bias FLOAT8_DEFAULT(NULL);
  float8_result y FLOAT8_DEFAULT({});  /* [m][n], written by forward */
  float8_matrix dy FLOAT8_DEFAULT({}); /* [m][n], read by backward; without fp8 */
  float8_result dw FLOAT8_DEFAULT({}); /* [n][k], written by backward; without data: not wanted */
  float8_result db FLOAT8_DEFAULT({}); /* [n], likewise */
  float8_scale_slots scales FLOAT8_DEFAULT({});
  float8_cast_counters* counters FLOAT8_DEFAULT(NULL); /* those of x are the first linear's */
} float8_grouped_linear_args;

typedef struct float8_linear_group_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_linear_group_args));
  int64_t m FLOAT8_DEFAULT(-1); /* 0 to m_max; float8.hpp: -1 is m_max */
  /* [m][k], read by forward, and by backward where float8_backward_args says so; without fp8 */
  float8_matrix x FLOAT8_DEFAULT({});
  /* [m][k], written by backward; without data: not wanted. To accumulate takes the first linear's
   * accumulate_grad_input. */
  float8_result dx FLOAT8_DEFAULT({});
  /* An array of `count` structs, one for each linear of the plan in order. */
  const float8_grouped_linear_args* linears FLOAT8_DEFAULT(NULL);
  size_t count FLOAT8_DEFAULT(0);
  /* float8_linear_group_saved_bytes(), written by forward and read by backward; empty in a forward:
   * no backward */
  float8_buffer saved FLOAT8_DEFAULT({});
  float8_buffer workspace FLOAT8_DEFAULT({}); /* float8_linear_group_workspace_bytes() */
  const float8_step* step FLOAT8_DEFAULT(NULL);
} float8_linear_group_args;

FLOAT8_API float8_status float8_linear_group_forward(const float8_linear_group* group,
                                                     const float8_linear_group_args* args,
                                                     float8_stream stream);
FLOAT8_API float8_status float8_linear_group_backward(const float8_linear_group* group,
                                                      const float8_linear_group_args* args,
                                                      float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_LINEAR_GROUP_H_ */
