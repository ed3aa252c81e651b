#include "python/shim/casts.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include "python/shim/errors.hpp"
#include "python/shim/workspace.hpp"

namespace float8_torch {
namespace {

// The cast of an operand that an op names.
struct Cast {
  Place place;
  Matrix rows;
  QuantizerKey key;

  // `shard_rows`: the most rows of a shard, 0 where x is a whole tensor.
  Cast(const Tensor& x, int64_t config_bits, int64_t operand, bool transposed,
       int64_t shard_rows = 0)
      : place(place_of(x, Config(config_bits))), rows(as_matrix(x)) {
    if (operand < FLOAT8_INPUT || operand > FLOAT8_GRAD_OUTPUT) {
      throw std::invalid_argument("float8: operand " + std::to_string(operand) +
                                  " is not 0 (input), 1 (weight) or 2 (grad_output)");
    }
    key = cast_key(Config(config_bits), place, static_cast<float8_operand>(operand), rows.rows,
                   rows.cols, dtype_of(x), transposed);
    if (shard_rows == 0) return;
    key.over_ranks = true;
    key.rows_max = shard_rows;
  }

  [[nodiscard]] float8_quantize_args args() const {
    float8_quantize_args args;
    args.x = rows.data;
    args.ld_x = rows.stride;
    args.rows = rows.rows;
    return args;
  }

  void run(const Quantizer& quantizer, const Tensor& q, const Tensor& qt) const {
    run(quantizer, q, qt, args());
  }
  void run(const Quantizer& quantizer, const Tensor& q, const Tensor& qt,
           float8_quantize_args args) const {
    const Workspace workspace(place, quantizer.workspace_bytes);
    args.tensor = q.mutable_data_ptr();
    args.transposed = quantizer.qt_bytes > 0 ? qt.mutable_data_ptr() : nullptr;
    check(float8_quantize(quantizer.quantizer, &args, workspace.data(), place.stream));
  }
};

uint32_t* words_of(const Tensor& words, int64_t count) {
  return count == 0 ? nullptr : static_cast<uint32_t*>(words.mutable_data_ptr());
}

}  // namespace

QuantizerKey cast_key(Config config, const Place& place, float8_operand operand, int64_t rows,
                      int64_t cols, int32_t dtype, bool transposed) {
  return {.config = config.of_casts(),
          .rows_max = operand == FLOAT8_WEIGHT ? rows : kRows * row_blocks(rows),
          .cols = cols,
          .device = place.key(),
          .operand = static_cast<int8_t>(operand),
          .dtype = static_cast<int8_t>(element_type(dtype, "x")),
          .transposed = transposed};
}

std::tuple<Tensor, Tensor> quantize(const Tensor& x, int64_t config, int64_t operand,
                                    bool transposed) {
  const Cast cast(x, config, operand, transposed);
  const Device device = cast.place.device;
  if (cast.rows.rows == 0) {
    const auto of = [&](int64_t rows) {
      return quantized_bytes(rows, cast.rows.cols, Config(config), operand, transposed);
    };
    const QuantizedBytes one = of(kRows);
    const QuantizedBytes two = of(2 * kRows);
    return {empty_bytes(2 * one.q - two.q, device), empty_bytes(2 * one.qt - two.qt, device)};
  }
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  Tensor q = empty_bytes(static_cast<int64_t>(quantizer.q_bytes), device);
  Tensor qt = empty_bytes(static_cast<int64_t>(quantizer.qt_bytes), device);
  cast.run(quantizer, q, qt);
  return {q, qt};
}

void quantize_into(const Tensor& x, const Tensor& q, const Tensor& qt, int64_t config,
                   int64_t operand) {
  const Cast cast(x, config, operand, true);
  if (cast.rows.rows == 0) return;
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  for (const auto& [copy, bytes] : {std::pair{&q, quantizer.q_bytes}, {&qt, quantizer.qt_bytes}}) {
    if (static_cast<size_t>(copy->numel()) != bytes || device_of(*copy) != cast.place.device) {
      throw std::invalid_argument("float8: a copy in fp8 has " + std::to_string(copy->numel()) +
                                  " bytes, or is on another device; it needs " +
                                  std::to_string(bytes) + ", as quantize gives them");
    }
  }
  cast.run(quantizer, q, qt);
}

std::tuple<Tensor, Tensor> quantize_amax(const Tensor& x, int64_t config, int64_t operand,
                                         int64_t rows_max) {
  const Cast cast(x, config, operand, true, rows_max);
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  const auto empty_words = [&](int64_t count) {
    return empty(std::span(&count, 1), aoti_torch_dtype_int32(), cast.place.device);
  };
  Tensor amax = empty_words(quantizer.amax_words);
  Tensor row_amax = empty_words(quantizer.row_amax_words);
  float8_quantize_args args = cast.args();
  args.amax = words_of(amax, quantizer.amax_words);
  args.row_amax = words_of(row_amax, quantizer.row_amax_words);
  check(float8_quantize_amax(quantizer.quantizer, &args, cast.place.stream));
  return {amax, row_amax};
}

std::tuple<Tensor, Tensor> quantize_shard(const Tensor& x, const Tensor& amax,
                                          const Tensor& row_amax, int64_t config, int64_t operand,
                                          int64_t rows_max) {
  const Cast cast(x, config, operand, true, rows_max);
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  for (const auto& [words, count] :
       {std::pair{&amax, quantizer.amax_words}, {&row_amax, quantizer.row_amax_words}}) {
    if (words->numel() != count || dtype_of(*words) != aoti_torch_dtype_int32() ||
        !words->is_contiguous() || device_of(*words) != cast.place.device) {
      throw std::invalid_argument("float8: maxima of a shard are not the " + std::to_string(count) +
                                  " words that quantize_amax gives");
    }
  }
  Tensor q = empty_bytes(static_cast<int64_t>(quantizer.q_bytes), cast.place.device);
  Tensor qt = empty_bytes(static_cast<int64_t>(quantizer.qt_bytes), cast.place.device);
  float8_quantize_args args = cast.args();
  args.amax = words_of(amax, quantizer.amax_words);
  args.row_amax = words_of(row_amax, quantizer.row_amax_words);
  cast.run(quantizer, q, qt, args);
  return {q, qt};
}

}  // namespace float8_torch
