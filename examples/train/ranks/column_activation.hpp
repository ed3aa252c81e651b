// An activation of which each rank of tensor parallelism holds columns: x of a row-wise linear, and dy of
// a column-wise one. Its scales are those of all columns: of rows, or of the tensor.
#pragma once

#include "device/backend.hpp"
#include "ranks/rank.hpp"

namespace train {

class ColumnActivation {
 public:
  // The recipe's scaling is dynamic.
  ColumnActivation(Backend& backend, const Rank& tp, const std::string& recipe,
                   float8_operand operand, int64_t rows, int64_t cols);

  // Casts this rank's columns, after one all-reduce of the maxima that span ranks.
  [[nodiscard]] const float8::Tensor* cast(const void* x);

 private:
  Backend& backend_;
  const Rank& tp_;
  float8::Quantizer quantizer_;
  float8::QuantizeArgs args_;
  float8::Tensor view_;
  u32* words_ = nullptr;  // that span ranks
  size_t count_ = 0;
};

}  // namespace train
