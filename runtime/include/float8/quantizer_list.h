/* Lists of quantizers: casts of many tensors in few launches.
 *
 * Where several linears read one x, such as Q, K and V, one list casts x and the weights, for x.fp8 and
 * w.fp8 of each call, and another one all dy, for dy.fp8. The gradients of x are added up in one dx
 * (float8_linear_desc.accumulate_grad_input and dx.accumulate). The bits are those of the linears one
 * by one. */
#ifndef FLOAT8_QUANTIZER_LIST_H_
#define FLOAT8_QUANTIZER_LIST_H_

#include "float8/quantizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Plans the same casts for many tensors in few launches, to the same bits: tensors that are cast
 * alike (operand, dtype, setting) share launches, whatever their shapes. The quantizers belong to
 * `context` and are kept alive; one may be listed several times. On failure *out is NULL. */
FLOAT8_API float8_status float8_quantizer_list_plan(float8_context* context,
                                                    const float8_quantizer* const* quantizers,
                                                    size_t count, float8_quantizer_list** out);
FLOAT8_API void float8_quantizer_list_destroy(float8_quantizer_list* list);
FLOAT8_API size_t float8_quantizer_list_workspace_bytes(const float8_quantizer_list* list);

typedef struct float8_quantize_list_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_quantize_list_args));
  /* An array of `count` structs, one for each quantizer of the plan in order, each with rows of its own;
   * a tensor of 0 rows is left out. Their workspace, step and noop_flag are empty: the fields below are
   * those of all. */
  const float8_quantize_args* tensors FLOAT8_DEFAULT(NULL);
  size_t count FLOAT8_DEFAULT(0);
  float8_buffer workspace FLOAT8_DEFAULT({});   /* float8_quantizer_list_workspace_bytes() */
  const float8_step* step FLOAT8_DEFAULT(NULL); /* with `ranks`: one all-reduce for all */
  /* One flag for all tensors, of which none is left out then; as in float8_quantize_args. */
  uint32_t* noop_flag FLOAT8_DEFAULT(NULL);
} float8_quantize_list_args;

/* What one tensor's cast writes overlaps nothing of another's; the scale slots and the counters of two
 * tensors are the same ones or apart. In a first step over ranks two tensors of one operand need scale
 * slots of their own. */
FLOAT8_API float8_status float8_quantize_list(const float8_quantizer_list* list,
                                              const float8_quantize_list_args* args,
                                              float8_stream stream);
/* Finds the maxima of the shards of all quantizers over ranks, and passes over the others. Where
 * the words of `amax`, and those of `row_amax`, follow each other in the order of the list, one
 * memset clears them, and one float8_amax_sync reduces all of `amax`. */
FLOAT8_API float8_status float8_quantize_list_amax(const float8_quantizer_list* list,
                                                   const float8_quantize_list_args* args,
                                                   float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_QUANTIZER_LIST_H_ */
