// How tensor-parallel ranks share the linears of a model, by the last part of a layer's name:
//
//   column-wise   wq wk wv wqkv w1 w3, q/k/v/qkv_proj, q_b_proj kv_b_proj (latent attention),
//                 gate_proj, up_proj, gate_up_proj, the output head: a rank has out_features / tp of
//                 the weight's rows, and all of x
//   row-wise      wo w2 o_proj down_proj: a rank has in_features / tp of the columns, and of x
//   experts       those of a layer, whatever their name: a rank has hidden_dim / tp of each expert
//   whole         all others: every rank has the same weight
//
// Expert-parallel ranks have whole experts, all ranks as many.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "recipes/problem.hpp"

namespace f8 {

enum class TensorSplit : uint8_t { kWhole, kColumn, kRow };
[[nodiscard]] TensorSplit tensor_split(std::string_view fqn);

// Makes the shapes those of one of `tp` ranks, of unequal parts the largest. A layer of which a rank
// cannot have its part in fp8 is `kept`, with the reason. It is an error where that holds for all, or
// where no name says how to share a layer; the layers are then as they were.
[[nodiscard]] Status shard_tensor_parallel(std::vector<NamedLinear>& layers, int64_t tp,
                                           std::string_view model);

// Leaves each layer the experts of one of `ep` ranks. A rank receives as many rows as before: what its
// own tokens send to others, it has of theirs. It is an error where a layer has no experts for all
// ranks, where that leaves more than a call takes, or where the model has no experts at all.
[[nodiscard]] Status shard_expert_parallel(std::vector<NamedLinear>& layers, int64_t ep,
                                           std::string_view model);

}  // namespace f8
