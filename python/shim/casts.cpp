#include "python/shim/casts.hpp"

#include <torch/csrc/stable/ops.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "python/shim/errors.hpp"
#include "python/shim/scales.hpp"
#include "python/shim/workspace.hpp"

namespace float8_torch {
namespace {

constexpr int64_t kOwnType = -1;

// Where a shard's rows are.
struct ShardRows {
  int64_t most = 0;   // rows of a shard; 0: the tensor is whole
  int64_t whole = 0;  // rows of the whole, where shards may cut its blocks
  int64_t first = 0;  // row of the whole, likewise
};

void check_copy(const Tensor& copy, size_t bytes, const Device& device, const char* name) {
  check_dense(copy, 1, device, name);
  if (static_cast<size_t>(copy.numel()) == bytes) return;
  throw std::invalid_argument(std::string("float8: ") + name + " has " +
                              std::to_string(copy.numel()) + " bytes; it needs " +
                              std::to_string(bytes) + ", as float8 makes it for this shape");
}

void run_quantizer(const Quantizer& quantizer, const Place& place, const Tensor& q,
                   const Tensor& qt, float8_quantize_args args) {
  const Workspace workspace(place, quantizer.workspace_bytes);
  const bool has_q = quantizer.q_bytes > 0;  // else qt is all of the tensor
  args.tensor.data = (has_q ? q : qt).mutable_data_ptr();
  args.transposed.data = has_q && quantizer.qt_bytes > 0 ? qt.mutable_data_ptr() : nullptr;
  float8_step step = args.step == nullptr ? float8_step{} : *args.step;
  step.launch_counts.data = workspace.launch_counts();
  args.step = &step;
  args.workspace.data = workspace.data();
  check(float8_quantize(quantizer.quantizer, &args, place.stream));
}

// The cast of an operand that an op names.
struct Cast {
  Place place;
  Matrix rows;
  QuantizerKey key;

  int64_t first_row;

  // `dtype`: a float8_dtype that an x in fp32 is rounded to; kOwnType: x is cast as it is.
  Cast(const Tensor& x, int64_t config_bits, int64_t operand, int64_t copies,
       const ShardRows& shard = {}, int64_t dtype = kOwnType)
      : place(place_of(x, Config(config_bits))), rows(as_matrix(x)), first_row(shard.first) {
    key = cast_key(Config(config_bits), place, operand_of(operand), rows.rows, rows.cols,
                   dtype_of(x), copies);
    if (dtype != kOwnType) round_to(dtype);
    if (shard.most == 0) return;
    key.over_ranks = true;
    key.rows_max = shard.most;
    key.whole_rows = shard.whole;
  }

  void round_to(int64_t dtype) {
    if (dtype == key.dtype) return;
    if (key.dtype != FLOAT8_F32 || (dtype != FLOAT8_BF16 && dtype != FLOAT8_F16)) {
      throw std::invalid_argument(
          "float8: an x in float32 alone is rounded, to the dtype 0 (bfloat16) "
          "or 2 (float16); got the dtype " +
          std::to_string(dtype) + "; cast x to it first");
    }
    key.dtype = static_cast<int8_t>(dtype);
    key.f32_source = true;
  }

  [[nodiscard]] float8_quantize_args args() const {
    float8_quantize_args args;
    args.x.data = rows.data;
    args.x.ld = rows.stride;
    args.rows = rows.rows;
    args.first_row = first_row;
    return args;
  }

  // The slots of a scale state are those of any linear of the recipe. A step is the first one where it
  // is of one of the states.
  void set_scales(float8_scale_slots& slots, float8_step& step, const Tensor& state, int64_t layout,
                  bool evaluate) const {
    if (device_of(state) != place.device) {
      throw std::invalid_argument("float8: the scale state is on another device than x");
    }
    const Config config(key.config);
    const Scales scales(state, layout, config, place);
    AnyPlan plan = any_plan(key.config, key.device);
    if (!plan.is_there()) {
      const PlanKey any{.config = key.config,
                        .m_max = kRows,
                        .n = rows.cols,
                        .k = rows.cols,
                        .device = key.device,
                        .tensor_dtype = key.dtype,
                        .grad_dtype = key.dtype};
      plan.linear = plan_for(any, place).linear;
    }
    slots = scales.slots(plan);
    if (scales.first_step()) step.first_step = 1;
    step.evaluate = evaluate;
  }
};

// The casts of many tensors of one device.
struct CastList {
  std::vector<Cast> casts;
  std::vector<const Quantizer*> quantizers;
  std::vector<float8_quantize_args> args;
  float8_step step;

  // `dtypes`: what each x is rounded to; empty: x is cast as it is.
  void add(const std::vector<Tensor>& x, size_t i, int64_t config, int64_t operand,
           const std::vector<int64_t>& dtypes, const ShardRows& shard = {},
           int64_t copies = FLOAT8_BOTH_COPIES) {
    if (!dtypes.empty() && dtypes.size() != x.size()) {
      throw std::invalid_argument("float8: a list has a dtype for each tensor, or none");
    }
    const Cast& cast = casts.emplace_back(x[i], config, operand, copies, shard,
                                          dtypes.empty() ? kOwnType : dtypes[i]);
    if (cast.place.key() != place().key()) {
      throw std::invalid_argument("float8: the tensors of a list are on different devices");
    }
    quantizers.push_back(&quantizer_for(cast.key, cast.place));
    args.push_back(cast.args());
  }

  [[nodiscard]] const Place& place() const { return casts.front().place; }

  // The args of a call, which are good until this list changes.
  [[nodiscard]] float8_quantize_list_args list_args() const {
    float8_quantize_list_args all;
    all.tensors = args.data();
    all.count = args.size();
    all.step = &step;
    return all;
  }

  // All tensors of a list are in a first step, or none is.
  void set_scales(size_t i, const Tensor& state, int64_t layout) {
    float8_step of_tensor;
    casts[i].set_scales(args[i].scales, of_tensor, state, layout, false);
    if (i > 0 && of_tensor.first_step != step.first_step) {
      throw std::invalid_argument(
          "float8: some scale states of a list are in their first step, and some are not; cast "
          "them "
          "in two lists");
    }
    step = of_tensor;
  }

  // Casts into copies that are given, else into new ones, which are the result.
  std::vector<Tensor> run(const std::optional<std::vector<Tensor>>& into) {
    if (into && into->size() != 2 * args.size()) {
      throw std::invalid_argument(
          "float8: a list casts into q and qt of each tensor, or into none");
    }
    std::vector<Tensor> made;
    for (size_t i = 0; i < args.size(); ++i) {
      const Quantizer& quantizer = *quantizers[i];
      for (const auto& [at, bytes] :
           {std::pair{2 * i, quantizer.q_bytes}, {2 * i + 1, quantizer.qt_bytes}}) {
        if (!into) {
          made.push_back(empty_bytes(static_cast<int64_t>(bytes), place().device));
        } else {
          check_copy((*into)[at], bytes, place().device, "a copy in fp8");
        }
      }
      const std::vector<Tensor>& copies = into ? *into : made;
      const bool has_q = quantizer.q_bytes > 0;  // else qt is all of the tensor
      args[i].tensor.data = copies[2 * i + (has_q ? 0 : 1)].mutable_data_ptr();
      if (has_q && quantizer.qt_bytes > 0) {
        args[i].transposed.data = copies[2 * i + 1].mutable_data_ptr();
      }
    }
    const QuantizerList& list = quantizer_list_for(quantizers, place());
    const Workspace workspace(place(), list.workspace_bytes, Counts::kInFront);
    float8_quantize_list_args all = list_args();
    all.workspace.data = workspace.data();
    check(float8_quantize_list(list.list, &all, place().stream));
    return made;
  }
};

// The casts of the shards of many tensors.
struct ShardList : CastList {
  int64_t amax_words = 0;
  int64_t row_amax_words = 0;

  ShardList(const std::vector<Tensor>& x, const std::vector<int64_t>& config, int64_t operand,
            const std::vector<int64_t>& rows_max, const std::vector<int64_t>& whole_rows,
            const std::vector<int64_t>& first_rows, const std::vector<int64_t>& dtypes,
            const std::vector<int64_t>& copies = {}) {
    if (x.empty() || config.size() != x.size() || rows_max.size() != x.size()) {
      throw std::invalid_argument(
          "float8: a list of shards has at least one, each with a config and the most rows");
    }
    if (whole_rows.size() != first_rows.size() ||
        (!whole_rows.empty() && whole_rows.size() != x.size())) {
      throw std::invalid_argument(
          "float8: a list of shards has the rows of each whole and each first row, or none");
    }
    if (!copies.empty() && copies.size() != x.size()) {
      throw std::invalid_argument("float8: a list of shards has the copies of each, or none");
    }
    for (size_t i = 0; i < x.size(); ++i) {
      if (rows_max[i] < 1) throw std::invalid_argument("float8: a shard has at least one row");
      ShardRows shard{.most = rows_max[i]};
      if (!whole_rows.empty()) {
        shard.whole = whole_rows[i];
        shard.first = first_rows[i];
      }
      add(x, i, config[i], operand, dtypes, shard,
          copies.empty() ? int64_t{FLOAT8_BOTH_COPIES} : copies[i]);
      amax_words += quantizers.back()->amax_words;
      row_amax_words += quantizers.back()->row_amax_words;
    }
  }

  // The words of all shards follow each other.
  void set_words(const Tensor& amax, const Tensor& row_amax) {
    auto* at = static_cast<uint32_t*>(amax.mutable_data_ptr());
    auto* row_at = static_cast<uint32_t*>(row_amax.mutable_data_ptr());
    for (size_t i = 0; i < args.size(); ++i) {
      const Quantizer& quantizer = *quantizers[i];
      if (quantizer.amax_words > 0) args[i].amax = at;
      if (quantizer.row_amax_words > 0) args[i].row_amax = row_at;
      at += quantizer.amax_words;
      row_at += quantizer.row_amax_words;
    }
  }
};

void check_words(const Tensor& words, int64_t count, const Device& device) {
  check_dense(words, sizeof(uint32_t), device, "maxima of a shard");
  if (words.numel() == count && dtype_of(words) == aoti_torch_dtype_int32()) return;
  throw std::invalid_argument("float8: maxima of a shard are not the " + std::to_string(count) +
                              " words that quantize_amax gives");
}

Tensor empty_words(int64_t count, const Device& device) {
  return empty(std::span(&count, 1), aoti_torch_dtype_int32(), device);
}

uint32_t* words_of(const Tensor& words, int64_t count) {
  return count == 0 ? nullptr : static_cast<uint32_t*>(words.mutable_data_ptr());
}

QuantizerKey key_of_shards(int64_t rows_max, int64_t cols, int64_t config, int64_t operand,
                           int64_t whole_rows, int64_t copies) {
  return {.config = Config(config).of_casts(),
          .rows_max = rows_max,
          .cols = cols,
          .device = -1,
          .operand = static_cast<int8_t>(operand_of(operand)),
          .copies = checked_copies(copies),
          .over_ranks = true,
          .whole_rows = whole_rows};
}

}  // namespace

QuantizerKey cast_key(Config config, const Place& place, float8_operand operand, int64_t rows,
                      int64_t cols, int32_t dtype, int64_t copies) {
  return {.config = config.of_casts(),
          .rows_max = operand == FLOAT8_WEIGHT ? rows : kRows * row_blocks(rows),
          .cols = cols,
          .device = place.key(),
          .operand = static_cast<int8_t>(operand),
          .dtype = static_cast<int8_t>(element_type(dtype, "x")),
          .copies = checked_copies(copies)};
}

// The bytes of copies of 0 rows. Each block of rows adds as many bytes as the one before, so a tensor
// without rows has as much less than one block as one block has less than two.
static QuantizedBytes bytes_without_rows(int64_t cols, Config config, int64_t operand,
                                         bool backward) {
  const QuantizedBytes one = quantized_bytes(kRows, cols, config, operand, backward);
  const QuantizedBytes two = quantized_bytes(2 * kRows, cols, config, operand, backward);
  return {2 * one.q - two.q, 2 * one.qt - two.qt};
}

// A call casts silu(x) up, what an RMSNorm makes of x, or x itself.
struct ComputedOf {
  int8_t source = FLOAT8_PLAIN;
  Matrix up{};
  const void* weight = nullptr;
  const float* rstd = nullptr;

  void set(float8_quantize_args& args) const {
    args.up.data = up.data;
    args.up.ld = up.stride;
    args.norm_weight = weight;
    args.rstd = rstd;
  }
};

static std::tuple<Tensor, Tensor> quantize_one(const Tensor& x, const ComputedOf& of,
                                               int64_t config, int64_t operand, bool backward,
                                               const std::optional<Tensor>& scales, int64_t layout,
                                               bool evaluate) {
  Cast cast(x, config, operand, copies_of(Config(config), operand_of(operand), backward));
  const Device device = cast.place.device;
  if (cast.rows.rows == 0) {
    const QuantizedBytes none =
        bytes_without_rows(cast.rows.cols, Config(config), operand, backward);
    return {empty_bytes(none.q, device), empty_bytes(none.qt, device)};
  }
  cast.key.source = of.source;
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  Tensor q = empty_bytes(static_cast<int64_t>(quantizer.q_bytes), device);
  Tensor qt = empty_bytes(static_cast<int64_t>(quantizer.qt_bytes), device);
  float8_quantize_args args = cast.args();
  of.set(args);
  float8_step step;
  args.step = &step;
  if (scales) cast.set_scales(args.scales, step, *scales, layout, evaluate);
  run_quantizer(quantizer, cast.place, q, qt, args);
  return {q, qt};
}

std::tuple<Tensor, Tensor> quantize(const Tensor& x, int64_t config, int64_t operand, bool backward,
                                    const std::optional<Tensor>& scales, int64_t layout,
                                    bool evaluate) {
  return quantize_one(x, {}, config, operand, backward, scales, layout, evaluate);
}

static Tensor quantize_one_again(const Tensor& x, const ComputedOf& of, const Tensor& x_qt,
                                 int64_t config) {
  if (!Config(config).recompute()) {
    throw std::invalid_argument(
        "float8: quantize_again is for linears that recompute, whose config says so");
  }
  Cast cast(x, config, FLOAT8_INPUT, FLOAT8_QT_FOR_RECOMPUTE);
  if (cast.rows.rows == 0) {
    const Config casts(Config(config).of_casts());
    return empty_bytes(bytes_without_rows(cast.rows.cols, casts, FLOAT8_INPUT, true).qt,
                       cast.place.device);
  }
  cast.key.source = of.source;
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  QuantizerKey key = cast.key;
  key.copies = FLOAT8_Q_FOR_RECOMPUTE;
  const Quantizer& before = quantizer_for(key, cast.place);
  check_copy(x_qt, before.qt_bytes, cast.place.device, "what quantize left of x");
  Tensor qt = empty_bytes(static_cast<int64_t>(quantizer.qt_bytes), cast.place.device);
  float8_quantize_args args = cast.args();
  of.set(args);
  float8_tensor view{};
  view.struct_size = sizeof view;
  if (before.qt_bytes > 0) {
    check(float8_quantizer_view(before.quantizer, nullptr, x_qt.mutable_data_ptr(), cast.rows.rows,
                                &view));
    args.x.fp8 = &view;
  }
  run_quantizer(quantizer, cast.place, qt, qt, args);
  return qt;
}

Tensor quantize_again(const Tensor& x, const Tensor& x_qt, int64_t config) {
  return quantize_one_again(x, {}, x_qt, config);
}

// Checks what an RMSNorm multiplies x by.
static ComputedOf norm_of(const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  const Matrix rows = as_matrix(x);
  const Device device = device_of(x);
  check_dense(weight, aoti_torch_dtype_element_size(dtype_of(x)), device,
              "the weight of an RMSNorm");
  check_dense(rstd, sizeof(float), device, "rstd of an RMSNorm");
  if (weight.numel() != rows.cols || dtype_of(weight) != dtype_of(x) || rstd.numel() != rows.rows ||
      dtype_of(rstd) != aoti_torch_dtype_float32()) {
    throw std::invalid_argument(
        "float8: an RMSNorm of x [..., K] has a weight [K] of x's type, and rstd in float32 for "
        "each "
        "row");
  }
  return {.source = FLOAT8_RMS_NORM,
          .weight = weight.data_ptr(),
          .rstd = static_cast<const float*>(rstd.data_ptr())};
}

std::tuple<Tensor, Tensor> quantize_rms_norm(const Tensor& x, const Tensor& weight,
                                             const Tensor& rstd, int64_t config, bool backward,
                                             const std::optional<Tensor>& scales, int64_t layout,
                                             bool evaluate) {
  return quantize_one(x, norm_of(x, weight, rstd), config, FLOAT8_INPUT, backward, scales, layout,
                      evaluate);
}

Tensor quantize_rms_norm_again(const Tensor& x, const Tensor& weight, const Tensor& rstd,
                               const Tensor& x_qt, int64_t config) {
  return quantize_one_again(x, norm_of(x, weight, rstd), x_qt, config);
}

static void check_alike(const Tensor& gate, const Tensor& other, const char* names) {
  const Matrix one = as_matrix(gate);
  const Matrix two = as_matrix(other);
  if (one.rows != two.rows || one.cols != two.cols || dtype_of(gate) != dtype_of(other) ||
      device_of(gate) != device_of(other)) {
    throw std::invalid_argument(std::string("float8: ") + names +
                                " have one shape, one type and one device");
  }
}

std::tuple<Tensor, Tensor> quantize_swiglu(const Tensor& gate, const Tensor& up, int64_t config,
                                           bool backward, const std::optional<Tensor>& scales,
                                           int64_t layout, bool evaluate) {
  check_alike(gate, up, "gate and up of quantize_swiglu");
  const ComputedOf product{.source = FLOAT8_SWIGLU, .up = as_matrix(up)};
  return quantize_one(gate, product, config, FLOAT8_INPUT, backward, scales, layout, evaluate);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_swiglu_backward(
    const Tensor& grad, const Tensor& gate, const Tensor& up, int64_t config,
    std::vector<Tensor> scales, int64_t layout) {
  constexpr const char* kNames = "grad, gate and up of quantize_swiglu_backward";
  check_alike(gate, up, kNames);
  check_alike(gate, grad, kNames);
  if (!scales.empty() && scales.size() != 2) {
    throw std::invalid_argument(
        "float8: quantize_swiglu_backward takes the parts of a scale state of two linears, or "
        "none");
  }
  Cast cast(gate, config, FLOAT8_GRAD_OUTPUT, FLOAT8_BOTH_COPIES);
  cast.key.source = FLOAT8_SWIGLU_BACKWARD;
  const Device device = cast.place.device;
  if (cast.rows.rows == 0) {
    const QuantizedBytes none =
        bytes_without_rows(cast.rows.cols, Config(config), FLOAT8_GRAD_OUTPUT, true);
    return {empty_bytes(none.q, device), empty_bytes(none.qt, device), empty_bytes(none.q, device),
            empty_bytes(none.qt, device)};
  }
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  const auto copy = [&](size_t bytes) { return empty_bytes(static_cast<int64_t>(bytes), device); };
  Tensor gate_q = copy(quantizer.q_bytes), gate_qt = copy(quantizer.qt_bytes);
  Tensor up_q = copy(quantizer.q_bytes), up_qt = copy(quantizer.qt_bytes);
  if (quantizer.q_bytes == 0 || quantizer.qt_bytes == 0) {
    throw std::invalid_argument(
        "float8: quantize_swiglu_backward is for a recipe whose grad_input and grad_weight read "
        "fp8");
  }
  const Matrix of_up = as_matrix(up);
  const Matrix of_grad = as_matrix(grad);
  float8_quantize_args args = cast.args();
  args.up = {of_up.data, of_up.stride};
  args.grad = {of_grad.data, of_grad.stride};
  args.up_tensor.data = up_q.mutable_data_ptr();
  args.up_transposed.data = up_qt.mutable_data_ptr();
  float8_step step;
  args.step = &step;
  if (!scales.empty()) {
    cast.set_scales(args.scales, step, scales[0], layout, false);
    cast.set_scales(args.up_scales, step, scales[1], layout, false);
  }
  run_quantizer(quantizer, cast.place, gate_q, gate_qt, args);
  return {gate_q, gate_qt, up_q, up_qt};
}

uint32_t* compare_weight(float8_context* context, const Matrix& weight, float8_dtype own,
                         int32_t wanted, const Tensor& state, const Place& place) {
  auto* const kept = static_cast<uint8_t*>(state.mutable_data_ptr());
  float8_fingerprint_args compare;
  compare.w = {weight.data, weight.stride};
  compare.n = weight.rows;
  compare.k = weight.cols;
  compare.dtype = own;
  compare.seed = static_cast<uint64_t>(wanted) << 8 | static_cast<uint64_t>(own);
  compare.fingerprint = kept;
  compare.noop_flag = reinterpret_cast<uint32_t*>(kept + FLOAT8_FINGERPRINT_BYTES);
  check(float8_weights_compare(context, &compare, 1, place.stream));
  return compare.noop_flag;
}

void forget_weight(const Tensor& state) {
  Tensor all = state;
  torch::stable::zero_(all);
}

void refresh_weight(const Tensor& weight, const Tensor& q, const Tensor& qt, const Tensor& state,
                    int64_t config, int32_t dtype) {
  const Place place = place_of(weight, Config(config));
  const Matrix rows = as_matrix(weight);
  const float8_dtype own = element_type(dtype_of(weight), "the weight");
  QuantizerKey key = cast_key(Config(config), place, FLOAT8_WEIGHT, rows.rows, rows.cols, dtype,
                              FLOAT8_BOTH_COPIES);
  key.noop_flag = true;
  key.f32_source = own == FLOAT8_F32 && key.dtype != FLOAT8_F32;
  const Quantizer& quantizer = quantizer_for(key, place);
  for (const auto& [kept, bytes] : {std::pair{&q, quantizer.q_bytes},
                                    {&qt, quantizer.qt_bytes},
                                    {&state, size_t{kWeightStateBytes}}}) {
    check_copy(*kept, bytes, place.device, "a kept copy of a weight, or its state,");
  }
  compare_and_cast(quantizer.context, rows, own, key.dtype, state, place, [&](uint32_t* flag) {
    const Tensor typed = key.f32_source ? weight : to_dtype(weight, dtype);
    const Matrix source = as_matrix(typed);
    float8_quantize_args args;
    args.x.data = source.data;
    args.x.ld = source.stride;
    args.rows = source.rows;
    args.noop_flag = flag;
    run_quantizer(quantizer, place, q, qt, args);
  });
}

void cast_weight(const Tensor& weight, const Tensor& q, const Tensor& qt, const Tensor& state,
                 const Tensor& like, int64_t config) {
  refresh_weight(weight, q, qt, state, config, dtype_of(like));
}

std::tuple<Tensor, Tensor> quantize_amax(const Tensor& x, int64_t config, int64_t operand,
                                         int64_t rows_max) {
  const Cast cast(x, config, operand, FLOAT8_BOTH_COPIES, {.most = rows_max});
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  Tensor amax = empty_words(quantizer.amax_words, cast.place.device);
  Tensor row_amax = empty_words(quantizer.row_amax_words, cast.place.device);
  float8_quantize_args args = cast.args();
  args.amax = words_of(amax, quantizer.amax_words);
  args.row_amax = words_of(row_amax, quantizer.row_amax_words);
  check(float8_quantize_amax(quantizer.quantizer, &args, cast.place.stream));
  return {amax, row_amax};
}

std::tuple<Tensor, Tensor> quantize_shard(const Tensor& x, const Tensor& amax,
                                          const Tensor& row_amax, int64_t config, int64_t operand,
                                          int64_t rows_max) {
  const Cast cast(x, config, operand, FLOAT8_BOTH_COPIES, {.most = rows_max});
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  check_words(amax, quantizer.amax_words, cast.place.device);
  check_words(row_amax, quantizer.row_amax_words, cast.place.device);
  Tensor q = empty_bytes(static_cast<int64_t>(quantizer.q_bytes), cast.place.device);
  Tensor qt = empty_bytes(static_cast<int64_t>(quantizer.qt_bytes), cast.place.device);
  float8_quantize_args args = cast.args();
  args.amax = words_of(amax, quantizer.amax_words);
  args.row_amax = words_of(row_amax, quantizer.row_amax_words);
  run_quantizer(quantizer, cast.place, q, qt, args);
  return {q, qt};
}

std::tuple<Tensor, Tensor> quantize_amax_list(std::vector<Tensor> x, std::vector<int64_t> config,
                                              int64_t operand, std::vector<int64_t> rows_max,
                                              std::vector<int64_t> whole_rows,
                                              std::vector<int64_t> first_rows,
                                              std::vector<int64_t> dtypes) {
  ShardList shards(x, config, operand, rows_max, whole_rows, first_rows, dtypes);
  Tensor amax = empty_words(shards.amax_words, shards.place().device);
  Tensor row_amax = empty_words(shards.row_amax_words, shards.place().device);
  shards.set_words(amax, row_amax);
  const QuantizerList& list = quantizer_list_for(shards.quantizers, shards.place());
  const float8_quantize_list_args all = shards.list_args();
  check(float8_quantize_list_amax(list.list, &all, shards.place().stream));
  return {amax, row_amax};
}

std::vector<Tensor> quantize_shard_list(
    std::vector<Tensor> x, std::vector<Tensor> amax, std::vector<Tensor> row_amax,
    std::vector<int64_t> config, int64_t operand, std::vector<int64_t> rows_max,
    std::vector<int64_t> whole_rows, std::vector<int64_t> first_rows, std::vector<int64_t> dtypes,
    std::optional<std::vector<Tensor>> into, std::vector<int64_t> copies) {
  ShardList shards(x, config, operand, rows_max, whole_rows, first_rows, dtypes, copies);
  if (amax.size() != x.size() || row_amax.size() != x.size()) {
    throw std::invalid_argument("float8: a list of shards has the words of the maxima of each");
  }
  const Device device = shards.place().device;
  for (size_t i = 0; i < x.size(); ++i) {
    const Quantizer& quantizer = *shards.quantizers[i];
    check_words(amax[i], quantizer.amax_words, device);
    check_words(row_amax[i], quantizer.row_amax_words, device);
    shards.args[i].amax = words_of(amax[i], quantizer.amax_words);
    shards.args[i].row_amax = words_of(row_amax[i], quantizer.row_amax_words);
  }
  return shards.run(into);
}

std::vector<Tensor> quantize_list(std::vector<Tensor> x, int64_t config, int64_t operand,
                                  std::vector<Tensor> scales, int64_t layout,
                                  std::vector<int64_t> dtypes,
                                  std::optional<std::vector<Tensor>> into) {
  if (x.empty() || scales.size() != x.size()) {
    throw std::invalid_argument(
        "float8: a list of casts has at least one tensor, each with its part of a scale state");
  }
  CastList list;
  for (size_t i = 0; i < x.size(); ++i) {
    list.add(x, i, config, operand, dtypes);
    list.set_scales(i, scales[i], layout);
  }
  return list.run(into);
}

std::tuple<int64_t, int64_t> amax_words(int64_t rows_max, int64_t cols, int64_t config,
                                        int64_t operand, int64_t whole_rows, int64_t copies) {
  const CopyLayout at =
      copy_layout(key_of_shards(rows_max, cols, config, operand, whole_rows, copies), 0);
  return {at.amax_words, at.row_amax_words};
}

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> copy_layout_of(
    int64_t rows_max, int64_t rows, int64_t cols, int64_t config, int64_t operand, int64_t copies,
    bool over_ranks, int64_t whole_rows) {
  QuantizerKey key = key_of_shards(rows_max, cols, config, operand, whole_rows, copies);
  key.over_ranks = over_ranks;
  const CopyLayout at = copy_layout(key, rows);
  return {at.q_pitch, at.q_scales, at.scales_in_qt ? 1 : 0, at.qt_pitch, at.qt_scales};
}

}  // namespace float8_torch
