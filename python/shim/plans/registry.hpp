// Values that are made at the first use of a key and kept: what the plans of linears and of experts have in
// common.
#pragma once

#include <bit>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "python/shim/plans/plans.hpp"

namespace float8_torch {

inline constexpr int32_t kEmulated = -1;

inline uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value;
  hash *= 0x9e3779b97f4a7c15u;
  return hash ^ hash >> 29;
}

inline uint64_t pair_of(int64_t high, int64_t low) {
  return static_cast<uint64_t>(high) << 32 ^ static_cast<uint64_t>(low);
}

struct Hash {
  size_t operator()(const PlanKey& key) const {
    const uint64_t shape =
        mix(mix(key.config, static_cast<uint64_t>(key.m_max)), pair_of(key.n, key.k));
    return mix(shape, pair_of(key.device, (key.weight_shards ? 1 << 16 : 0) |
                                              key.tensor_dtype << 8 | key.grad_dtype));
  }
  size_t operator()(const QuantizerKey& key) const {
    const int64_t flags = (key.noop_flag ? 1 << 12 : 0) | (key.f32_source ? 4 : 0) |
                          key.source << 17 | key.activation << 20 |
                          (key.column_sums ? 1 << 23 : 0) | (key.over_ranks ? 2 : 0) |
                          (key.less_workspace ? 1 << 24 : 0) | key.copies << 13;
    const uint64_t shape = mix(mix(key.config, pair_of(key.rows_max, key.cols)),
                               static_cast<uint64_t>(key.whole_rows));
    return mix(shape, pair_of(key.device, key.operand << 10 | key.dtype << 3 | flags));
  }
  size_t operator()(const std::vector<const Quantizer*>& key) const {
    uint64_t hash = key.size();
    for (const Quantizer* quantizer : key) {
      hash = mix(hash, reinterpret_cast<uintptr_t>(quantizer));
    }
    return hash;
  }
  size_t operator()(const GemmKey& key) const {
    const int64_t flags = (key.bias ? 2 : 0) | (key.accumulate ? 1 : 0);
    const uint64_t shape =
        mix(mix(key.config, static_cast<uint64_t>(key.m_max)), pair_of(key.n, key.k));
    return mix(shape,
               pair_of(key.device, key.sm_limit << 12 | key.kind << 10 | key.dtype << 2 | flags));
  }
  size_t operator()(const ExpertsKey& key) const {
    const uint64_t shape =
        mix(mix(key.config, static_cast<uint64_t>(key.m_max)), pair_of(key.n, key.k));
    return mix(shape, pair_of(key.device, (key.x_over_ranks ? 1 << 24 : 0) |
                                              (key.dy_over_ranks ? 1 << 25 : 0) | key.experts << 8 |
                                              key.tensor_dtype << 4 | key.grad_dtype));
  }
  size_t operator()(const ExpertQuantizerKey& key) const {
    const int flags = (key.two_tensors ? 8 : 0) | (key.noop_flag ? 4 : 0) |
                      (key.f32_source ? 2 : 0) | (key.over_ranks ? 1 : 0);
    return mix(mix(key.config, pair_of(key.n, key.k)),
               pair_of(key.device, key.experts << 8 | key.dtype << 4 | flags));
  }
  size_t operator()(const MoeKey& key) const {
    return mix((*this)(key.linear), (key.rows_in_place ? 1 : 0) | (key.w3_apart ? 2 : 0));
  }
  size_t operator()(const GroupLayoutKey& key) const {
    return mix(static_cast<uint64_t>(key.m_max), pair_of(key.device, key.experts));
  }
  size_t operator()(const RouteKey& key) const {
    return mix(pair_of(key.top_k, key.experts), pair_of(key.device, key.long_ids ? 1 : 0));
  }
  size_t operator()(const AttentionKey& key) const {
    const uint64_t heads =
        mix(pair_of(key.heads_q, key.heads_kv), pair_of(key.head_dim, key.device));
    const uint64_t mask =
        mix(static_cast<uint64_t>(key.window), (key.causal ? 1U : 0U) | (key.packed ? 2U : 0U));
    return mix(mix(heads, mask), static_cast<uint64_t>(std::bit_cast<int32_t>(key.scale)));
  }
  size_t operator()(const CombineKey& key) const {
    return mix(mix(static_cast<uint64_t>(key.cols), pair_of(key.top_k, key.experts)),
               pair_of(key.device, key.dtype));
  }
};

// Values that are made at the first use of their key, one at a time, and kept.
template <class Key, class Value>
class Registry {
 public:
  // `make` returns a unique_ptr; `what` names the key where a captured stream has no value.
  template <class Make, class What>
  const Value& get(const Key& key, const Place& place, const Make& make, const What& what) {
    if (const Value* value = find(key)) [[likely]] {
      return *value;
    }
    if (place.capturing) {
      throw std::runtime_error(
          "float8: a CUDA graph is being captured, and " + what() +
          " has no plan yet; run forward and backward once with this shape before the capture");
    }
    const std::lock_guard lock(making_);
    if (const Value* value = find(key)) return *value;  // another thread was first
    auto value = make();
    const std::unique_lock write(mutex_);
    return *values_.emplace(key, std::move(value)).first->second;
  }

  template <class Visit>
  void for_each(const Visit& visit) {
    const std::shared_lock lock(mutex_);
    for (const auto& [key, value] : values_) visit(key, *value);
  }

 private:
  const Value* find(const Key& key) {
    const std::shared_lock lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? nullptr : found->second.get();
  }

  std::shared_mutex mutex_;
  std::mutex making_;
  std::unordered_map<Key, std::unique_ptr<const Value>, Hash> values_;
};

// Lets any_plan find that plan.
void keep_any(uint64_t config, int32_t device, const AnyPlan& plan);

}  // namespace float8_torch
