// The weights of linears of which each rank holds equal rows. A step begins with one cast of every
// shard, after one all-reduce of the maxima of all weights; then each forward gathers q and each
// backward qt, one byte an element. Weights that no recipe casts are gathered in bf16.
//
// A weight that tensor parallelism splits has the scales of all of it, except where its parts have
// columns of their own, whose scales are theirs.
//
// There is one buffer for each kind of gathered copy, which the next linear's gather overwrites.
#pragma once

#include <optional>

#include "device/backend.hpp"
#include "parameters.hpp"
#include "ranks/rank.hpp"

namespace train {

class Shards {
 public:
  // `weights` are the rank's rows in bf16, at the offsets of `parameters`.
  Shards(Backend& backend, const Ranks& ranks, const Parameters& parameters, const u16* weights);

  // Casts a linear's weight under the recipe from now on; `slots` are its scales if they are delayed.
  void add_cast(size_t index, const std::string& recipe, const float8::ScaleSlots* slots);
  // Takes the memory of all that was added.
  void allocate();

  // Begins a step.
  void cast(bool first_step);
  // The whole weight: q for a forward and qt for a backward, or null if it is not cast.
  [[nodiscard]] const float8::Tensor* gather(size_t index, bool backward);
  // The whole weight in bf16, or null if it is cast.
  [[nodiscard]] const void* gather_bf16(size_t index);

 private:
  struct Cast {
    float8::Quantizer quantizer;
    float8::Quantizer whole_quantizer;
    const float8::ScaleSlots* slots;  // null: scales are dynamic
    void* tensor = nullptr;
    u32* amax = nullptr;
    u32* row_amax = nullptr;
    float8::Tensor shard;
    float8::Tensor q;  // of the whole weight
    float8::Tensor qt;
  };
  [[nodiscard]] bool spans_tp(size_t index) const;
  void allocate_amax();
  [[nodiscard]] float8::QuantizeArgs args_of(size_t index, bool first_step) const;

  Backend& backend_;
  const Ranks& ranks_;
  const Parameters& parameters_;
  const u16* weights_;
  std::vector<std::optional<Cast>> casts_;  // by linear
  // Of all weights, reduced at once: first those that span the ranks of tensor parallelism too.
  u32* amax_ = nullptr;
  size_t amax_words_ = 0;
  size_t tp_words_ = 0;
  void* q_ = nullptr;
  void* qt_ = nullptr;
  void* bf16_ = nullptr;
  void* workspace_ = nullptr;  // of casts
  void* gather_workspace_ = nullptr;
};

}  // namespace train
