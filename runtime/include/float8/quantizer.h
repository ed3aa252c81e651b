/* Quantizers: casts of tensors apart from a linear, to the same bits. */
#ifndef FLOAT8_QUANTIZER_H_
#define FLOAT8_QUANTIZER_H_

#include "float8/call.h"
#include "float8/quantizer_source.h"
#include "float8/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct float8_quantizer_desc {
  size_t struct_size;
  int64_t rows_max;   /* the most rows that a call will have; at least 1 */
  int64_t cols;       /* a multiple of 16 */
  int32_t operand;    /* a float8_operand; a weight has rows_max rows, in whole 16s */
  int32_t dtype;      /* a float8_dtype, the tensor's type; see f32_source */
  const char* recipe; /* as in float8_linear_desc */
  const float8_recipe* custom_recipe; /* as in float8_linear_desc */
  int32_t non_finite;                 /* a float8_non_finite, for the casts */
  int32_t count;                      /* nonzero: casts add to the counters of a call */
  int32_t copies;                     /* a float8_copies */
  /* Nonzero: ranks hold the tensor by rows, and each casts its shard to the bits of the whole
   * tensor's cast, in two calls: see float8_quantize_amax. A shard has 0 to rows_max rows, also of a
   * weight. If blocks of 128 rows have a scale, all shards but the last have rows_max rows, and that
   * is a multiple of 128; see whole_rows for others. Not for delayed scaling, whose amaxes
   * float8_scales_sync reduces. Ranks may hold the tensor by columns too: see float8_quantize_amax. */
  int32_t over_ranks;
  /* With over_ranks: the rows of the whole tensor, or 0. Where it is more than rows_max, that is no
   * multiple of 128, and a copy has FLOAT8_BLOCK_128X128, a shard may begin and end inside blocks: the
   * maxima of all blocks of the whole are then among the words that span ranks, calls have a first_row,
   * and each shard's cast leaves the inverse scales of the whole. Elsewhere it changes nothing.
   * FLOAT8_UNSUPPORTED where such shards cut blocks of qt with FLOAT8_BLOCK_1X128, or where the other
   * copy has another granularity. */
  int64_t whole_rows;
  /* Nonzero: casts look at float8_quantize_args.noop_flag. It is for a weight, without over_ranks. */
  int32_t noop_flag;
  /* Nonzero: x is in fp32 in memory, such as a master weight, and calls round each element to dtype,
   * to nearest even, as they read it: maxima, scales and copies have the bits of an x that was stored
   * in dtype before. dtype is FLOAT8_BF16 or FLOAT8_F16 then. A row stride x.ld counts fp32 elements. */
  int32_t f32_source;
  /* A float8_source, not in lists; with over_ranks one that has an activation, and no whole_rows. */
  int32_t source;
  int32_t activation; /* a float8_activation, of sources that have one; else 0 */
  /* Nonzero: calls leave the sums of the gradient's columns in float8_quantize_args.column_sums. It is for
   * gradients, of which those of a GLU are then computed by both launches, as with less_workspace. */
  int32_t column_sums;
  /* Nonzero: the gradients of a GLU are never in the workspace, where calls with a scale of the tensor else leave both, and are
   * computed by both launches, which takes a tenth longer. It is for FLOAT8_GLU_BACKWARD. */
  int32_t less_workspace;
} float8_quantizer_desc;

/* Plans the casts of tensors for linears: what a linear's forward and backward do to their operands
 * themselves, to the same bits. It compiles and loads kernels, as float8_linear_plan does. On failure
 * *out is NULL. FLOAT8_UNSUPPORTED: the recipe makes no copy of the operand. */
FLOAT8_API float8_status float8_quantizer_plan(float8_context* context,
                                               const float8_quantizer_desc* desc,
                                               float8_quantizer** out);
FLOAT8_API void float8_quantizer_destroy(float8_quantizer* quantizer);
/* Returns the bytes that hold a tensor's copies and scales at any number of rows, 0 for NULL. */
FLOAT8_API size_t float8_quantizer_tensor_bytes(const float8_quantizer* quantizer);
/* Returns qt's part of them, which may lie apart: what is needed in backward alone. 0 for NULL, and
 * where qt is not made; see FLOAT8_Q_FOR_RECOMPUTE. */
FLOAT8_API size_t float8_quantizer_transposed_bytes(const float8_quantizer* quantizer);
/* Returns the bytes of scratch that a call needs, 0 for NULL (convention 6). */
FLOAT8_API size_t float8_quantizer_workspace_bytes(const float8_quantizer* quantizer);
/* Returns the same for a first step of delayed scaling, or for later ones, which may need less. */
FLOAT8_API size_t float8_quantizer_step_workspace_bytes(const float8_quantizer* quantizer,
                                                        int32_t first_step);
/* With over_ranks, return how many words a call takes in float8_quantize_args.amax, the maxima that
 * span ranks, and in row_amax, the maxima of the shard's own rows. Either may be 0, and without
 * over_ranks both are. */
FLOAT8_API size_t float8_quantizer_amax_words(const float8_quantizer* quantizer);
FLOAT8_API size_t float8_quantizer_row_amax_words(const float8_quantizer* quantizer);
/* Fills *out with the view of the tensor that a call with `rows` rows leaves in `tensor` and
 * `transposed`. If `transposed` is NULL, qt follows q in `tensor`; if `tensor` is, the view has no q.
 * The caller sets out->struct_size. It enqueues nothing. */
FLOAT8_API float8_status float8_quantizer_view(const float8_quantizer* quantizer,
                                               const void* tensor, const void* transposed,
                                               int64_t rows, float8_tensor* out);

/* Where a quantizer's copies and inverse scales lie in `tensor` and `transposed` (float8_tensor). q is at
 * the begin of `tensor`; qt at that of `transposed`, which may follow q. */
typedef struct float8_layout {
  size_t struct_size;
  size_t tensor_bytes;     /* float8_quantizer_tensor_bytes() */
  size_t transposed_bytes; /* float8_quantizer_transposed_bytes() */
  int64_t ld_q;            /* 0: the copy is not made */
  int64_t ld_qt;
  size_t q_inverse_scale;  /* an offset in `tensor`, or in `transposed` */
  size_t qt_inverse_scale; /* an offset in `transposed` */
  int32_t q_scale_apart;   /* 1: q_inverse_scale is in `transposed` */
  int32_t reserved;        /* 0 */
  size_t amax_words;       /* float8_quantizer_amax_words() */
  size_t row_amax_words;   /* float8_quantizer_row_amax_words() */
} float8_layout;
/* Fills *layout for a tensor of `rows` rows, without a plan and a device. The caller sets
 * layout->struct_size. */
FLOAT8_API float8_status float8_tensor_layout(const float8_quantizer_desc* desc, int64_t rows,
                                              float8_layout* layout);

typedef struct float8_quantize_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_quantize_args));
  /* 0 to rows_max, of a weight 0 or rows_max; 0: nothing is cast. float8.hpp: -1 is rows_max */
  int64_t rows FLOAT8_DEFAULT(-1);
  /* [rows][cols], in dtype; with f32_source in fp32; fp8 is for FLOAT8_QT_FOR_RECOMPUTE alone. */
  float8_matrix x FLOAT8_DEFAULT({});
  /* [rows][cols] like x, with FLOAT8_GLU and FLOAT8_GLU_BACKWARD. A first step of delayed scaling of what
   * is computed has two launches, as dynamic scales have; float8_step.ranks is not for it. */
  float8_matrix up FLOAT8_DEFAULT({});
  /* float8_quantizer_tensor_bytes(), written; see float8_quantizer_view */
  float8_buffer tensor FLOAT8_DEFAULT({});
  /* float8_quantizer_transposed_bytes(), written: qt and its scales, if they are not to follow q in
   * `tensor`, which then has the other bytes of float8_quantizer_tensor_bytes(). Empty: they follow. */
  float8_buffer transposed FLOAT8_DEFAULT({});
  float8_buffer workspace FLOAT8_DEFAULT({}); /* float8_quantizer_workspace_bytes() */
  const float8_step* step FLOAT8_DEFAULT(NULL);
  /* Needed if the operand has delayed scaling: those of a linear with this recipe, whose scale is
   * taken and whose amax is recorded. */
  float8_scale_slots scales FLOAT8_DEFAULT({});
  float8_cast_counters* counters FLOAT8_DEFAULT(NULL); /* as in float8_forward_args */
  /* A flag in device memory, which needs float8_quantizer_desc.noop_flag. If it is 1, the copies are as
   * they should be and nothing is written; else the weight is cast and the flag becomes 1. So a graph of
   * micro-batches may cast in each of them: set the flag to 0 (cudaMemsetAsync) before the first cast and
   * behind the optimizer's step, or let float8_weights_compare do so. NULL: the weight is always cast. A
   * cast that is left out records no amax of delayed scaling. */
  uint32_t* noop_flag FLOAT8_DEFAULT(NULL);
  /* With over_ranks: float8_quantizer_amax_words() and float8_quantizer_row_amax_words() words of
   * device memory, which float8_quantize_amax writes and float8_quantize reads. NULL: there are none. */
  uint32_t* amax FLOAT8_DEFAULT(NULL);
  uint32_t* row_amax FLOAT8_DEFAULT(NULL);
  /* The row of the whole tensor that a shard begins with, where the quantizer's whole_rows needs it;
   * elsewhere it is not looked at. */
  int64_t first_row FLOAT8_DEFAULT(0);
  /* Sources of gradients: that of what forward made, [rows][cols] like x, or [rows][cols / 2] where gate and up are
   * one tensor. With FLOAT8_GLU_BACKWARD `tensor`, `transposed`, `scales` and `counters` are
   * those of x's gradient, and the following ones of up's, of the same sizes; qt of both lies apart, or of neither. */
  float8_matrix grad FLOAT8_DEFAULT({});
  float8_buffer up_tensor FLOAT8_DEFAULT({});
  float8_buffer up_transposed FLOAT8_DEFAULT({});
  float8_scale_slots up_scales FLOAT8_DEFAULT({});
  float8_cast_counters* up_counters FLOAT8_DEFAULT(NULL);
  /* FLOAT8_RMS_NORM and FLOAT8_LAYER_NORM, read: [cols] in dtype, and fp32 [rows], the inverse root mean
   * square of each row of x, of a LayerNorm its inverse standard deviation, with the norm's epsilon in it. */
  const void* norm_weight FLOAT8_DEFAULT(NULL);
  const float* rstd FLOAT8_DEFAULT(NULL);
  /* fp32 [cols], written where the quantizer has column_sums: the gradient of the bias of the linear that made
   * x, added up in the order of a linear's db. With FLOAT8_GLU_BACKWARD fp32 [2][cols]: that of x's, then up's. */
  float* column_sums FLOAT8_DEFAULT(NULL);
  /* FLOAT8_LAYER_NORM, read: fp32 [rows], the mean of each row of x, and [cols] in dtype, or NULL. */
  const float* mean FLOAT8_DEFAULT(NULL);
  const void* norm_bias FLOAT8_DEFAULT(NULL);
  /* FLOAT8_GLU_BACKWARD with over_ranks: amax and row_amax of up's gradient, as many words each. */
  uint32_t* up_amax FLOAT8_DEFAULT(NULL);
  uint32_t* up_row_amax FLOAT8_DEFAULT(NULL);
} float8_quantize_args;

/* Casts a tensor: one launch if it is small, else two. */
FLOAT8_API float8_status float8_quantize(const float8_quantizer* quantizer,
                                         const float8_quantize_args* args, float8_stream stream);
/* Finds the maxima of a shard, each the bits of |x| as fp32, of a quantizer over ranks:
 *
 *     float8_quantize_amax(quantizer, &args, stream);         // x, rows and first_row, amax and row_amax
 *     float8_amax_sync(args.amax, words, communicator, stream);
 *     float8_quantize(quantizer, &args, stream);
 *
 * The shards' q under each other and their qt side by side are the copies of the whole tensor, bit
 * for bit. Words of several tensors that follow each other are reduced in one float8_amax_sync. A
 * shard of 0 rows has words too, all 0. Nothing here waits for the device, and all of it may be
 * captured in a CUDA graph.
 *
 * Where ranks hold the tensor by columns, other words span ranks: row_amax, if q has FLOAT8_AXIS, and
 * the tensor's word, which is the last one of amax if a copy has FLOAT8_TENSOR. The words of columns
 * stay as they are. q lie side by side then, and qt under each other. */
FLOAT8_API float8_status float8_quantize_amax(const float8_quantizer* quantizer,
                                              const float8_quantize_args* args,
                                              float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_QUANTIZER_H_ */
