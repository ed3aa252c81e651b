// Rotary positions of queries and keys.
#include "python/shim/rotary.hpp"

#include <array>
#include <string>

#include "python/shim/base/errors.hpp"
#include "python/shim/heads.hpp"
#include "python/shim/plans/plans.hpp"

namespace float8_torch {
namespace {

constexpr const char* kOp = "rotary";

// How a tensor of heads has its dimensions, and how its heads lie in memory: one token after the other, or one head
// after the other.
struct Order {
  bool tokens_first;
  bool tokens_first_in_memory;
};

Heads empty_heads_like(const Tensor& like, const Order& order, int32_t dtype,
                       const Device& device) {
  const int64_t heads = like.size(order.tokens_first ? 2 : 1);
  const int64_t tokens = like.size(order.tokens_first ? 1 : 2);
  const int64_t dim = like.size(3);
  const int64_t of_head = order.tokens_first_in_memory ? dim : tokens * dim;
  const int64_t of_token = order.tokens_first_in_memory ? heads * dim : dim;
  const std::array<int64_t, 4> sizes = {like.size(0), like.size(1), like.size(2), dim};
  const std::array<int64_t, 4> strides = {heads * tokens * dim,
                                          order.tokens_first ? of_token : of_head,
                                          order.tokens_first ? of_head : of_token, 1};
  const Tensor keep = empty_strided(sizes, strides, dtype, device);
  return {keep, {keep.mutable_data_ptr(), strides[0], of_head, of_token}};
}

// Cosines or sines [batch or 1, tokens, head_dim] of these heads.
void check_positions(const Tensor& positions, const Tensor& q, int64_t tokens, const Place& place,
                     const char* name) {
  if (positions.dim() == 3 && (positions.size(0) == 1 || positions.size(0) == q.size(0)) &&
      positions.size(1) == tokens && positions.size(2) == q.size(3) && positions.stride(2) == 1 &&
      device_of(positions) == place.device) {
    return check_memory(positions, name);
  }
  refuse_heads(kOp, std::string(name) +
                        " is not [batch or 1, tokens, head_dim] beside the queries, with the "
                        "elements of a position side by side");
}

}  // namespace

std::tuple<Tensor, Tensor> rotary(const Tensor& q, const Tensor& k, const Tensor& cos,
                                  const Tensor& sin, int64_t dtype, bool inverse, bool tokens_first,
                                  bool q_in_memory, bool k_in_memory, int64_t config) {
  const Place place = place_of(q, Config(config));
  const Heads queries = as_heads(q, place, kOp, "q", tokens_first);
  const Heads keys = as_heads(k, place, kOp, "k", tokens_first);
  const int64_t of_heads = tokens_first ? 2 : 1;
  const int64_t tokens = q.size(3 - of_heads);
  if (k.size(0) != q.size(0) || k.size(3 - of_heads) != tokens || k.size(3) != q.size(3) ||
      dtype_of(k) != dtype_of(q)) {
    refuse_heads(kOp, "q and k differ in other things than the number of heads");
  }
  check_positions(cos, q, tokens, place, "cos");
  check_positions(sin, q, tokens, place, "sin");
  if (dtype_of(sin) != dtype_of(cos) || sin.size(0) != cos.size(0) ||
      sin.stride(0) != cos.stride(0) || sin.stride(1) != cos.stride(1)) {
    refuse_heads(kOp, "cos and sin are of unlike types or strides");
  }
  const int32_t type = code_of(static_cast<float8_dtype>(dtype));
  const Heads q_out = empty_heads_like(q, {tokens_first, q_in_memory}, type, place.device);
  const Heads k_out = empty_heads_like(k, {tokens_first, k_in_memory}, type, place.device);
  float8_rotary_args args;
  args.q = queries.heads;
  args.k = keys.heads;
  args.q_out = q_out.heads;
  args.k_out = k_out.heads;
  args.cos = cos.mutable_data_ptr();
  args.sin = sin.mutable_data_ptr();
  args.cos_batch_stride = cos.size(0) == 1 ? 0 : cos.stride(0);
  args.cos_token_stride = cos.stride(1);
  args.batch = q.size(0);
  args.tokens = tokens;
  args.heads_q = static_cast<int32_t>(q.size(of_heads));
  args.heads_k = static_cast<int32_t>(k.size(of_heads));
  args.head_dim = static_cast<int32_t>(q.size(3));
  args.dtype = element_type(dtype_of(q), "q");
  args.cos_dtype = element_type(dtype_of(cos), "cos");
  args.out_dtype = static_cast<int32_t>(dtype);
  args.inverse = inverse ? 1 : 0;
  check(float8_rotary(context_of(place.key()), &args, place.stream));
  return {q_out.keep, k_out.keep};
}

}  // namespace float8_torch
