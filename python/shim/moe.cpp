// The ops that route tokens to experts and combine their rows.
#include "python/shim/moe.hpp"

#include <array>
#include <stdexcept>
#include <string>

#include "python/shim/errors.hpp"
#include "python/shim/plans.hpp"
#include "python/shim/workspace.hpp"

namespace float8_torch {
namespace {

const int32_t* indices(const Tensor& tensor) {
  return static_cast<const int32_t*>(tensor.mutable_data_ptr());
}

void check_index(const Tensor& tensor, const Place& place, const char* name) {
  check_dense(tensor, sizeof(int32_t), place.device, name);
  if (dtype_of(tensor) == aoti_torch_dtype_int32()) return;
  throw std::invalid_argument(std::string("float8: ") + name +
                              " is not int32, as moe_route makes it");
}

// Rows, and where each token's are.
struct RowsCall {
  Place place;
  int64_t tokens, top_k, cols;
  const CombinePlan* plan;

  RowsCall(const Tensor& y, const Tensor& position, const Tensor& offsets, int64_t config)
      : place(place_of(y, Config(config))) {
    const int32_t dtype = element_type(dtype_of(y), "y");
    check_dense(y, dtype == FLOAT8_F32 ? 4 : 2, place.device, "y");
    check_index(position, place, "position");
    check_index(offsets, place, "offsets");
    if (y.dim() != 2 || position.dim() != 2 || offsets.dim() != 1 ||
        y.size(0) != position.numel() || position.size(1) < 1) {
      throw std::invalid_argument(
          "float8: y has a row for each pair of a token and an expert, position is [tokens, top_k] "
          "and offsets [experts], as moe_route makes them");
    }
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
  void check_tokens(const Tensor& tensor, size_t bytes, int64_t of_token, const char* name) const {
    check_dense(tensor, bytes, place.device, name);
    if (tensor.dim() == 2 && tensor.size(0) == tokens && tensor.size(1) == of_token) return;
    throw std::invalid_argument(std::string("float8: ") + name + " is not [" +
                                std::to_string(tokens) + ", " + std::to_string(of_token) + "]");
  }
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor> moe_route(const Tensor& ids, int64_t experts, int64_t config) {
  const Place place = place_of(ids, Config(config));
  const bool long_ids = dtype_of(ids) == aoti_torch_dtype_int64();
  if (ids.dim() != 2 || (!long_ids && dtype_of(ids) != aoti_torch_dtype_int32())) {
    throw std::invalid_argument("float8: topk_ids is [tokens, top_k] of int64 or int32");
  }
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
  const Workspace workspace(place, plan.workspace_bytes, Counts::kNone);
  float8_moe_route_args args;
  args.tokens = ids.size(0);
  args.topk_ids = ids.mutable_data_ptr();
  args.index = static_cast<int32_t*>(index.mutable_data_ptr());
  args.position = static_cast<int32_t*>(position.mutable_data_ptr());
  args.offsets = static_cast<int32_t*>(offsets.mutable_data_ptr());
  args.workspace = {workspace.data(), plan.workspace_bytes};
  check(float8_moe_route(plan.plan, &args, place.stream));
  return {index, position, offsets};
}

Tensor moe_combine(const Tensor& y, const std::optional<Tensor>& scores, const Tensor& position,
                   const Tensor& offsets, int64_t config) {
  const RowsCall call(y, position, offsets, config);
  float8_moe_combine_args args;
  if (scores) {
    if (element_type(dtype_of(*scores), "scores") != FLOAT8_F32) {
      throw std::invalid_argument("float8: scores are float32");
    }
    call.check_tokens(*scores, sizeof(float), call.top_k, "scores");
    args.scores = static_cast<const float*>(scores->mutable_data_ptr());
  }
  const std::array<int64_t, 2> sizes = {call.tokens, call.cols};
  Tensor out = empty(sizes, dtype_of(y), call.place.device);
  args.tokens = call.tokens;
  args.y = y.mutable_data_ptr();
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
  call.check_tokens(dout, element_type(dtype_of(y), "y") == FLOAT8_F32 ? 4 : 2, call.cols, "dout");
  const std::array<int64_t, 2> sizes = {call.tokens, call.top_k};
  Tensor dscores = empty(sizes, aoti_torch_dtype_float32(), call.place.device);
  float8_moe_score_gradient_args args;
  args.tokens = call.tokens;
  args.dout = dout.mutable_data_ptr();
  args.y = y.mutable_data_ptr();
  args.position = indices(position);
  args.offsets = indices(offsets);
  args.dscores = static_cast<float*>(dscores.mutable_data_ptr());
  check(float8_moe_score_gradient(call.plan->plan, &args, call.place.stream));
  return dscores;
}

}  // namespace float8_torch
