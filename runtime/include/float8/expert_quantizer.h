/* Casts of the weights of all experts apart from their calls, to the same bits. */
#ifndef FLOAT8_EXPERT_QUANTIZER_H_
#define FLOAT8_EXPERT_QUANTIZER_H_

#include "float8/context.h"
#include "float8/quantizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the calls of an expert linear (experts.h) do to the weights of all experts, made once, so that ranks,
 * or the micro-batches of a step, share the result. As w.fp8 of a call it is a float8_tensor with
 *
 *   rows, cols         experts x n, and k
 *   q                  [experts][n][k], rows ld_q bytes apart
 *   qt                 [experts][k][n], rows ld_qt bytes apart
 *   inverse scales     those of each expert's matrix (tensor.h), one expert behind the other; with
 *                      FLOAT8_TENSOR FLOAT8_EXPERT_SCALE_STRIDE floats apart. With delayed scaling one, which
 *                      is that of all experts
 *   q_setting and qt_setting   the recipe's for b of output and of grad_input */
#define FLOAT8_EXPERT_SCALE_STRIDE 8
typedef struct float8_expert_quantizer_desc {
  size_t struct_size;
  int64_t n; /* rows of each expert's matrix: a multiple of 16, or with over_ranks any number */
  int64_t k; /* a multiple of 16 */
  int32_t experts; /* 1 to FLOAT8_MAX_EXPERTS */
  int32_t dtype;   /* a float8_dtype, the type of the weights; see f32_source */
  /* As in float8_linear_desc. FLOAT8_UNSUPPORTED: w in high precision. */
  const char* recipe;
  const float8_recipe* custom_recipe;
  int32_t non_finite; /* a float8_non_finite */
  int32_t f32_source; /* as in float8_quantizer_desc */
  /* Nonzero: ranks have n rows each of each expert's matrix, and cast them to the bits of the whole in
   * two calls: see float8_expert_quantize_amax. FLOAT8_UNSUPPORTED where that cuts 128x128 blocks. With
   * delayed scaling ranks may also have other experts, and one call is enough behind the first step. */
  int32_t over_ranks;
  int32_t
      noop_flag; /* nonzero: casts look at float8_expert_quantize_args.noop_flag; not over ranks */
  /* Nonzero: the rows of each expert's matrix are in two tensors [experts][n / 2][k], those of args.w before
   * those of args.second_w, as w13 and w3 of an MLP with float8_moe_desc.w3_apart. n is whole 32s. */
  int32_t two_tensors;
  int32_t reserved; /* 0 */
} float8_expert_quantizer_desc;

/* Plans the casts, as float8_quantizer_plan does. On failure *out is NULL. */
FLOAT8_API float8_status float8_expert_quantizer_plan(float8_context* context,
                                                      const float8_expert_quantizer_desc* desc,
                                                      float8_expert_quantizer** out);
FLOAT8_API void float8_expert_quantizer_destroy(float8_expert_quantizer* quantizer);
/* Returns the bytes of scratch that a call needs, 0 for NULL. */
FLOAT8_API size_t float8_expert_quantizer_workspace_bytes(const float8_expert_quantizer* quantizer);
/* Fills *layout without a plan and a device: where copies and inverse scales lie in `tensor` and
 * `transposed`. With q_scale_apart the inverse scales of qt are those of q too. The caller sets
 * layout->struct_size. */
FLOAT8_API float8_status float8_expert_quantizer_layout(const float8_expert_quantizer_desc* desc,
                                                        float8_layout* layout);

typedef struct float8_expert_quantize_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_expert_quantize_args));
  /* [experts][n][k] as in float8_experts_forward_args, in dtype; with f32_source in fp32. fp8 is NULL. */
  float8_matrix w FLOAT8_DEFAULT({});
  /* float8_layout.tensor_bytes without transposed_bytes, written: q and its inverse scales */
  float8_buffer tensor FLOAT8_DEFAULT({});
  /* float8_layout.transposed_bytes, written: qt and its inverse scales */
  float8_buffer transposed FLOAT8_DEFAULT({});
  float8_buffer workspace FLOAT8_DEFAULT({}); /* float8_expert_quantizer_workspace_bytes() */
  /* With over_ranks: float8_layout.amax_words, the maxima that span ranks, and row_amax_words, those of
   * this rank's rows; float8_expert_quantize_amax writes them and float8_expert_quantize reads them. The last
   * word of amax is that of delayed scales, which a cast reads in a first step alone. */
  uint32_t* amax FLOAT8_DEFAULT(NULL);
  uint32_t* row_amax FLOAT8_DEFAULT(NULL);
  /* With desc.noop_flag, as in float8_quantize_args; float8_weights_compare clears it for a weight of
   * experts x n rows. NULL: the weights are always cast. */
  uint32_t* noop_flag FLOAT8_DEFAULT(NULL);
  float8_matrix second_w FLOAT8_DEFAULT({}); /* with desc.two_tensors, as w */
  /* As in float8_quantize_args: casts with delayed scaling take the scale of a linear's slots, and record the
   * amax of w there. FLOAT8_UNSUPPORTED: ranks in a first step, whose amax over_ranks reduces. */
  const float8_step* step FLOAT8_DEFAULT(NULL);
  float8_scale_slots scales FLOAT8_DEFAULT({}); /* needed if w has delayed scaling */
} float8_expert_quantize_args;

/* Enqueues the casts: a memset and a launch for all experts, or two where their maxima are found
 * before; with delayed scaling one launch alone, but in a first step. Nothing waits or allocates; it may be captured in a CUDA graph. */
FLOAT8_API float8_status float8_expert_quantize(const float8_expert_quantizer* quantizer,
                                                const float8_expert_quantize_args* args,
                                                float8_stream stream);
/* Over ranks: finds the maxima of this rank's rows, each the bits of |w| as fp32. `amax` of all ranks is
 * then reduced by its maximum (float8_amax_sync), and float8_expert_quantize follows. */
FLOAT8_API float8_status float8_expert_quantize_amax(const float8_expert_quantizer* quantizer,
                                                     const float8_expert_quantize_args* args,
                                                     float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_EXPERT_QUANTIZER_H_ */
