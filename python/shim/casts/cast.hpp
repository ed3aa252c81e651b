// The cast of one operand: what the casts of a tensor, of a list and of a weight have in common.
#pragma once

#include <cstddef>
#include <cstdint>

#include "python/shim/casts/casts.hpp"
#include "python/shim/plans/plans.hpp"

namespace float8_torch {

constexpr int64_t kOwnType = -1;

// The place of a shard's rows in the whole tensor.
struct ShardRows {
  int64_t most = 0;   // rows of a shard; 0: the tensor is whole
  int64_t whole = 0;  // rows of the whole, where shards may cut its blocks
  int64_t first = 0;  // row of the whole, likewise
};

// Throws where `copy` has not as many bytes as a quantizer fills.
void check_copy(const Tensor& copy, size_t bytes, const Device& device, const char* name);

// Words of the maxima of a part of a tensor.
[[nodiscard]] Tensor empty_words(int64_t count, const Device& device);
// Throws where they are not so many.
void check_words(const Tensor& words, int64_t count, const Device& device);

void run_quantizer(const Quantizer& quantizer, const Place& place, const Tensor& q,
                   const Tensor& qt, float8_quantize_args args);

// The cast of an operand that an op names.
struct Cast {
  Place place;
  Matrix rows;
  QuantizerKey key;

  int64_t first_row;

  // `dtype`: a float8_dtype that an x in fp32 is rounded to; kOwnType: x is cast as it is.
  Cast(const Tensor& x, int64_t config_bits, int64_t operand, int64_t copies,
       const ShardRows& shard = {}, int64_t dtype = kOwnType);

  [[nodiscard]] float8_quantize_args args() const;

  // The slots of a scale state are those of any linear of the recipe. A step is the first one where it
  // is of one of the states.
  void set_scales(float8_scale_slots& slots, float8_step& step, const Tensor& state, int64_t layout,
                  bool evaluate) const;

 private:
  void round_to(int64_t dtype);
};

}  // namespace float8_torch
