// The ops that route tokens to experts and combine their rows.
#include "python/shim/experts/moe.hpp"

#include <torch/csrc/stable/ops.h>

#include <array>
#include <stdexcept>
#include <string>

#include "python/shim/base/errors.hpp"
#include "python/shim/plans/plans.hpp"
#include "python/shim/plans/workspace.hpp"

namespace float8_torch {
namespace {

const int32_t* indices(const Tensor& tensor) {
  return static_cast<const int32_t*>(tensor.mutable_data_ptr());
}

// The tensor where it is dense, else a copy.
Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// A dense matrix; a copy where the tensor is no such, or is not aligned.
Matrix dense_matrix(const Tensor& tensor) {
  const Matrix matrix = as_matrix(tensor);
  return matrix.stride == matrix.cols ? matrix : as_matrix(torch::stable::contiguous(tensor));
}

void check_index(const Tensor& tensor, const Place& place, const char* name) {
  check_dense(tensor, sizeof(int32_t), place.device, name);
  if (dtype_of(tensor) == aoti_torch_dtype_int32()) return;
  throw std::invalid_argument(std::string("float8: ") + name +
                              " is not int32, as moe_route makes it");
}

// Scores of pairs; `shape` is theirs.
Tensor checked_scores(const Tensor& scores, const Place& place, const Tensor& shape) {
  if (element_type(dtype_of(scores), "scores") != FLOAT8_F32) {
    throw std::invalid_argument("float8: scores are float32");
  }
  if (scores.dim() != 2 || scores.size(0) != shape.size(0) || scores.size(1) != shape.size(1)) {
    throw std::invalid_argument("float8: scores are not [" + std::to_string(shape.size(0)) + ", " +
                                std::to_string(shape.size(1)) + "]");
  }
  Tensor kept = dense(scores);
  check_dense(kept, sizeof(float), place.device, "scores");
  return kept;
}

// Rows, and where each token's are.
struct RowsCall {
  Place place;
  int64_t tokens, top_k, cols;
  Matrix rows;
  const CombinePlan* plan;

  RowsCall(const Tensor& y, const Tensor& position, const Tensor& offsets, int64_t config)
      : place(place_of(y, Config(config))) {
    const int32_t dtype = element_type(dtype_of(y), "y");
    check_index(position, place, "position");
    check_index(offsets, place, "offsets");
    if (y.dim() != 2 || position.dim() != 2 || offsets.dim() != 1 ||
        y.size(0) != position.numel() || position.size(1) < 1) {
      throw std::invalid_argument(
          "float8: y has a row for each pair of a token and an expert, position is [tokens, top_k] "
          "and offsets [experts], as moe_route makes them");
    }
    rows = dense_matrix(y);
    tokens = position.size(0);
    top_k = position.size(1);
    cols = y.size(1);
    plan = &combine_plan_for({.cols = cols,
                              .top_k = static_cast<int32_t>(top_k),
                              .experts = static_cast<int32_t>(offsets.numel()),
                              .device = place.key(),
                              .dtype = dtype},
                             place);
  }
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_route(const Tensor& topk_ids,
                                                     const std::optional<Tensor>& topk_scores,
                                                     int64_t experts, int64_t config) {
  const Place place = place_of(topk_ids, Config(config));
  const bool long_ids = dtype_of(topk_ids) == aoti_torch_dtype_int64();
  if (topk_ids.dim() != 2 || (!long_ids && dtype_of(topk_ids) != aoti_torch_dtype_int32())) {
    throw std::invalid_argument("float8: topk_ids is [tokens, top_k] of int64 or int32");
  }
  const Tensor ids = dense(topk_ids);
  check_dense(ids, long_ids ? 8 : 4, place.device, "topk_ids");
  if (experts < 1 || experts > FLOAT8_MAX_EXPERTS) {
    throw std::invalid_argument("float8: " + std::to_string(experts) + " experts; they are 1 to " +
                                std::to_string(FLOAT8_MAX_EXPERTS));
  }
  const RoutePlan& plan = route_plan_for({.top_k = static_cast<int32_t>(ids.size(1)),
                                          .experts = static_cast<int32_t>(experts),
                                          .device = place.key(),
                                          .long_ids = long_ids},
                                         place);
  const std::array<int64_t, 1> rows = {ids.numel()};
  const std::array<int64_t, 2> pairs = {ids.size(0), ids.size(1)};
  const std::array<int64_t, 1> ends = {experts};
  const int32_t type = aoti_torch_dtype_int32();
  Tensor index = empty(rows, type, place.device);
  Tensor position = empty(pairs, type, place.device);
  Tensor offsets = empty(ends, type, place.device);
  const std::array<int64_t, 1> scored = {topk_scores ? ids.numel() : 0};
  Tensor row_scores = empty(scored, aoti_torch_dtype_float32(), place.device);
  const Workspace workspace(place, plan.workspace_bytes, Counts::kNone);
  float8_moe_route_args args;
  args.tokens = ids.size(0);
  args.topk_ids = ids.mutable_data_ptr();
  args.index = static_cast<int32_t*>(index.mutable_data_ptr());
  args.position = static_cast<int32_t*>(position.mutable_data_ptr());
  args.offsets = static_cast<int32_t*>(offsets.mutable_data_ptr());
  std::optional<Tensor> scores;  // until the call has read them
  if (topk_scores) {
    scores = checked_scores(*topk_scores, place, ids);
    args.scores = static_cast<const float*>(scores->mutable_data_ptr());
    args.row_scores = static_cast<float*>(row_scores.mutable_data_ptr());
  }
  args.workspace = {workspace.data(), plan.workspace_bytes};
  check(float8_moe_route(plan.plan, &args, place.stream));
  return {index, position, offsets, row_scores};
}

Tensor moe_combine(const Tensor& y, const std::optional<Tensor>& topk_scores,
                   const Tensor& position, const Tensor& offsets, int64_t config) {
  const RowsCall call(y, position, offsets, config);
  float8_moe_combine_args args;
  std::optional<Tensor> scores;  // until the call has read them
  if (topk_scores) {
    scores = checked_scores(*topk_scores, call.place, position);
    args.scores = static_cast<const float*>(scores->mutable_data_ptr());
  }
  const std::array<int64_t, 2> sizes = {call.tokens, call.cols};
  Tensor out = empty(sizes, dtype_of(y), call.place.device);
  args.tokens = call.tokens;
  args.y = call.rows.data;
  args.position = indices(position);
  args.offsets = indices(offsets);
  args.out = out.mutable_data_ptr();
  check(float8_moe_combine(call.plan->plan, &args, call.place.stream));
  return out;
}

Tensor moe_score_gradient(const Tensor& dout, const Tensor& y, const Tensor& position,
                          const Tensor& offsets, int64_t config) {
  const RowsCall call(y, position, offsets, config);
  if (dtype_of(dout) != dtype_of(y)) {
    throw std::invalid_argument("float8: dout and y are of two types");
  }
  if (dout.dim() != 2 || dout.size(0) != call.tokens || dout.size(1) != call.cols ||
      device_of(dout) != call.place.device) {
    throw std::invalid_argument("float8: dout is not [" + std::to_string(call.tokens) + ", " +
                                std::to_string(call.cols) + "] on the device of y");
  }
  const Matrix grads = dense_matrix(dout);
  const std::array<int64_t, 2> sizes = {call.tokens, call.top_k};
  Tensor dscores = empty(sizes, aoti_torch_dtype_float32(), call.place.device);
  float8_moe_score_gradient_args args;
  args.tokens = call.tokens;
  args.dout = grads.data;
  args.y = call.rows.data;
  args.position = indices(position);
  args.offsets = indices(offsets);
  args.dscores = static_cast<float*>(dscores.mutable_data_ptr());
  check(float8_moe_score_gradient(call.plan->plan, &args, call.place.stream));
  return dscores;
}

}  // namespace float8_torch
