// What ranks that share a model send for each of its linears in a step, in bf16 and in fp8, and how
// much of that their GEMMs hide: the filter's speedups with the wire in them.
//
// FSDP (fsdp ranks) gathers a weight before forward and before backward, 2 bytes an element in bf16
//   and 1 in fp8, and reduce-scatters its gradient in fp32. These overlap with GEMMs. In fp8 a rank
//   casts its shard alone, and all weights of the model take part in one all-reduce (MAX) of their
//   amaxes and one all-gather of their scales, which nothing hides.
// Tensor parallelism (tp ranks) gathers x before column-wise linears and dy of row-wise ones, and
//   reduce-scatters dx and y in bf16 (sequence parallelism). In fp8 what is gathered has the bytes
//   that docs/communication-model.md lists, and amaxes that span ranks are reduced before a cast. Nothing
//   hides any of it.
//
// The layers of a block (the name up to its first number) are gathered together, and the linears
// that read one x share its gather and the reduction of its gradient: each has its share.
//
// Exposed in a direction is what FSDP sends for a layer beyond the time of the layer's own GEMMs,
// which are a third of the linear's time in forward and two thirds in backward: the layers beside
// it are alike in this ratio. Attention and the optimizer hide more, so this is an upper bound.
//
// What is sent for the experts of a layer, tokens and weights, has as many bytes in fp8 as in bf16: they
// have no part in any of this.
//
// Ranks fill hosts one after the other, the ranks of a tensor-parallel group first.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "recipes/model/filter_rule.hpp"
#include "recipes/recipe.hpp"
#include "tuning_db/estimate/wire_model.hpp"

namespace f8::tuning_db {

inline constexpr int64_t kMaxRanks = 1 << 20;

struct Parallelism {
  int64_t fsdp = 1;
  int64_t tp = 1;
  int64_t hosts = 0;        // 0: as few as hold all ranks, at most 8 on each
  double network_gbit = 0;  // of each rank's network card; 0: the model's
  [[nodiscard]] int64_t ranks() const { return fsdp * tp; }
  // False where nothing is said of ranks at all: then there is no wire.
  [[nodiscard]] bool is_given() const {
    return fsdp != 1 || tp != 1 || hosts != 0 || network_gbit != 0;
  }
};

struct RankLayout {
  int64_t hosts = 1;
  RankGroup fsdp{}, tp{};
};
// The error names the option and says what to do.
[[nodiscard]] Result<RankLayout> layout_ranks(const Parallelism& parallel);

// A layer's part of a step on the wire.
struct WireShare {
  double bf16_us = 0, fp8_us = 0;                  // all that is sent
  double bf16_exposed_us = 0, fp8_exposed_us = 0;  // what of it takes time
  SpeedupInterval compute{};                       // without the wire
  Evidence compute_evidence = Evidence::kRule;
  bool is_prediction = false;  // WireCost's
};

struct WiredSpeedup {
  SpeedupInterval speedup{};
  double bf16_ns = 0;  // with what is exposed
  WireShare share{};
};

class WireCost {
 public:
  // layers: the shapes of one tensor-parallel rank. The error names the layer or the option.
  [[nodiscard]] static Result<WireCost> create(std::span<const NamedLinear> layers, int64_t tokens,
                                               const Recipe& recipe, const Parallelism& parallel,
                                               WireModel model = WireModel::fitted());
  [[nodiscard]] const RankLayout& layout() const { return layout_; }
  [[nodiscard]] const WireModel& model() const { return model_; }
  // Ranks or hosts that the constants were not measured on, or another network.
  [[nodiscard]] bool is_prediction() const { return is_prediction_; }
  // "measured" or "predicted", for how many ranks, and within what: ends a reason.
  [[nodiscard]] std::string describe() const;
  // Why ranks that share the i-th layer cannot have it in fp8; empty: they can.
  [[nodiscard]] const std::string& kept(size_t i) const { return layers_[i].kept; }
  // The interval holds times on the wire, and what fp8 saves of them, that are off by the model's
  // half width.
  [[nodiscard]] WiredSpeedup speedup(size_t i, const SpeedupInterval& compute, Evidence evidence,
                                     double bf16_ns) const;

 private:
  struct Sent {                        // us
    double forward = 0, backward = 0;  // overlapped by GEMMs
    double alone = 0;
    [[nodiscard]] double all() const { return forward + backward + alone; }
    [[nodiscard]] double exposed(double compute_us, double scale) const;
  };
  struct Layer {
    Sent bf16{}, fp8{};
    double cast_saved_us = 0;
    std::string kept{};
    [[nodiscard]] double fp8_compute_us(double bf16_us, double speedup) const;
    // scale: of all times on the wire; saving: of what fp8 saves of them.
    [[nodiscard]] double speedup(double compute, double bf16_us, double scale, double saving) const;
  };
  void add_fsdp(std::span<const NamedLinear> layers, const Recipe& recipe);
  void add_tp(std::span<const NamedLinear> layers, int64_t tokens, const Recipe& recipe);
  void add_weight_amaxes(std::span<const NamedLinear> layers, const Recipe& recipe);

  WireModel model_;
  RankLayout layout_;
  bool is_prediction_ = false;
  std::vector<Layer> layers_;
};

}  // namespace f8::tuning_db
