// RMSNorms.
#include "python/shim/norm.hpp"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <span>
#include <stdexcept>
#include <string>

#include "python/shim/base/errors.hpp"
#include "python/shim/plans/workspace.hpp"

namespace float8_torch {
namespace {

[[noreturn]] void refuse_norm(const char* op, const std::string& what) {
  throw std::invalid_argument(std::string("float8: ") + op + ": " + what);
}

// Tells whether the heads of a tensor [batch, heads, tokens, head_dim] lie one token after the other.
bool tokens_come_first(const Tensor& x) {
  return x.dim() == 4 && x.stride(1) < x.stride(2);
}

// Its rows in the order of memory.
Matrix rows_of(const Tensor& tensor, bool tokens_first) {
  return as_matrix(tokens_first ? torch::stable::transpose(tensor, 1, 2) : tensor);
}

// A tensor without values that lies in memory as x does.
Tensor empty_like(const Tensor& x, bool tokens_first, int32_t dtype, const Device& device) {
  const std::span<const int64_t> sizes = sizes_of(x);
  if (!tokens_first) return empty(sizes, dtype, device);
  const int64_t of_token = sizes[1] * sizes[3];
  const std::array<int64_t, 4> strides = {sizes[2] * of_token, sizes[3], of_token, 1};
  return empty_strided(sizes, strides, dtype, device);
}

Tensor empty_vector(int64_t count, int32_t dtype, const Device& device) {
  return empty(std::span(&count, 1), dtype, device);
}

// Sets the operands that both calls read.
template <class Args>
void set_operands(const char* op, const Tensor& x, const Matrix& rows, const Tensor& weight,
                  double weight_offset, int64_t rounding, const Device& device, Args& args) {
  if (weight.dim() != 1 || weight.size(0) != rows.cols) {
    refuse_norm(op, "the weight is not a vector of x's last dimension");
  }
  check_dense(weight, aoti_torch_dtype_element_size(dtype_of(weight)), device, "weight");
  args.x = {rows.data, rows.stride, nullptr};
  args.weight = weight.mutable_data_ptr();
  args.rows = rows.rows;
  args.cols = rows.cols;
  args.weight_offset = static_cast<float>(weight_offset);
  args.rounding = static_cast<int32_t>(rounding);
  args.dtype = element_type(dtype_of(x), "x");
  args.weight_dtype = element_type(dtype_of(weight), "weight");
}

}  // namespace

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps,
                                    double weight_offset, int64_t rounding, int64_t dtype,
                                    bool with_rstd, int64_t config) {
  const Place place = place_of(x, Config(config));
  const bool tokens_first = tokens_come_first(x);
  const Matrix rows = rows_of(x, tokens_first);
  float8_rms_norm_args args;
  set_operands("rms_norm", x, rows, weight, weight_offset, rounding, place.device, args);
  const Tensor y =
      empty_like(x, tokens_first, code_of(static_cast<float8_dtype>(dtype)), place.device);
  const Tensor rstd =
      empty_vector(with_rstd ? rows.rows : 0, aoti_torch_dtype_float32(), place.device);
  args.y.data = y.mutable_data_ptr();
  args.rstd = with_rstd ? static_cast<float*>(rstd.mutable_data_ptr()) : nullptr;
  args.eps = static_cast<float>(eps);
  args.out_dtype = static_cast<int32_t>(dtype);
  check(float8_rms_norm(context_of(place.key()), &args, place.stream));
  return {y, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy, const Tensor& x,
                                             const Tensor& weight, const Tensor& rstd,
                                             double weight_offset, int64_t rounding, bool with_dx,
                                             bool with_dweight, int64_t config) {
  constexpr const char* kOp = "rms_norm_backward";
  const Place place = place_of(x, Config(config));
  const bool tokens_first = tokens_come_first(x);
  const Matrix rows = rows_of(x, tokens_first);
  if (!std::ranges::equal(sizes_of(dy), sizes_of(x)) || device_of(dy) != place.device) {
    refuse_norm(kOp, "the gradient is not of x's shape, or is on another device");
  }
  const Matrix of_dy = rows_of(dy, tokens_first);
  check_dense(rstd, sizeof(float), place.device, "rstd");
  if (rstd.numel() != rows.rows) refuse_norm(kOp, "rstd is not what rms_norm gave");
  float8_rms_norm_backward_args args;
  set_operands(kOp, x, rows, weight, weight_offset, rounding, place.device, args);
  args.dy = {of_dy.data, of_dy.stride, nullptr};
  args.rstd = static_cast<const float*>(rstd.mutable_data_ptr());
  args.out_dtype = element_type(dtype_of(dy), "the gradient");
  const int32_t type = dtype_of(x);
  const Tensor dx = with_dx ? empty_like(x, tokens_first, type, place.device)
                            : empty_vector(0, type, place.device);
  const Tensor dweight = empty_vector(with_dweight ? rows.cols : 0, dtype_of(weight), place.device);
  args.dx.data = with_dx ? dx.mutable_data_ptr() : nullptr;
  args.dweight.data = with_dweight ? dweight.mutable_data_ptr() : nullptr;
  float8_context* const context = context_of(place.key());
  const size_t bytes =
      with_dweight ? float8_rms_norm_backward_workspace_bytes(context, rows.rows, rows.cols) : 0;
  const Workspace workspace(place, bytes, Counts::kNone);
  args.workspace = {workspace.data(), bytes};
  check(float8_rms_norm_backward(context, &args, place.stream));
  return {dx, dweight};
}

}  // namespace float8_torch
