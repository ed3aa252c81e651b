// The plans of attention.
#include <memory>
#include <string>

#include "python/shim/base/errors.hpp"
#include "python/shim/plans/registry.hpp"

namespace float8_torch {
namespace {

std::unique_ptr<AttentionPlan> make_attention(const AttentionKey& key) {
  float8_attention_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.heads_q = key.heads_q;
  desc.heads_kv = key.heads_kv;
  desc.head_dim = key.head_dim;
  desc.scale = key.scale;
  desc.causal = key.causal ? 1 : 0;
  desc.dtype = FLOAT8_BF16;
  desc.packed = key.packed ? 1 : 0;
  desc.window = key.window;
  desc.recipe = key.recipe;
  auto made = std::make_unique<AttentionPlan>();
  check(float8_attention_plan(context_of(key.device), &desc, &made->attention));
  return made;
}

}  // namespace

const AttentionPlan& attention_plan_for(const AttentionKey& key, const Place& place) {
  static auto* const plans = new Registry<AttentionKey, AttentionPlan>;
  return plans->get(
      key, place, [&] { return make_attention(key); },
      [&] {
        return "attention of " + std::to_string(key.heads_q) + " heads of " +
               std::to_string(key.head_dim);
      });
}

}  // namespace float8_torch
