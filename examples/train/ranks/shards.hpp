// The weights of linears whose rows ranks share out. A step begins with the cast of every shard: one list
// finds all maxima, one all-reduce for each group of ranks takes them to all, one list casts. Then each
// forward gathers q and each backward qt, one byte an element. Weights that no recipe casts are gathered
// in bf16.
//
// Scales are those of the whole weight, over both groups of ranks.
//
// There is one buffer for each kind of gathered copy, which the next linear's gather overwrites.
#pragma once

#include <optional>

#include "device/backend.hpp"
#include "parameters.hpp"
#include "ranks/rank.hpp"

namespace train {

// Whether a gathered qt of this weight can stay as it arrives: all ranks have as many whole 128s of rows.
[[nodiscard]] bool lies_in_shards(const LinearShape& shape, const Rank& fsdp);

class Shards {
 public:
  // `weights` are the rank's rows in bf16, at the offsets of `parameters`.
  Shards(Backend& backend, const Ranks& ranks, const Parameters& parameters, const u16* weights);

  // Casts a linear's weight under the recipe from now on; `slots` are its scales if they are delayed.
  // A qt in shards stays as it arrives, for a linear with weight_shards.
  void add_cast(size_t index, const std::string& recipe, const float8::ScaleSlots* slots,
                bool in_shards);
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
    bool in_shards;
    void* tensor = nullptr;
    u32* amax = nullptr;
    u32* row_amax = nullptr;
    float8::Tensor shard;
    float8::Tensor q;  // of the whole weight
    float8::Tensor qt;
  };
  // The maxima of all weights, by the ranks over which they are reduced.
  struct Words {
    size_t fsdp = 0, both = 0, tp = 0, none = 0;
  };
  [[nodiscard]] bool amax_spans_tp(size_t index) const;
  [[nodiscard]] bool rows_span_tp(size_t index) const;
  void allocate_words();
  void allocate_gathers();
  void view_copies(size_t index);
  [[nodiscard]] std::vector<float8::QuantizeArgs> args(bool first_step) const;
  void reduce_words();

  Backend& backend_;
  const Ranks& ranks_;
  const Parameters& parameters_;
  const u16* weights_;
  std::vector<std::optional<Cast>> casts_;  // by linear
  std::vector<size_t> listed_;              // the linears of the list
  std::optional<float8::QuantizerList> list_;
  u32* words_ = nullptr;
  Words count_;
  void* q_ = nullptr;
  void* qt_ = nullptr;
  void* bf16_ = nullptr;
  void* workspace_ = nullptr;  // of casts
  void* gather_workspace_ = nullptr;
};

}  // namespace train
