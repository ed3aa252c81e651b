/* Delayed scaling: the scale state of a model's linears.
 *
 * An operand with delayed scaling is cast with the scale that earlier steps left, and its amax is
 * recorded for later ones. A step is: forward and backward of all linears (any number of times: the
 * largest amax counts), then float8_scales_sync, then the optimizer. The state is one buffer of the
 * caller's device memory; a float8_scales says how it is laid out, and is immutable.
 *
 *     float8_scales* scales;
 *     float8_scales_plan(context, &desc, &scales);     // desc.linears has all of the model's
 *     // allocate float8_scales_bytes(scales) as state
 *     float8_scales_init(scales, state, stream);
 *     float8_scales_slots(scales, state, 7, &args.scales);     // for the linear desc.linears[7]
 *     float8_step step = {.struct_size = sizeof step, .first_step = i == 0, .ranks = communicator};
 *     args.step = &step;      // its ranks, if ranks share the work; the first step alone uses them
 *
 * An amax of 0 is not recorded. So behind the first step an operand may have no scale yet: a weight
 * that begins with zeros, the gradient that comes through it, a linear that was not called, or all
 * operands if the step was dropped. float8_scales_first_steps tells which linears have such an operand,
 * and what they compute needs first_step again; without it they are cast with a scale of 1. */
#ifndef FLOAT8_SCALES_H_
#define FLOAT8_SCALES_H_

#include "float8/experts.h"
#include "float8/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum float8_scale_from {
  FLOAT8_SCALE_FROM_MAX = 0,        /* the largest amax of the history */
  FLOAT8_SCALE_FROM_MOST_RECENT = 1 /* the latest amax */
} float8_scale_from;

typedef struct float8_scales_desc {
  size_t struct_size;
  /* The model's linears, of one context; those without delayed scaling have no slots. The array is
   * not kept. */
  const float8_linear* const* linears;
  size_t count;
  int32_t history;    /* amaxes kept of each operand, 1 to 1024; 0: 16 */
  int32_t scale_from; /* a float8_scale_from */
  int32_t margin;     /* scales are divided by 2^margin, 0 to 16 */
  int32_t non_finite; /* a float8_non_finite, for the histories; give the linears the same */
  /* The model's expert linears, which are like linears here: their indices follow those of `linears`. */
  const float8_experts* const* experts;
  size_t experts_count;
} float8_scales_desc;

/* On failure *out is NULL. */
FLOAT8_API float8_status float8_scales_plan(float8_context* context, const float8_scales_desc* desc,
                                            float8_scales** out);
FLOAT8_API void float8_scales_destroy(float8_scales* scales);
/* Returns the bytes of a state. The result is 0 for NULL, and where no linear has delayed scaling:
 * then `state` may be NULL and the calls below do nothing. */
FLOAT8_API size_t float8_scales_bytes(const float8_scales* scales);
/* Sets *bytes to float8_scales_bytes() of a state of linears with these descriptions, without a plan and a
 * device. An expert linear counts as a linear of its recipe. `history` is as in float8_scales_desc. */
FLOAT8_API float8_status float8_scales_size(const float8_linear_desc* const* linears, size_t count,
                                            int32_t history, size_t* bytes);
/* Sets all scales to 1 and empties the histories: the calls of the first step then have first_step
 * set. The call copies from the host, so it does not belong into a graph. */
FLOAT8_API float8_status float8_scales_init(const float8_scales* scales, void* state,
                                            float8_stream stream);
/* Gives the slots of linear `index` of the desc, the expert linears behind the others: pointers into
 * `state`. It launches nothing. */
FLOAT8_API float8_status float8_scales_slots(const float8_scales* scales, void* state, size_t index,
                                             float8_scale_slots* slots);
/* Ends a step: ONE all-reduce of all amaxes over the ranks of `communicator` (NULL: there is one
 * rank), then one launch that moves all histories on, computes the scales of the next step and
 * zeroes the amaxes. All ranks call it with states of one plan. It may be captured in a CUDA graph.
 */
FLOAT8_API float8_status float8_scales_sync(const float8_scales* scales, void* state,
                                            float8_nccl_comm communicator, float8_stream stream);

/* Sets first_step[i], for the linear of index i, to 1 if an operand of it has no scale yet, or
 * has seen less than others and is growing from zero, else to 0. Until the next sync the calls of such
 * linears have first_step set. `count` is that of all linears of the desc. The call copies to the host and waits for
 * `stream`, so it does not belong into a graph: a trainer makes it behind the syncs of the first steps,
 * until all are 0. A flag may come back while an operand grows from zero; a trainer that looks no more
 * casts it with the scale that it has. The call may be made after a load too: a saved state has all that
 * it reads. */
FLOAT8_API float8_status float8_scales_first_steps(const float8_scales* scales, const void* state,
                                                   int32_t* first_step, size_t count,
                                                   float8_stream stream);

/* ---- delayed scaling: a step that meets an infinity or NaN ----
 *
 * Such a step costs itself alone, whatever the trainer does: with FLOAT8_PROPAGATE its results are
 * NaN, and float8_scales_sync leaves all scales and histories as they were. A trainer that leaves
 * the weights alone in such a step need not look at results:
 *
 *     cudaMemsetAsync(found_inf, 0, sizeof(float), stream);     // found_inf is in device memory
 *     // forward and backward of all linears
 *     float8_scales_found_inf(scales, state, communicator, found_inf, stream);
 *     // the optimizer leaves the weights alone if *found_inf is not 0
 *     float8_scales_sync_unless(scales, state, found_inf, NULL, stream);
 *
 * found_inf has the meaning that it has for PyTorch's GradScaler, whose own checks may set it too.
 * Nothing here waits for the device, and all of it may be captured in a CUDA graph. If the first
 * step is skipped, the next one is the first step (float8_scales_first_steps).
 */

/* Reduces the amaxes of the step so far over the ranks of `communicator` (NULL: there is one rank),
 * then sets *found_inf, in device memory, to 1.0f if one of them (x, w or dy) is infinite or NaN,
 * and leaves it alone otherwise. All ranks see the same. The sync of the step then needs no
 * communicator: NULL. */
FLOAT8_API float8_status float8_scales_found_inf(const float8_scales* scales, void* state,
                                                 float8_nccl_comm communicator, float* found_inf,
                                                 float8_stream stream);
/* Does what float8_scales_sync does, but if *found_inf, in device memory, is not 0 when the stream
 * comes to it, the step is discarded. A NULL found_inf counts as 0. */
FLOAT8_API float8_status float8_scales_sync_unless(const float8_scales* scales, void* state,
                                                   const float* found_inf,
                                                   float8_nccl_comm communicator,
                                                   float8_stream stream);
/* Discards the step: its amaxes become 0, and the histories, the counts of non-finite amaxes and the
 * scales stay as they were. It takes the place of float8_scales_sync in a step that is skipped.
 */
FLOAT8_API float8_status float8_scales_discard(const float8_scales* scales, void* state,
                                               float8_stream stream);

/* ---- a scale state in a checkpoint ---- */

/* The calls below keep a state between two runs of a program: a trainer puts the bytes into its
 * checkpoint. A run resumes bitwise, at any time; docs/state.md has the grammar of the bytes
 * ("float8-scales 1", counts, the state's words, a hash), which is the same on every machine. They
 * do not tell whether the next step is the first one (first_step): the trainer knows. These calls
 * copy between device and host and wait for `stream`, so they do not belong into a graph. */

/* Returns the bytes of every saved state of these scales, also without any slots; 0 for NULL. */
FLOAT8_API size_t float8_scales_saved_bytes(const float8_scales* scales);
/* Writes float8_scales_saved_bytes() to host memory at `buffer`, which has `bytes`. */
FLOAT8_API float8_status float8_scales_save(const float8_scales* scales, const void* state,
                                            void* buffer, size_t bytes, float8_stream stream);
/* Replaces the state by the `bytes` saved at `buffer`, in host memory. Scales of the same linears
 * in the same order, with the same length of history, must have saved them; margin, scale_from and
 * non_finite may differ and apply from now on. FLOAT8_CORRUPT, FLOAT8_UNSUPPORTED (another version)
 * and FLOAT8_INVALID_ARGUMENT (other linears) leave the state as it was. */
FLOAT8_API float8_status float8_scales_load(const float8_scales* scales, void* state,
                                            const void* buffer, size_t bytes, float8_stream stream);
/* These do the same with a file, which appears complete or not at all and replaces what was at
 * `path`. */
FLOAT8_API float8_status float8_scales_save_file(const float8_scales* scales, const void* state,
                                                 const char* path, float8_stream stream);
FLOAT8_API float8_status float8_scales_load_file(const float8_scales* scales, void* state,
                                                 const char* path, float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_SCALES_H_ */
