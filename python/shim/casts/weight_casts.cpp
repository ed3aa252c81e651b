// The casts of a weight into kept copies, which are left out where it did not change.
#include <torch/csrc/stable/ops.h>

#include <utility>

#include "python/shim/base/errors.hpp"
#include "python/shim/casts/cast.hpp"

namespace float8_torch {

uint32_t* compare_weight(float8_context* context, const Matrix& weight, float8_dtype own,
                         int32_t wanted, const Tensor& state, const Place& place, uint32_t* flag) {
  auto* const kept = static_cast<uint8_t*>(state.mutable_data_ptr());
  float8_fingerprint_args compare;
  compare.w = {weight.data, weight.stride};
  compare.n = weight.rows;
  compare.k = weight.cols;
  compare.dtype = own;
  compare.seed = fingerprint_seed(wanted, own);
  compare.fingerprint = kept;
  compare.noop_flag =
      flag != nullptr ? flag : reinterpret_cast<uint32_t*>(kept + FLOAT8_FINGERPRINT_BYTES);
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

}  // namespace float8_torch
