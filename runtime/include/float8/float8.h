/*
 * float8: fp8 linear layers for Hopper GPUs. This is the C interface, in C99; it is the library's
 * only binary interface.
 *
 * START HERE with float8/linear.h, which begins with a first program and needs nothing of the rest.
 * This header includes all:
 *
 *     linear.h          y = x w^T: plans, forward, backward
 *     context.h         a device, its options and its tuning table
 *     call.h            what calls have in common: matrices, results, buffers, a training step
 *     base.h            statuses and errors, element types, the version
 *     recipe.h          how operands are cast; recipes of your own
 *     tensor.h          tensors in fp8
 *     quantizer.h       casts apart from a linear: of weights, once for all micro-batches
 *     quantizer_list.h  casts of many tensors in few launches, and linears of one x, such as Q, K and V
 *     quantizer_source.h  what these cast: a tensor, or what an activation or a norm makes of it
 *     weights.h         whether weights changed, found on the device
 *     gemm.h            GEMMs of tensors in fp8
 *     scales.h          delayed scaling: a model's scale state, its checkpoint, steps that are skipped
 *     counters.h        what casts lose
 *     model.h           which layers of a model to convert, and their plans
 *     experts.h         linears of the experts of a mixture
 *     expert_quantizer.h  casts of experts' weights apart from these
 *     moe.h             the MLP of experts
 *     moe_route.h       which rows experts have, and the sums over each token's
 *     attention.h       attention in fp8 or in bf16
 *     rotary.h          rotary positions of queries and keys
 *     norm.h            RMSNorms
 *     optimizer.h       AdamW, with the maxima of the weights that it leaves
 *     distributed.h     several devices
 *
 * CONVENTIONS
 *  1. Every function that can fail returns a float8_status; FLOAT8_OK is 0. float8_last_error()
 *     says in words what went wrong in the calling thread's latest failed call. Nothing throws.
 *  2. Handles are opaque. Each keeps what it needs of others alive, so they may be destroyed in any
 *     order. Destroying NULL does nothing. Do not destroy a handle while its work is on a stream.
 *  3. Every struct that a caller fills begins with struct_size, which the caller sets to sizeof.
 *     New fields go at the end and 0 is always their default, so programs built against an older
 *     header keep working. A struct_size that ends inside a field is refused. The small structs
 *     inside of others, such as float8_matrix, have none and stay as they are.
 *  4. Device memory is the caller's: tensors, workspace, saved, copies in fp8, scale states. All of
 *     it is on the context's device and aligned to 16 bytes. Tensors are row-major; their rows are
 *     dense or a stride apart (ld). float8 allocates none but for its kernels.
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
 *     apart (float8_step.launch_counts), in memory of which the same holds. An emulated device refuses a call
 *     that needs them after somebody else wrote to them.
 *  7. M may differ from call to call, up to m_max. An M of 0 is legal: nothing is read, and a
 *     weight gradient is set to zero.
 *  8. Results are the same bits from run to run on one machine, but for gradients by cuDNN (attention.h), whose calls
 *     also allocate and lock on the host.
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

#include "float8/attention.h"
#include "float8/base.h"
#include "float8/context.h"
#include "float8/counters.h"
#include "float8/distributed.h"
#include "float8/expert_quantizer.h"
#include "float8/experts.h"
#include "float8/gemm.h"
#include "float8/linear.h"
#include "float8/model.h"
#include "float8/moe.h"
#include "float8/moe_route.h"
#include "float8/norm.h"
#include "float8/optimizer.h"
#include "float8/quantizer.h"
#include "float8/quantizer_list.h"
#include "float8/quantizer_source.h"
#include "float8/recipe.h"
#include "float8/rotary.h"
#include "float8/scales.h"
#include "float8/tensor.h"
#include "float8/weights.h"

#endif /* FLOAT8_FLOAT8_H_ */
