/*
 * float8: fp8 linear layers for Hopper GPUs. This is the C interface, in C99; it is the library's
 * only binary interface.
 *
 * START HERE. A linear layer computes y[M,N] = x[M,K] w[N,K]^T: M tokens, N out_features and K
 * in_features.
 *
 *     float8_context* context;
 *     if (float8_context_create(0, NULL, &context) != FLOAT8_OK) puts(float8_last_error());
 *     // Without a GPU: float8_context_options options = {.struct_size = sizeof options, .emulate = 1};
 *     // float8_context_create(0, &options, &context); memory is malloc's then, and stream NULL.
 *     float8_linear_desc desc = {.struct_size = sizeof desc, .m_max = 16384, .n = 4096, .k = 4096,
 *                                .recipe = "rowwise"};
 *     float8_linear* linear;
 *     float8_linear_plan(context, &desc, &linear);            // once; it may compile kernels
 *     // allocate float8_linear_workspace_bytes(linear) and float8_linear_saved_bytes(linear)
 *     float8_forward_args forward = {.struct_size = sizeof forward, .x = x, .w = w, .y = y,
 *                                    .saved = saved, .m = 16384};
 *     float8_linear_forward(linear, &forward, workspace, stream);
 *     float8_backward_args backward = {.struct_size = sizeof backward, .dy = dy, .saved = saved,
 *                                      .dx = dx, .dw = dw, .m = 16384};
 *     float8_linear_backward(linear, &backward, workspace, stream);
 *
 * AND THEN. For gradient accumulation, cast the weights once (float8_quantize of FLOAT8_WEIGHT, for
 * w_tensor) and set accumulate.
 * For delayed scaling, keep one scale state for all linears, synchronise it once a step and put it
 * into checkpoints. Where several linears read one x, such as Q, K and V, run them as a group
 * (float8_linear_group_plan). Casts of many tensors share launches (float8_quantizer_list_plan),
 * also those of shards that ranks hold. float8_recipe describes a recipe of your own,
 * float8_cast_counters tells what casts lose, float8_linear_info tells what a linear runs and why,
 * and float8_context_options.emulate runs everything without a GPU.
 *
 * CONVENTIONS
 *  1. Every function that can fail returns a float8_status; FLOAT8_OK is 0. float8_last_error()
 *     says in words what went wrong in the calling thread's latest failed call. Nothing throws.
 *  2. Handles are opaque. Each keeps what it needs of others alive, so they may be destroyed in any
 *     order. Destroying NULL does nothing. Do not destroy a handle while its work is on a stream.
 *  3. Every struct that a caller fills begins with struct_size, which the caller sets to sizeof.
 *     New fields go at the end and 0 is always their default, so programs built against an older
 *     header keep working. A struct_size that ends inside a field is refused.
 *  4. Device memory is the caller's: tensors, workspace, saved, copies in fp8, scale states. All of
 *     it is on the context's device and aligned to 16 bytes. Tensors are row-major; their rows are
 *     dense or a stride apart (ld_x and the like). float8 allocates none but for its kernels.
 *  5. Work is enqueued on the given stream. No function waits for it but those that save and load a
 *     scale state, and float8_comm_wait. Forward, backward, quantizers, float8_scales_sync and
 *     float8_gather_tensor do not allocate, lock or read files, and may be captured in a CUDA graph.
 *     Small tensors are cast by a cooperative launch, which starts when all of its blocks fit beside
 *     what runs on other streams.
 *  6. Handles may be used by several threads at once. A scale state belongs to one stream at a
 *     time. Calls that are in flight at the same time need workspaces of their own; linears and
 *     quantizers may share one workspace on one stream. Between calls a workspace is free for
 *     other work on the stream, except for its reserved bytes: the first
 *     float8_workspace_reserved_bytes() of it belong to float8, which counts launches there. What
 *     is in them before the first call does not matter. After it nobody else writes to them, unless
 *     to set all of them to 0 before the next call, which makes the workspace a new one. They may lie
 *     apart (launch_counts), in memory of which the same holds. An emulated device refuses a call
 *     that needs them after somebody else wrote to them.
 *  7. M may differ from call to call, up to m_max. An M of 0 is legal: nothing is read, and a
 *     weight gradient is set to zero.
 *  8. Results are the same bits from run to run on one machine.
 *  9. Memory that a call writes overlaps nothing else that the call reads or writes, else the call
 *     is refused. Columns of one buffer do not overlap. backward reads x only where its comment
 *     says so; where it does not, dx may take the place of x.
 * 10. A call that is refused (FLOAT8_INVALID_ARGUMENT) has enqueued nothing. After FLOAT8_CUDA the
 *     contents of what the call writes are undefined. Where float8_last_error() asks to restart the
 *     process, an earlier kernel, not always one of float8's, has broken the CUDA context for good.
 * 11. fork() waits up to 2 s until other threads have left their calls. Without a GPU float8 works in
 *     the child then. If one of them stays, every call of the child returns FLOAT8_ENVIRONMENT. CUDA
 *     itself works in no child.
 */
#ifndef FLOAT8_FLOAT8_H_
#define FLOAT8_FLOAT8_H_

#include "float8/base.h"
#include "float8/context.h"
#include "float8/counters.h"
#include "float8/distributed.h"
#include "float8/gemm.h"
#include "float8/linear.h"
#include "float8/linear_group.h"
#include "float8/model.h"
#include "float8/quantizer.h"
#include "float8/quantizer_list.h"
#include "float8/recipe.h"
#include "float8/scales.h"
#include "float8/tensor.h"
#include "float8/weights.h"

#endif /* FLOAT8_FLOAT8_H_ */
