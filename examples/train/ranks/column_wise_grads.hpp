// The backward of a column-wise linear on a rank of tensor parallelism, which holds columns of dy: a linear
// would give these scales of their own, so dy is cast over the ranks, and the GEMMs are called one by one.
#pragma once

#include <optional>

#include "ranks/column_activation.hpp"

namespace train {

class ColumnWiseGrads {
 public:
  // `desc` is the rank's linear.
  ColumnWiseGrads(Backend& backend, const Rank& tp, const float8::LinearDesc& desc,
                  const std::string& recipe);

  // Fills dx and dw. `args` are those of the linear's backward, with w_tensor and without x_tensor;
  // `workspace` is the linear's.
  void run(const float8::Linear& linear, const float8::BackwardArgs& args, void* workspace);

 private:
  void multiply(const float8::Gemm& gemm, const float8::Tensor& b, void* d);

  Backend& backend_;
  ColumnActivation dy_;
  const float8::Tensor* dy_tensor_ = nullptr;  // of the current call
  float8::Gemm grad_input_;
  std::optional<float8::Gemm> grad_weight_;  // none: it is in high precision
  void* workspace_ = nullptr;                // of the GEMMs
};

}  // namespace train
