// The kernels of the ops of torch.ops.float8, registered with PyTorch's stable ABI. They are
// functional: every tensor that they return is new, but for cast_weight, gemm_into and the calls
// of scales. python/float8/torch/ has their schemas, fake kernels and gradients.
//
//   quantize(x, config, operand, backward, scales?, layout, evaluate) -> (q, qt)
//     The copies of an operand in fp8 (a float8_operand), as bytes: q as it lies and qt transposed,
//     each with its scales; one that the recipe does not make is empty, as is qt where no `backward`
//     follows. Of an input of a linear that recomputes, qt is what FLOAT8_Q_FOR_RECOMPUTE leaves there.
//     An input has any rank; a weight is in x's type. Delayed scaling needs the linear's part of a
//     scale state, as linear_forward does; `evaluate` leaves its amaxes as they are.
//   quantize_again(x, x_qt, config, scales?, layout, behind?) -> qt
//     qt of an input for the backward of linears that recompute, by what quantize left in x_qt. They are
//     given it as their x_qt, and no x. No value of `behind` is read: a gradient there keeps graphs from
//     casting x in forward.
//   quantize_activation(x, up?, activation, config, backward, scales?, layout, evaluate) -> (q, qt)
//     The copies of the input activation(x), or activation(x) up, which is never in memory, as quantize
//     gives them. `activation` is a float8_activation.
//   quantize_activation_again(x, up?, activation, x_qt, config, scales?, layout, behind) -> qt
//     qt of that input for the backward of a linear that recomputes, as quantize_again gives it.
//   quantize_rms_norm(x, weight, rstd, config, backward, scales?, layout, evaluate) -> (q, qt)
//   quantize_rms_norm_again(x, weight, rstd, x_qt, config) -> qt
//     What quantize and quantize_again give for the input (x rstd) weight, rounded to x's type, which is
//     never in memory. `weight` [K] is in x's type, and rstd in float32, one for each row.
//   quantize_layer_norm(x, weight, bias?, mean, rstd, config, backward, scales?, layout, evaluate) -> (q, qt)
//   quantize_layer_norm_again(x, weight, bias?, mean, rstd, x_qt, config) -> qt
//     Likewise for the input ((x - mean) rstd) weight + bias, whose bias is like weight, and mean like rstd.
//   quantize_activation_backward(grad, x, activation, config, sums, scales?, layout) -> (q, qt, sums)
//     Likewise the copies of the gradient of x, where `grad` is the activation's. With `sums` those of its
//     columns in float32, added up as a linear's db, else none. `scales` is the part of the linear that
//     made x.
//   quantize_glu_backward(grad, gate, up, activation, config, sums, scales[], layout)
//     -> (gate_q, gate_qt, up_q, up_qt, sums)
//     Likewise the copies of the gradients of gate and up, where `grad` is the product's, and the sums [2 H] of
//     both. `scales` are the parts of the linears that made gate and up, or none.
//   quantize_merged_glu_backward(grad, gate_up, up_first, activation, config, sums, scales?, layout) -> (q, qt, sums)
//     Likewise the copies of the gradient of gate_up [..., 2 H], which has the H columns of gate and then those
//     of up, or with `up_first` the other way, each whole 128s, and sums as of quantize_activation_backward.
//     `scales` is the part of the linear that made it.
//   cast_weight(weight, q!, qt!, state!, like, config)
//     A weight's copies for an x of like's type, over those that quantize gave, where `state` says that
//     the weight or the type are others than in the call before. `state` is 64 bytes, zeros at first.
//   quantize_list(x[], config, operand, scales[], layout, dtypes, into!?[])
//     The copies of many tensors with delayed scaling, q and qt of each, in few launches. `dtypes`
//     has a float8_dtype for each, to which an x in float32 is rounded as it is read, or is empty.
//     If `into` has such copies, they are overwritten, and the result is empty.
//   quantize_amax(x, config, operand, rows_max) -> (amax, row_amax)
//     The maxima of a shard of up to rows_max rows, as int32 words: those whose maxima over ranks
//     quantize_shard takes, and those of the shard's own rows.
//   quantize_shard(x, amax, row_amax, config, operand, rows_max) -> (q, qt)
//     The shard's copies, with scales of the whole tensor.
//   quantize_activation_amax(x, up?, grad?, activation, config) -> (left, amax, row_amax)
//   quantize_activation_shard(x, up?, grad?, left, amax, row_amax, activation, config) -> (q, qt)[]
//     The same of what an activation makes of x, or of x and up, and with grad of its gradients, of which ranks
//     have other columns. `left` is for the second op, which gives what quantize_shard gives for the computed
//     tensors. With up and grad these are two, and the words of both follow each other; of one, `left` begins
//     with it, in x's type.
//   quantize_amax_list, quantize_shard_list
//     The same for the shards of many tensors in few launches. The words that are found follow each
//     other; a cast takes those of each shard as tensors of their own. Where rows_max cuts 128x128 blocks, each also has the rows of the whole (whole_rows) and the one of
//     them that the shard begins with (first_rows); the scales are those of the whole then. `dtypes`
//     and `into` are as in quantize_list. `copies` has a float8_copies for each, or is empty: the words
//     of a cast into one copy are those that amax_words says.
//   amax_words(rows_max, cols, config, operand, whole_rows, copies)
//     The sizes of amax and row_amax.
//   copy_layout(rows_max, rows, cols, config, operand, copies, over_ranks, whole_rows)
//     -> (q_pitch, q_scales, scales_in_qt, qt_pitch, qt_scales)
//     Where the copies and their inverse scales lie in q and qt (CopyLayout).
//   linear_forward(x, x_q?, x_qt?, weight, w_q?, w_qt?, bias?, scales?, config, layout, save,
//                  w_scales?, w_state?) -> (y, saved)
//     y = x weight^T + bias. x has any rank, weight is [N][K] and may be in another type than x,
//     which y has. Operands that are given as quantize made them are not cast again. `saved` is what
//     backward needs of those that are not, or empty where save is false. With delayed
//     scaling, `scales` names the linear in a scale state (scales.hpp) of that layout, whose
//     amaxes a call with `save` raises. It is not declared as written: nothing reads the amaxes but
//     scales_sync, and raising them twice changes nothing. With `w_state`, w_q and w_qt are kept over
//     calls, and are cast first where the weight changed, as by cast_weight. That is not declared
//     either: a backward whose forward came before the change reads the new copy.
//   linear_backward(dy, saved, x?, x_qt?, weight, w_qt?, scales?, config, layout, wanted, w_scales?,
//                   w_shards, dy_q?, dy_qt?) -> (dx, dw, db)
//     `wanted` has bit 0 for dx, 1 for dw, 2 for db; the others are empty. dx has dy's type, dw and
//     db have the weight's. x is read where the config says so. x_qt and w_qt are the forward's, or
//     x_qt is that of quantize_again, with no x. With dy_q and dy_qt, a cast of dy, only its shape is
//     looked at, and it may have no columns, so that nothing holds a tensor for its shape.
//   gemm_into(a, a_scales, b, b_scales, d!, bias?, contracted, config, gemm, accumulate,
//             sm_limit = 0)
//     d = a b^T + bias, or d += where `accumulate` is set: one of a linear's GEMMs
//     (float8_gemm_kind), which sums over `contracted` elements. a and b are bytes, a row of which
//     has a multiple of 128 and zeros behind its elements, with the inverse scales of float8_tensor.
//     It takes at most `sm_limit` SMs where that is not 0.
//   saved_bytes(m, n, k, config, x_given, w_given), quantized_bytes(rows, cols, config, operand,
//   backward, whole_rows)
//     The sizes of `saved`, and of q and qt, where M and the rows of an input are multiples of 512;
//     others have the size of the next multiple. With whole_rows, those of a shard's copies.
//   experts_layout(offs, m, config) -> layout
//     What the calls of expert linears of m rows read in place of the ends of the experts' rows (int32).
//     Bad ends are clamped, and the first of them is kept for routing_errors.
//   experts_cast(w, q!, qt!, amax?, row_amax?, config, dtype, second_w?, scales?, scale_layout)
//     Casts the weights [E][N][K] of all experts into q and qt with their inverse scales (experts_copies).
//     `dtype`: the float8_dtype that an fp32 w is rounded to; -1: w is cast as it is. With the maxima of
//     experts_amax, reduced over ranks that have other rows of each expert, q and qt are parts of the whole's.
//     With second_w they are of each expert's rows of both. With delayed scaling the scale is that of `scales`, a
//     part of a scale state, where the amax is recorded; in its first step that of the maxima.
//   experts_refresh(w, q!, qt!, state!, like, config, second_w?)
//     Casts w for rows of like's type into these copies where they are not of its bytes, as cast_weight.
//   experts_amax(w, config, dtype, second_w?) -> (amax, row_amax)
//     The maxima of each expert and its columns, which span ranks, and of rows; with delayed scaling that of all.
//   experts_copies(experts, n, k, config, over_ranks) -> (q bytes, qt bytes, q's pitch, q's scales, whether
//   these are in qt's buffer, qt's pitch, qt's scales)
//     q is [E][N], qt [E][K], rows a pitch apart; scales are where they begin, in bytes.
//   experts_forward(x, weight, layout, config, save, scales?, scale_layout, w_q?, w_scales?, x_amax?,
//                   x_row_amax?, w_amax?) -> (y, saved)
//     y_e = x_e weight_e^T of each expert e; x is [M][K], weight [E][N][K] in any type. Rows that belong
//     to no expert are 0 in y, and in dx. scales and scale_layout are those of linear_forward. With w_q,
//     [E][N] rows in whole 128s, and its inverse scales no element of the weight is read; the config
//     recomputes then. Where ranks have other columns of x, the maxima of the whole's groups [E] and rows [M]
//     are given, as int32 words, as far as the recipe's scales come from them. With delayed scaling x_amax and
//     w_amax are a word each, and are read in a first step.
//   experts_backward(dy, saved, layout, weight?, experts, n, k, grad_dtype, config, wanted, x?, scales?,
//                    scale_layout, w_qt?, w_scales?, dy_amax?, dy_row_amax?, w_amax?) -> (dx, dw)
//     `wanted` has bit 0 for dx and 1 for dw, which has the float8_dtype of the number. A config that
//     recomputes is given forward's weight, or its qt [E][K], where dx is wanted, and one whose grad_weight is in high
//     precision forward's x where dw is wanted.
//   experts_bytes(m, experts, n, k, config) -> (layout, saved)
//     The sizes of these buffers.
//   moe_forward(x, index?, w13, w2, layout, config, save, w13_q?, w13_scales?, w2_q?, w2_scales?, w3?,
//               w13_state?, w2_state?, scale_layout) -> (y, gate_up, of_w13, of_w2)
//     The SwiGLU MLP of experts, of rows x[index], or of those of x: y has their rows, 0 where they belong
//     to no expert. x is [T][D], w13 [E][2 F][D] and w2 [E][D][F]. With w3, both are [E][F][D], and
//     w13_q has the rows of both. w13_state and w2_state are parts of a scale state, as scales of
//     linear_forward. Behind y is what backward reads, gate and up [M][2 F] and what each linear saves; empty
//     without `save`.
//   moe_backward(x, dy?, index?, score?, w13?, w2?, read[], layout, experts, hidden, grad_dtype, config, part,
//                wanted, w13_qt?, w13_scales?, w2_qt?, w2_scales?, w3?, w13_state?, w2_state?, scale_layout)
//       -> (first, second)
//     A part of backward (float8_moe_call). The gradient of row r of y is score[r] dy[index[r]], or row r of dy.
//     `wanted` has bits 0 and 1 for the results, and bit 4 where w3 is apart. The parts, what they read of
//     forward and of parts before, and their results:
//       1  of_w2; dy, score, w2    the gradient of silu(gate) up [M][F], dw2
//       2  gate_up, that gradient  the fp8 copies of the gradients of gate and up, q and qt
//       3  of_w13, q, qt; w13      dx of the rows, nothing; qt is empty where it was not made
//       4  qt                      dw13, dw3
//     x and index are given to all of them, and the weights where a config recomputes.
//   moe_bytes(m, experts, hidden, dim, dtype, config) -> (of_w13, of_w2, q, qt)
//     Their sizes for x of a float8_dtype.
//   moe_route(ids, scores?, experts, config) -> (index, position, offsets, row_scores)
//     Sorts the pairs of ids [tokens][top_k] by expert, stably: the token of each row, the row of each pair,
//     and the end of each expert's rows; all are int32. The pairs of other ids have the last rows. With
//     scores (fp32) the score of each row, 0 of these last ones; else row_scores is empty.
//   moe_combine(y, scores?, position, offsets, config) -> out
//     The sum of each token's rows of y by their scores (fp32; none: 1), in fp32 and in order.
//   moe_score_gradient(dout, y, position, offsets, config) -> dscores
//     The fp32 gradient of these scores. Neither of them reads the last rows, whose pairs add nothing.
//   attention_forward(q, k, v, scale, causal, window, config, cu_seqlens_q?, cu_seqlens_k?, max_seqlen_q,
//       max_seqlen_k, recipe) -> (o, lse, saved)
//     softmax(scale q k^T) v under a float8_attention_recipe. q is [B, H, S, D], k and v are [B, G, T, D], all in bf16; a scale of 0 is
//     1 / sqrt(D), a window of 0 none. o is [B][S][H][D], lse [B][H][S], and `saved` has the copies in fp8; in bf16 it has none.
//     With offsets in int32, [sequences + 1], S and T are the tokens of packed sequences, and B is 1; bad ones are
//     replaced, and the first of them, or a longer sequence than max_seqlen, is kept for sequence_errors. `saved` ends with those that were taken, both.
//   attention_dequantize(saved, o, heads_kv, tokens_kv, scale, causal, window, config, sequences) -> (q, k, v)
//     The values that this forward multiplied, [B][S][H][D] and [B][T][G][D], k without its mean over T.
//     `sequences` of a pack; 0: it is none.
//   attention_backward(dout, o, lse, saved, heads_kv, tokens_kv, scale, causal, window, config, sequences, recipe, q?, k?,
//       v?, max_seqlen_q, max_seqlen_k) -> (dq, dk, dv)
//     The gradients of a forward of this recipe, [B][S][H][D] and [B][T][G][D]; dout is [B, H, S, D]. q, k and v are the
//     forward's, in bf16 alone.
//   rotary(q, k, cos, sin, dtype, inverse, tokens_first, q_in_memory, k_in_memory, config) -> (q, k)
//     x cos + rotate_half(x) sin of q [B, H, S, D] and k [B, G, S, D], or with tokens_first of [B, S, H, D] and [B, S, G, D],
//     in a float8_dtype, or with `inverse` the gradient of it; cos and sin are [B or 1, S, D]. The results are dense; the
//     last two say whether tokens come first in their memory.
//   rms_norm(x, weight, eps, weight_offset, rounding, dtype, with_rstd, config) -> (y, rstd)
//     The RMSNorm of a float8_norm_rounding over x's last dimension, in a float8_dtype; rstd is empty without with_rstd. Heads
//     and tokens of y lie in memory as those of x.
//   rms_norm_backward(dy, x, weight, rstd, weight_offset, rounding, with_dx, with_dweight, config) -> (dx, dweight)
//     The gradients of it; one that is not wanted is empty.
//   cudnn_version() -> version
//     That of the cuDNN which attention in bf16 runs by, as 91900; 0 where there is none.
//   sequence_errors() -> [device, code, index, ...]
//     The first bad offset on each device since the last call, for which the host waits: a
//     float8_sequence_error_code, and which it is. The device -1 is the emulated one.
//   routing_errors() -> [device, code, expert, ...]
//     The first bad end on each device since the last call, for which the host waits: a
//     float8_group_error_code, and whose end it is. The device -1 is the emulated one.
//   tune_on_first_use(milliseconds, database)
//     As in float8_context_options, for GPUs on which nothing was planned.
//   prepare(x, weight, n, k, m, config, apart)
//     Makes the plans of linears of these sizes for calls of up to M rows, whose x has x's type and
//     device, and whose weight has the weight's type; with `apart` of the casts of x too.
//   With an emulated config the tensors may be on a GPU (staging.hpp).
//   adamw(params!, grads!, exp_avgs!, exp_avg_sqs!, max_exp_avg_sqs!, steps, amax!, row_amax!, states!,
//         copies!, config[], dtypes, rows_max, scales, layout, options, maximize, lr?, grad_scale?, found_inf?)
//     A step of AdamW of weights, each dense and of the type of its other tensors. `options` are lr,
//     beta1, beta2, eps and weight_decay; lr and the last two are an element in fp32 on the device. What is
//     left has its maxima in amax, those of columns before the weight's, and in row_amax, where these are
//     words (0 at first) and not empty: those of quantize_amax for a cast in `dtypes` (float8_dtype).
//     A state, where it is not empty, gets the fingerprint of a weight's copies (cast_weight). Copies are q
//     and qt of each weight, which it is cast into where they are not empty and its cast needs no maxima
//     before; of a shard, rows_max is that of quantize_amax, else 0. Parts of a scale state are of all or none.
//     A weight of three dimensions is a matrix of each expert. Its maxima are those of experts_amax, of experts or of
//     their columns; its state is one of each expert, whose fingerprints add up to the weight's. It has no copies.
//   capture_id(x)
//     A number of the CUDA graph that x's current stream is captured into, 0 where it is not.
//   context(device), plans(device)
//     The float8_context and the float8_linear handles of a device, -1 for the emulated one, as
//     integers: the package calls the rest of the C ABI through ctypes.
//   scales_bytes(config, layout), scales_init(state), scales_set_first(state, linears[]),
//   scales_find_first(state), scales_sync(state, found_inf?)
//     The size of a scale state and its first contents, which an emulated config gives on the CPU;
//     the linears whose next step is the first one, as the caller says or as the state has them,
//     for which the host waits; and the end of a step, which is dropped where found_inf is not 0.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "python/shim/attention.hpp"
#include "python/shim/base/calls.hpp"
#include "python/shim/base/cuda.hpp"
#include "python/shim/casts/casts.hpp"
#include "python/shim/experts/experts.hpp"
#include "python/shim/experts/moe.hpp"
#include "python/shim/experts/weights.hpp"
#include "python/shim/linear/gemm.hpp"
#include "python/shim/linear/linear.hpp"
#include "python/shim/norm.hpp"
#include "python/shim/optimizer.hpp"
#include "python/shim/plans/plans.hpp"
#include "python/shim/rotary.hpp"
#include "python/shim/scales/scales.hpp"
#include "python/shim/staging.hpp"

namespace float8_torch {
namespace {

int64_t capture_id_op(const Tensor& x) {
  const Device device = device_of(x);
  return device.is_cuda() ? static_cast<int64_t>(capture_id(current_stream(device.index))) : 0;
}

int64_t context_op(int64_t device) {
  return reinterpret_cast<intptr_t>(context_of(static_cast<int32_t>(device)));
}

std::vector<int64_t> plans_op(int64_t device) {
  std::vector<int64_t> handles;
  for (const float8_linear* plan : all_plans(static_cast<int32_t>(device))) {
    handles.push_back(reinterpret_cast<intptr_t>(plan));
  }
  return handles;
}

// Adds an op that takes no tensors to stage.
template <auto kKernel>
void add(torch::stable::detail::StableLibrary& library, const char* name) {
  library.impl(name, TORCH_BOX((&InCall<kKernel>::call)));
}

template <auto kKernel, Roles kRoles>
void add(torch::stable::detail::StableLibrary& library, const char* name) {
  library.impl(name, TORCH_BOX((&InCall<&Staged<kKernel, kRoles>::call>::call)));
}

void add_kernels(torch::stable::detail::StableLibrary& library) {
  add<&quantize, Roles{.config = 1, .scales = 4}>(library, "quantize");
  add<&quantize_again, Roles{.config = 2, .scales = 3}>(library, "quantize_again");
  add<&quantize_activation, Roles{.config = 3, .scales = 5}>(library, "quantize_activation");
  add<&quantize_activation_again, Roles{.config = 4, .scales = 5}>(library,
                                                                   "quantize_activation_again");
  add<&quantize_rms_norm, Roles{.config = 3, .scales = 5}>(library, "quantize_rms_norm");
  add<&quantize_rms_norm_again, Roles{.config = 4}>(library, "quantize_rms_norm_again");
  add<&quantize_layer_norm, Roles{.config = 5, .scales = 7}>(library, "quantize_layer_norm");
  add<&quantize_layer_norm_again, Roles{.config = 6}>(library, "quantize_layer_norm_again");
  add<&quantize_activation_backward, Roles{.config = 3, .scales = 5}>(
      library, "quantize_activation_backward");
  add<&quantize_glu_backward, Roles{.config = 4, .scales = 6}>(library, "quantize_glu_backward");
  add<&quantize_merged_glu_backward, Roles{.config = 4, .scales = 6}>(
      library, "quantize_merged_glu_backward");
  add<&cast_weight, Roles{.config = 5, .written = 0b1110}>(library, "cast_weight");
  add<&quantize_amax, Roles{.config = 1}>(library, "quantize_amax");
  add<&quantize_shard, Roles{.config = 3}>(library, "quantize_shard");
  add<&quantize_activation_amax, Roles{.config = 4}>(library, "quantize_activation_amax");
  add<&quantize_activation_shard, Roles{.config = 7}>(library, "quantize_activation_shard");
  add<&quantize_list, Roles{.config = 1, .written = 1U << 6, .scales = 3}>(library,
                                                                           "quantize_list");
  add<&quantize_amax_list, Roles{.config = 1}>(library, "quantize_amax_list");
  add<&quantize_shard_list, Roles{.config = 3, .written = 1U << 9}>(library, "quantize_shard_list");
  add<&adamw, Roles{.config = 10, .written = 0b11'1101'1111, .scales = 13}>(library, "adamw");
  add<&gemm_into, Roles{.config = 7, .written = 0b10000}>(library, "gemm_into");
  // It writes kept copies of the weight, and their state.
  add<&linear_forward, Roles{.config = 8, .written = 1U << 4 | 1U << 5 | 1U << 12, .scales = 7}>(
      library, "linear_forward");
  add<&linear_backward, Roles{.config = 7, .scales = 6}>(library, "linear_backward");
  add<&reads_shards, Roles{.config = 2}>(library, "reads_shards");
  add<&experts_layout, Roles{.config = 2}>(library, "experts_layout");
  add<&experts_forward, Roles{.config = 3, .scales = 5}>(library, "experts_forward");
  add<&experts_backward, Roles{.config = 8, .scales = 11}>(library, "experts_backward");
  add<&experts_cast, Roles{.config = 5, .written = 0b110, .scales = 8}>(library, "experts_cast");
  add<&experts_refresh, Roles{.config = 5, .written = 0b1110}>(library, "experts_refresh");
  add<&experts_amax, Roles{.config = 1}>(library, "experts_amax");
  add<&moe_forward, Roles{.config = 5, .scales = 12, .more_scales = 13}>(library, "moe_forward");
  add<&moe_backward, Roles{.config = 11, .scales = 19, .more_scales = 20}>(library, "moe_backward");
  add<&moe_route, Roles{.config = 3}>(library, "moe_route");
  add<&moe_combine, Roles{.config = 4}>(library, "moe_combine");
  add<&moe_score_gradient, Roles{.config = 4}>(library, "moe_score_gradient");
  add<&attention_forward, Roles{.config = 6}>(library, "attention_forward");
  add<&attention_dequantize, Roles{.config = 7}>(library, "attention_dequantize");
  add<&attention_backward, Roles{.config = 9}>(library, "attention_backward");
  add<&rotary, Roles{.config = 9}>(library, "rotary");
  add<&rms_norm, Roles{.config = 7}>(library, "rms_norm");
  add<&rms_norm_backward, Roles{.config = 8}>(library, "rms_norm_backward");
  add<&prepare, Roles{.config = 5}>(library, "prepare");
  add<&scales_init, Roles{.config = 1, .scales = 0}>(library, "scales_init");
  add<&scales_sync, Roles{.config = 1, .scales = 0}>(library, "scales_sync");
  add<&scales_set_first>(library, "scales_set_first");
  add<&scales_find_first>(library, "scales_find_first");
  add<&capture_id_op>(library, "capture_id");
}

}  // namespace
}  // namespace float8_torch

STABLE_TORCH_LIBRARY_IMPL(float8, CPU, library) {
  float8_torch::add_kernels(library);
}

STABLE_TORCH_LIBRARY_IMPL(float8, CUDA, library) {
  float8_torch::add_kernels(library);
}

STABLE_TORCH_LIBRARY_IMPL(float8, CompositeExplicitAutograd, library) {
  float8_torch::add<&float8_torch::saved_bytes_op>(library, "saved_bytes");
  float8_torch::add<&float8_torch::quantized_bytes_op>(library, "quantized_bytes");
  float8_torch::add<&float8_torch::experts_bytes>(library, "experts_bytes");
  float8_torch::add<&float8_torch::experts_copies>(library, "experts_copies");
  float8_torch::add<&float8_torch::moe_bytes>(library, "moe_bytes");
  float8_torch::add<&float8_torch::routing_errors>(library, "routing_errors");
  float8_torch::add<&float8_torch::sequence_errors>(library, "sequence_errors");
  float8_torch::add<&float8_torch::cudnn_version>(library, "cudnn_version");
  float8_torch::add<&float8_torch::amax_words>(library, "amax_words");
  float8_torch::add<&float8_torch::tune_on_first_use>(library, "tune_on_first_use");
  float8_torch::add<&float8_torch::copy_layout_of>(library, "copy_layout");
  float8_torch::add<&float8_torch::scales_bytes>(library, "scales_bytes");
  float8_torch::add<&float8_torch::context_op>(library, "context");
  float8_torch::add<&float8_torch::plans_op>(library, "plans");
}
