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
//   quantize_again(x, x_qt, config) -> qt
//     qt of an input for the backward of linears that recompute, by what quantize left in x_qt. They are
//     given it as their x_qt, and no x.
//   quantize_swiglu(gate, up, config, backward, scales?, layout, evaluate) -> (q, qt)
//     The copies of the input silu(gate) up, which is never in memory, as quantize gives them: under
//     delayed scaling and block scales.
//   quantize_rms_norm(x, weight, rstd, config, backward, scales?, layout, evaluate) -> (q, qt)
//   quantize_rms_norm_again(x, weight, rstd, x_qt, config) -> qt
//     What quantize and quantize_again give for the input (x rstd) weight, rounded to x's type, which is
//     never in memory. `weight` [K] is in x's type, and rstd in float32, one for each row.
//   quantize_swiglu_backward(grad, gate, up, config, scales[], layout)
//     -> (gate_q, gate_qt, up_q, up_qt)
//     Likewise the copies of the gradients of gate and up, where `grad` is the product's. `scales` are
//     the parts of the linears that made gate and up, or none.
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
//     looked at.
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
//   experts_cast(w, q!, qt!, amax?, row_amax?, config, dtype)
//     Casts the weights [E][N][K] of all experts into q and qt with their inverse scales (experts_copies).
//     `dtype`: the float8_dtype that an fp32 w is rounded to; -1: w is cast as it is. With the maxima of
//     experts_amax, reduced over ranks that have other rows of each expert, q and qt are parts of the whole's.
//   experts_refresh(w, q!, qt!, state!, like, config)
//     Casts w for rows of like's type into these copies where they are not of its bytes, as cast_weight.
//   experts_amax(w, config, dtype) -> (amax, row_amax)
//     The maxima of each expert and its columns, which span ranks, and of rows.
//   experts_copies(experts, n, k, config, over_ranks) -> (q bytes, qt bytes, q's pitch, q's scales, whether
//   these are in qt's buffer, qt's pitch, qt's scales)
//     q is [E][N], qt [E][K], rows a pitch apart; scales are where they begin, in bytes.
//   experts_forward(x, weight, layout, config, save, scales?, scale_layout, w_q?, w_scales?) -> (y, saved)
//     y_e = x_e weight_e^T of each expert e; x is [M][K], weight [E][N][K] in any type. Rows that belong
//     to no expert are 0 in y, and in dx. scales and scale_layout are those of linear_forward. With w_q,
//     [E][N] rows in whole 128s, and its inverse scales no element of the weight is read; the config
//     recomputes then.
//   experts_backward(dy, saved, layout, weight?, experts, n, k, grad_dtype, config, wanted, x?, scales?,
//                    scale_layout, w_qt?, w_scales?) -> (dx, dw)
//     `wanted` has bit 0 for dx and 1 for dw, which has the float8_dtype of the number. A config that
//     recomputes is given forward's weight, or its qt [E][K], where dx is wanted, and one whose grad_weight is in high
//     precision forward's x where dw is wanted.
//   experts_bytes(m, experts, n, k, config) -> (layout, saved)
//     The sizes of these buffers.
//   moe_forward(x, index?, w13, w2, layout, config, save, w13_q?, w13_scales?, w2_q?, w2_scales?)
//   -> (y, saved)
//     The SwiGLU MLP of experts, of rows x[index], or of those of x: y has their rows, 0 where they belong
//     to no expert. x is [T][D], w13 [E][2 F][D] and w2 [E][D][F].
//   moe_backward(dy, x, index?, score?, w13?, w2?, saved, layout, experts, hidden, grad_dtype, config,
//                wanted, w13_qt?, w13_scales?, w2_qt?, w2_scales?) -> (dx, dw13, dw2)
//     The gradient of row r of y is score[r] dy[index[r]], or row r of dy. dx is that of the rows.
//     `wanted` has bits 0, 1 and 2 for the results. A config that recomputes is given both weights.
//   moe_bytes(m, experts, hidden, dim, dtype, config) -> saved
//     Its size for x of a float8_dtype.
//   moe_route(ids, scores?, experts, config) -> (index, position, offsets, row_scores)
//     Sorts the pairs of ids [tokens][top_k] by expert, stably: the token of each row, the row of each pair,
//     and the end of each expert's rows; all are int32. The pairs of other ids have the last rows. With
//     scores (fp32) the score of each row, 0 of these last ones; else row_scores is empty.
//   moe_combine(y, scores?, position, offsets, config) -> out
//     The sum of each token's rows of y by their scores (fp32; none: 1), in fp32 and in order.
//   moe_score_gradient(dout, y, position, offsets, config) -> dscores
//     The fp32 gradient of these scores. Neither of them reads the last rows, whose pairs add nothing.
//   routing_errors() -> [device, code, expert, ...]
//     The first bad end on each device since the last call, for which the host waits: a
//     float8_group_error_code, and whose end it is. The device -1 is the emulated one.
//   tune_on_first_use(milliseconds, database)
//     As in float8_context_options, for GPUs on which nothing was planned.
//   prepare(x, weight, n, k, m, config, apart)
//     Makes the plans of linears of these sizes for calls of up to M rows, whose x has x's type and
//     device, and whose weight has the weight's type; with `apart` of the casts of x too.
//   With an emulated config the tensors may be on a GPU (staging.hpp).
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
#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "python/shim/calls.hpp"
#include "python/shim/casts.hpp"
#include "python/shim/cuda.hpp"
#include "python/shim/errors.hpp"
#include "python/shim/expert_weights.hpp"
#include "python/shim/experts.hpp"
#include "python/shim/gemm.hpp"
#include "python/shim/moe.hpp"
#include "python/shim/plans.hpp"
#include "python/shim/scales.hpp"
#include "python/shim/staging.hpp"
#include "python/shim/tensors.hpp"
#include "python/shim/workspace.hpp"

namespace float8_torch {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 40;  // that prepare plans for

std::string shape_text(int64_t rows, int64_t cols) {
  return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

// A tensor like `of` in all dimensions but the last.
Tensor empty_rows(const Tensor& of, int64_t cols, int32_t dtype, Device device) {
  int64_t* sizes = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(of.get(), &sizes));
  std::vector<int64_t> wanted(sizes, sizes + of.dim());
  wanted.back() = cols;
  return empty(wanted, dtype, device);
}

// The type in which a plan gives dw and db: the weight's. A GEMM of operands in 16 bits as they are gives
// their type or f32, which backward then rounds.
float8_dtype grad_type(Config config, int32_t dtype, int32_t weight_dtype) {
  const float8_dtype weight = element_type(weight_dtype, "weight");
  if (dtype == weight_dtype || weight == FLOAT8_F32) return weight;
  const bool high_precision = config.recipe().grad_weight.a.scaling == FLOAT8_HIGH_PRECISION;
  return high_precision ? FLOAT8_F32 : weight;
}

// What forward and backward of a linear have in common.
struct LinearCall {
  Config config;
  Place place;
  int32_t dtype;  // of x, y and their gradients
  int32_t weight_dtype;
  int64_t n, k;

  LinearCall(const Tensor& rows, const Tensor& weight, int64_t config_bits)
      : config(config_bits),
        place(place_of(rows, config)),
        dtype(dtype_of(rows)),
        weight_dtype(dtype_of(weight)) {
    if (weight.dim() != 2) throw std::invalid_argument("float8: a weight has two dimensions");
    check_device(weight, "the weight");
    n = weight.size(0);
    k = weight.size(1);
  }

  [[nodiscard]] const Plan& plan(int64_t m, bool weight_shards = false) const {
    const PlanKey key{.config = config.bits(),
                      .m_max = kRows * row_blocks(m),
                      .n = n,
                      .k = k,
                      .device = place.key(),
                      .tensor_dtype = static_cast<int8_t>(element_type(dtype, "x")),
                      .grad_dtype = static_cast<int8_t>(grad_type(config, dtype, weight_dtype)),
                      .weight_shards = weight_shards};
    return plan_for(key, place);
  }

  void check_device(const Tensor& tensor, const char* name) const {
    if (device_of(tensor) != place.device) {
      throw std::invalid_argument(std::string("float8: ") + name +
                                  " is on another device than the rows that it meets");
    }
  }

  // The view of an operand that quantize cast; null where it is not given. `recast`: quantize_again did.
  [[nodiscard]] const float8_tensor* given(float8_operand operand, const std::optional<Tensor>& q,
                                           const std::optional<Tensor>& qt, int64_t rows,
                                           float8_tensor& view, bool recast = false) const {
    if (!q && !qt) return nullptr;
    QuantizerKey key = quantizer_key(operand, rows, qt.has_value());
    if (recast) key.copies = FLOAT8_QT_FOR_RECOMPUTE;
    const Quantizer& quantizer = quantizer_for(key, place);
    const void* const at_q = bytes_of(q, quantizer.q_bytes);
    const void* const at_qt = bytes_of(qt, quantizer.qt_bytes);
    view = {};
    view.struct_size = sizeof view;
    check(float8_quantizer_view(quantizer.quantizer, at_q, at_qt, rows, &view));
    return &view;
  }

  // Likewise of dy, whose elements nothing reads then.
  [[nodiscard]] const float8_tensor* given_grad(const std::optional<Tensor>& q,
                                                const std::optional<Tensor>& qt, int64_t rows,
                                                bool want_db, float8_tensor& view) const {
    if (!q || !qt || want_db) {
      throw std::invalid_argument(
          "float8: a dy in fp8 has q and qt, and gives no gradient of a bias");
    }
    return given(FLOAT8_GRAD_OUTPUT, q, qt, rows, view);
  }

  // The x that a backward reads.
  [[nodiscard]] Matrix input_of(const std::optional<Tensor>& x, int64_t rows) const {
    if (!x) throw std::invalid_argument("float8: this recipe's backward reads x");
    check_device(*x, "x");
    const Matrix inputs = as_matrix(to_dtype(*x, dtype));
    if (inputs.rows == rows && inputs.cols == k) return inputs;
    throw std::invalid_argument("float8: x is " + shape_text(inputs.rows, inputs.cols) +
                                ", and dy and the weight ask for " + shape_text(rows, k));
  }

  // The view of the weight's copy whose elements follow each other in `data`, in so many shards, and
  // whose inverse scales lie apart.
  [[nodiscard]] const float8_tensor* gathered(bool q, const Tensor& data, const Tensor& scales,
                                              int64_t shards, float8_tensor& view) const {
    check_dense(data, 1, place.device, "the weight in fp8");
    check_dense(scales, sizeof(float), place.device, "the weight's scales in fp8");
    if (data.numel() != n * k || shards < 1 || n % shards != 0) {
      throw std::invalid_argument("float8: a gathered copy of a weight " + shape_text(n, k) +
                                  " has " + std::to_string(data.numel()) + " bytes in " +
                                  std::to_string(shards) + " shards");
    }
    const Quantizer& quantizer = quantizer_for(quantizer_key(FLOAT8_WEIGHT, n, true), place);
    view = {};
    view.struct_size = sizeof view;
    const void* const at = data.mutable_data_ptr();
    check(float8_quantizer_view(quantizer.quantizer, at, at, n, &view));
    const auto* const inverse = static_cast<const float*>(scales.mutable_data_ptr());
    view.q = q ? at : nullptr;
    view.qt = q ? nullptr : at;
    (q ? view.q_inverse_scale : view.qt_inverse_scale) = inverse;
    const int32_t granularity = (q ? view.q_setting : view.qt_setting).granularity;
    const int64_t count = scale_count(granularity, q ? n : k, q ? k : n);
    if (scales.numel() < count || dtype_of(scales) != aoti_torch_dtype_float32()) {
      throw std::invalid_argument("float8: a gathered copy of a weight " + shape_text(n, k) +
                                  " has not its " + std::to_string(count) + " scales in float32");
    }
    view.ld_q = k;
    view.ld_qt = n / shards;
    view.qt_shards = shards;
    return &view;
  }

  [[nodiscard]] QuantizerKey quantizer_key(float8_operand operand, int64_t rows,
                                           bool backward) const {
    return cast_key(config, place, operand, rows, operand == FLOAT8_GRAD_OUTPUT ? n : k, dtype,
                    copies_of(config, operand, backward));
  }

  [[nodiscard]] const void* bytes_of(const std::optional<Tensor>& copy, size_t bytes) const {
    if (!copy || bytes == 0) return nullptr;
    check_dense(*copy, 1, place.device, "an operand in fp8");
    if (static_cast<size_t>(copy->numel()) < bytes) {
      throw std::invalid_argument("float8: an operand in fp8 has " + std::to_string(copy->numel()) +
                                  " bytes of " + std::to_string(bytes) +
                                  "; it was quantised with another shape or recipe");
    }
    return copy->mutable_data_ptr();
  }

  template <class Args>
  void set_scales(Args& args, float8_step& step, const Tensor& tensor, int64_t layout,
                  const Plan& plan) const {
    check_device(tensor, "the scale state");
    const Scales scales(tensor, layout, config, place);
    args.scales = scales.slots({.linear = plan.linear});
    step.first_step = scales.first_step();
  }
};

// `saved` of no rows: what is not proportional to M.
int64_t empty_saved_bytes(const LinearCall& call, bool x_given, bool w_given) {
  const auto of = [&](int64_t m) {
    return saved_bytes(m, call.n, call.k, call.config, x_given, w_given);
  };
  return 2 * of(kRows) - of(2 * kRows);
}

std::tuple<Tensor, Tensor> linear_forward(
    const Tensor& x, const std::optional<Tensor>& x_q, const std::optional<Tensor>& x_qt,
    const Tensor& weight, const std::optional<Tensor>& w_q, const std::optional<Tensor>& w_qt,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& scales, int64_t config,
    int64_t layout, bool save, const std::optional<Tensor>& w_scales,
    const std::optional<Tensor>& w_state) {
  const LinearCall call(x, weight, config);
  const Matrix rows = as_matrix(x);
  if (rows.cols != call.k) {
    throw std::invalid_argument("float8: x has rows of " + std::to_string(rows.cols) +
                                " elements, and the weight is " + shape_text(call.n, call.k));
  }
  if (bias.has_value() != call.config.bias()) {
    throw std::invalid_argument("float8: a bias is given, or missing, against the config");
  }
  Tensor y = empty_rows(x, call.n, call.dtype, call.place.device);
  const bool x_given = x_q || x_qt;
  const bool w_given = w_q || w_qt;
  if (rows.rows == 0) {
    return {y,
            empty_bytes(save ? empty_saved_bytes(call, x_given, w_given) : 0, call.place.device)};
  }
  const Plan& plan = call.plan(rows.rows);
  if ((w_state && (!w_q || !w_qt)) || (w_scales && !w_q)) {
    throw std::invalid_argument(
        "float8: a state or scales of a weight in fp8 are given without its copies");
  }
  if (w_state) {
    refresh_weight(weight, *w_q, *w_qt, *w_state, static_cast<int64_t>(call.config.bits()),
                   call.dtype);
  }
  const size_t saved_bytes = save ? plan.saved_bytes(x_given, w_given) : 0;
  Tensor saved = empty_bytes(static_cast<int64_t>(saved_bytes), call.place.device);
  float8_forward_args args;
  args.x = {rows.data, rows.stride};
  Matrix w;
  if (!w_q || w_q->numel() == 0) {
    w = as_matrix(to_dtype(weight, call.dtype));
    args.w.data = w.data;
    args.w.ld = w.stride;
  }
  args.y.data = y.mutable_data_ptr();
  args.m = rows.rows;
  Tensor typed_bias;
  if (bias) {
    call.check_device(*bias, "the bias");
    if (bias->dim() != 1 || bias->size(0) != call.n) {
      throw std::invalid_argument("float8: the bias has not the weight's " +
                                  std::to_string(call.n) + " rows");
    }
    check_memory(*bias, "the bias");
    typed_bias = to_dtype(*bias, call.dtype);
    if (!typed_bias.is_contiguous()) typed_bias = torch::stable::contiguous(typed_bias);
    args.bias = typed_bias.mutable_data_ptr();
  }
  if (saved_bytes > 0) {
    args.saved = {saved.mutable_data_ptr(), saved_bytes};
  }
  float8_tensor x_view, w_view;
  args.x.fp8 = call.given(FLOAT8_INPUT, x_q, x_qt, rows.rows, x_view);
  args.w.fp8 = w_scales ? call.gathered(true, *w_q, *w_scales, 1, w_view)
                        : call.given(FLOAT8_WEIGHT, w_q, w_qt, call.n, w_view);
  float8_step step{.evaluate = !save};
  args.step = &step;
  if (scales) call.set_scales(args, step, *scales, layout, plan);
  const Workspace workspace(call.place, plan.workspace_bytes);
  step.launch_counts.data = workspace.launch_counts();
  args.workspace.data = workspace.data();
  check(float8_linear_forward(plan.linear, &args, call.place.stream));
  return {y, saved};
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(
    const Tensor& dy, const Tensor& saved, const std::optional<Tensor>& x,
    const std::optional<Tensor>& x_qt, const Tensor& weight, const std::optional<Tensor>& w_qt,
    const std::optional<Tensor>& scales, int64_t config, int64_t layout, int64_t wanted,
    const std::optional<Tensor>& w_scales, int64_t w_shards, const std::optional<Tensor>& dy_q,
    const std::optional<Tensor>& dy_qt) {
  const LinearCall call(dy, weight, config);
  const Device device = call.place.device;
  const bool want_dx = (wanted & 1) != 0;
  const bool want_dw = (wanted & 2) != 0;
  const bool want_db = (wanted & 4) != 0;
  const Matrix rows = as_matrix(dy);
  if (rows.cols != call.n) {
    throw std::invalid_argument("float8: dy has rows of " + std::to_string(rows.cols) +
                                " elements, and the weight is " + shape_text(call.n, call.k));
  }
  const std::array<int64_t, 2> weight_size = {want_dw ? call.n : 0, want_dw ? call.k : 0};
  const int64_t bias_size = want_db ? call.n : 0;
  const bool in_f32 = grad_type(call.config, call.dtype, call.weight_dtype) == FLOAT8_F32;
  const int32_t grad_dtype = in_f32 ? aoti_torch_dtype_float32() : call.weight_dtype;
  const int64_t none = 0;
  Tensor dx = want_dx ? empty_rows(dy, call.k, call.dtype, device)
                      : empty(std::span(&none, 1), call.dtype, device);
  Tensor dw = empty(weight_size, grad_dtype, device);
  Tensor db = empty(std::span(&bias_size, 1), grad_dtype, device);
  if (rows.rows == 0) {
    torch::stable::zero_(dw);
    torch::stable::zero_(db);
    return {dx, to_dtype(dw, call.weight_dtype), to_dtype(db, call.weight_dtype)};
  }
  const Plan& plan = call.plan(rows.rows, w_shards > 1);
  if (plan.linear == nullptr) {
    throw std::invalid_argument("float8: the kernel of this linear's grad_input reads no shards");
  }
  float8_backward_args args;
  args.dy = {rows.data, rows.stride};
  args.m = rows.rows;
  if (want_dx) args.dx.data = dx.mutable_data_ptr();
  if (want_dw) args.dw.data = dw.mutable_data_ptr();
  if (want_db) args.db.data = db.mutable_data_ptr();
  if (w_scales && !w_qt) {
    throw std::invalid_argument("float8: scales of a weight in fp8 are given without its copy");
  }
  const size_t saved_bytes = plan.saved_bytes(x_qt.has_value(), w_qt.has_value());
  if (saved_bytes > 0) {
    check_dense(saved, 1, device, "what forward saved");
    args.saved = {saved.mutable_data_ptr(), static_cast<size_t>(saved.numel())};
  }
  float8_tensor x_view, w_view, dy_view;
  if (dy_q || dy_qt) {
    args.dy.data = nullptr;
    args.dy.fp8 = call.given_grad(dy_q, dy_qt, rows.rows, want_db, dy_view);
  }
  const bool recast = call.config.recompute() && !x;
  args.x.fp8 = call.given(FLOAT8_INPUT, {}, x_qt, rows.rows, x_view, recast);
  args.w.fp8 = w_scales ? call.gathered(false, *w_qt, *w_scales, w_shards, w_view)
                        : call.given(FLOAT8_WEIGHT, {}, w_qt, call.n, w_view);
  Matrix inputs, w;
  const bool casts_x = !x_qt || (call.config.recompute() ? !recast : x_qt->numel() == 0);
  if (call.config.reads_x() && want_dw && casts_x) {
    inputs = call.input_of(x, rows.rows);
    args.x.data = inputs.data;
    args.x.ld = inputs.stride;
  }
  if (call.config.reads_weight() && (!w_qt || w_qt->numel() == 0)) {
    w = as_matrix(to_dtype(weight, call.dtype));
    args.w.data = w.data;
    args.w.ld = w.stride;
  }
  float8_step step;
  args.step = &step;
  if (scales) call.set_scales(args, step, *scales, layout, plan);
  const Workspace workspace(call.place, plan.workspace_bytes);
  step.launch_counts.data = workspace.launch_counts();
  args.workspace.data = workspace.data();
  check(float8_linear_backward(plan.linear, &args, call.place.stream));
  return {dx, to_dtype(dw, call.weight_dtype), to_dtype(db, call.weight_dtype)};
}

bool reads_shards(const Tensor& dy, const Tensor& weight, int64_t config) {
  const LinearCall call(dy, weight, config);
  const int64_t rows = as_matrix(dy).rows;
  return rows > 0 && call.plan(rows, true).linear != nullptr;
}

int64_t saved_bytes_op(int64_t m, int64_t n, int64_t k, int64_t config, bool x_given,
                       bool w_given) {
  return saved_bytes(m, n, k, Config(config), x_given, w_given);
}

std::tuple<int64_t, int64_t> quantized_bytes_op(int64_t rows, int64_t cols, int64_t config,
                                                int64_t operand, bool backward,
                                                int64_t whole_rows) {
  const QuantizedBytes bytes =
      quantized_bytes(rows, cols, Config(config), operand, backward, whole_rows);
  return {bytes.q, bytes.qt};
}

void prepare(const Tensor& x, const Tensor& weight, std::vector<int64_t> n, std::vector<int64_t> k,
             int64_t m, int64_t config, bool apart) {
  if (n.size() != k.size() || m < 1 || m > kMostRows) {
    throw std::invalid_argument(
        "float8: prepare needs as many n as k, and from 1 to 2^40 rows; got " + std::to_string(m));
  }
  const Place place = place_of(x, Config(config));
  std::vector<PlanKey> keys;
  for (size_t i = 0; i < n.size(); ++i) {
    keys.push_back({.config = Config(config).bits(),
                    .m_max = kRows * row_blocks(m),
                    .n = n[i],
                    .k = k[i],
                    .device = place.key(),
                    .tensor_dtype = static_cast<int8_t>(element_type(dtype_of(x), "x")),
                    .grad_dtype = static_cast<int8_t>(
                        grad_type(Config(config), dtype_of(x), dtype_of(weight)))});
  }
  plan_all(keys, place);
  if (!apart) return;
  for (const int64_t cols : k) {
    for (const bool backward : {false, true}) {
      const float8_copies copies = copies_of(Config(config), FLOAT8_INPUT, backward);
      (void)quantizer_for(
          cast_key(Config(config), place, FLOAT8_INPUT, m, cols, dtype_of(x), copies), place);
    }
  }
}

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
  add<&quantize_again, Roles{.config = 2}>(library, "quantize_again");
  add<&quantize_swiglu, Roles{.config = 2, .scales = 4}>(library, "quantize_swiglu");
  add<&quantize_rms_norm, Roles{.config = 3, .scales = 5}>(library, "quantize_rms_norm");
  add<&quantize_rms_norm_again, Roles{.config = 4}>(library, "quantize_rms_norm_again");
  add<&quantize_swiglu_backward, Roles{.config = 3, .scales = 4}>(library,
                                                                  "quantize_swiglu_backward");
  add<&cast_weight, Roles{.config = 5, .written = 0b1110}>(library, "cast_weight");
  add<&quantize_amax, Roles{.config = 1}>(library, "quantize_amax");
  add<&quantize_shard, Roles{.config = 3}>(library, "quantize_shard");
  add<&quantize_list, Roles{.config = 1, .written = 1U << 6, .scales = 3}>(library,
                                                                           "quantize_list");
  add<&quantize_amax_list, Roles{.config = 1}>(library, "quantize_amax_list");
  add<&quantize_shard_list, Roles{.config = 3, .written = 1U << 9}>(library, "quantize_shard_list");
  add<&gemm_into, Roles{.config = 7, .written = 0b10000}>(library, "gemm_into");
  // It writes kept copies of the weight, and their state.
  add<&linear_forward, Roles{.config = 8, .written = 1U << 4 | 1U << 5 | 1U << 12, .scales = 7}>(
      library, "linear_forward");
  add<&linear_backward, Roles{.config = 7, .scales = 6}>(library, "linear_backward");
  add<&reads_shards, Roles{.config = 2}>(library, "reads_shards");
  add<&experts_layout, Roles{.config = 2}>(library, "experts_layout");
  add<&experts_forward, Roles{.config = 3, .scales = 5}>(library, "experts_forward");
  add<&experts_backward, Roles{.config = 8, .scales = 11}>(library, "experts_backward");
  add<&experts_cast, Roles{.config = 5, .written = 0b110}>(library, "experts_cast");
  add<&experts_refresh, Roles{.config = 5, .written = 0b1110}>(library, "experts_refresh");
  add<&experts_amax, Roles{.config = 1}>(library, "experts_amax");
  add<&moe_forward, Roles{.config = 5}>(library, "moe_forward");
  add<&moe_backward, Roles{.config = 11}>(library, "moe_backward");
  add<&moe_route, Roles{.config = 3}>(library, "moe_route");
  add<&moe_combine, Roles{.config = 4}>(library, "moe_combine");
  add<&moe_score_gradient, Roles{.config = 4}>(library, "moe_score_gradient");
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
  float8_torch::add<&float8_torch::amax_words>(library, "amax_words");
  float8_torch::add<&float8_torch::tune_on_first_use>(library, "tune_on_first_use");
  float8_torch::add<&float8_torch::copy_layout_of>(library, "copy_layout");
  float8_torch::add<&float8_torch::scales_bytes>(library, "scales_bytes");
  float8_torch::add<&float8_torch::context_op>(library, "context");
  float8_torch::add<&float8_torch::plans_op>(library, "plans");
}
