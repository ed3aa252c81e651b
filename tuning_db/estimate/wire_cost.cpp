#include "tuning_db/estimate/wire_cost.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "recipes/fp8_layout.hpp"
#include "recipes/model/tensor_parallel.hpp"

namespace f8::tuning_db {
namespace {

constexpr int64_t kMostRanksOfHost = 8;
constexpr double kCastBytes = 4;  // at least: a cast reads bf16 and writes two fp8 copies
constexpr double kGradBytes = 4;
constexpr double kOutputBytes = 2;  // y and dx
constexpr double kWordBytes = 4;    // an amax, or a scale
constexpr int64_t kBlock = 128;

// How many amaxes of an operand span the ranks that share it; a line has one for each of its rows or
// columns.
enum class Words : uint8_t { kNone, kOne, kLine };

// The words that a cast needs of other ranks, where they share its rows, or the columns that its
// GEMM sums over. Delayed scales are known, and the blocks of a rank are its own.
Words words_of(const GemmSetting& gemm, const CastSetting& cast, bool shares_columns) {
  if (!gemm.is_fp8() || cast.scaling == Scaling::kDelayed) return Words::kNone;
  if (cast.granularity == Granularity::kTensor) return Words::kOne;
  return cast.granularity == Granularity::kAxis && shares_columns ? Words::kLine : Words::kNone;
}

// Where both copies need words a line has the tensor's too.
struct Copy {
  const GemmSetting& gemm;
  const CastSetting& cast;
  bool shares_columns;
};
Words words_of(const Copy& q, const Copy& qt) {
  return std::max(words_of(q.gemm, q.cast, q.shares_columns),
                  words_of(qt.gemm, qt.cast, qt.shares_columns));
}

// What is sent, in bytes an element, and reduced, as docs/communication-model.md lists it.
struct Traffic {
  double weight = 2;                             // each of FSDP's two gathers
  double x_forward = 2, x_backward = 0, dy = 2;  // of tensor parallelism
  Words x_by_tokens{};                           // a line: k words
  Words x_by_columns{}, dy_by_columns{};         // m
  Words dy_by_tokens{};                          // n
  Words w_column{}, w_row{};                     // k, n
  bool row_scales = false;                       // of a weight, which FSDP gathers
};
constexpr Traffic kBf16 = {};

Traffic traffic_of(const Recipe& recipe) {
  const GemmSetting& output = recipe.at(Gemm::kOutput);
  const GemmSetting& grad_input = recipe.at(Gemm::kGradInput);
  const GemmSetting& grad_weight = recipe.at(Gemm::kGradWeight);
  Traffic t;
  const auto is_gathered = [](const GemmSetting& gemm) {
    return gemm.is_fp8() && gemm.b.scaling == Scaling::kDynamic;
  };
  if (is_gathered(output) && is_gathered(grad_input)) t.weight = 1;
  // x in bf16 is there again in backward, a rank's fp8 copy is not.
  t.x_forward = output.is_fp8() ? 1 : 2;
  t.x_backward = !output.is_fp8() ? 0 : grad_weight.is_fp8() ? 1 : 2;
  // One copy serves both GEMMs where it has one scale; else both copies are sent, or bf16.
  const bool one_dy = grad_input.is_fp8() && grad_input.a == grad_weight.a &&
                      grad_input.a.granularity == Granularity::kTensor;
  t.dy = one_dy ? 1 : 2;
  t.x_by_tokens = words_of({output, output.a, false}, {grad_weight, grad_weight.b, true});
  t.x_by_columns = words_of({output, output.a, true}, {grad_weight, grad_weight.b, false});
  t.dy_by_tokens = words_of({grad_input, grad_input.a, false}, {grad_weight, grad_weight.a, true});
  t.dy_by_columns = words_of({grad_input, grad_input.a, true}, {grad_weight, grad_weight.a, false});
  t.w_column = words_of({output, output.b, false}, {grad_input, grad_input.b, true});
  t.w_row = words_of({output, output.b, true}, {grad_input, grad_input.b, false});
  t.row_scales = t.weight == 1 && output.b.granularity != Granularity::kTensor;
  return t;
}

double bytes_of(Words words, int64_t line) {
  return words == Words::kNone
             ? 0
             : kWordBytes * (words == Words::kOne ? 1 : static_cast<double>(line));
}

double elements(int64_t rows, int64_t columns) {
  return static_cast<double>(rows) * static_cast<double>(columns);
}

// Shards of rows that are no whole blocks: their ranks reduce the maxima of all blocks, and then each
// has all scales.
bool cuts_blocks(const NamedLinear& layer, const Recipe& recipe, int64_t ranks) {
  const int64_t rows = ceil_div(layer.out_features, ranks);
  return recipe.has_block_scales() && rows < layer.out_features && rows % kBlock != 0;
}

// "layers.7.attention.wq" as "layers.7": what fully_shard() of a block gathers at once.
std::string_view block_of(std::string_view fqn) {
  for (size_t begin = 0; begin < fqn.size();) {
    const size_t end = std::min(fqn.find('.', begin), fqn.size());
    const std::string_view part = fqn.substr(begin, end - begin);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == part.npos;
    if (number || part == "*") return fqn.substr(0, end);
    begin = end + 1;
  }
  return fqn;
}

std::string_view parent_of(std::string_view fqn) {
  const size_t dot = fqn.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : fqn.substr(0, dot);
}

// Ranks that lack rows send padding: all shards are as large as the first.
double padded_elements(const NamedLinear& layer, int64_t ranks) {
  return elements((layer.out_features + ranks - 1) / ranks * ranks, layer.in_features);
}

// What is sent for experts is the same in fp8, so that they are left out, whatever their name.
TensorSplit split_of(const NamedLinear& layer) {
  return layer.is_experts() ? TensorSplit::kWhole : tensor_split(layer.fqn);
}

bool fits(int64_t tp, int64_t of_host) {
  return of_host % tp == 0 || tp % of_host == 0;
}

Result<int64_t> hosts_of(const Parallelism& parallel) {
  const int64_t ranks = parallel.ranks();
  if (parallel.hosts == 0) {
    int64_t hosts = (ranks + kMostRanksOfHost - 1) / kMostRanksOfHost;
    while (ranks % hosts != 0 || !fits(parallel.tp, ranks / hosts)) ++hosts;
    return hosts;
  }
  if (parallel.hosts < 1 || parallel.hosts > ranks) {
    return fail(ErrorCode::kInvalidArgument,
                "hosts is {}, and fsdp {} times tp {} are {} ranks; choose 1 to {} hosts",
                parallel.hosts, parallel.fsdp, parallel.tp, ranks, ranks);
  }
  if (ranks % parallel.hosts != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "hosts {} does not divide the {} ranks of fsdp {} times tp {}; choose a divisor",
                parallel.hosts, ranks, parallel.fsdp, parallel.tp);
  }
  if (!fits(parallel.tp, ranks / parallel.hosts)) {
    return fail(ErrorCode::kInvalidArgument,
                "tp {} and the {} ranks of a host do not divide each other; choose another tp or "
                "hosts",
                parallel.tp, ranks / parallel.hosts);
  }
  return parallel.hosts;
}

}  // namespace

Result<RankLayout> layout_ranks(const Parallelism& parallel) {
  for (const auto& [what, value] : {std::pair("fsdp", parallel.fsdp), {"tp", parallel.tp}}) {
    if (value >= 1 && value <= kMaxRanks) continue;
    return fail(ErrorCode::kInvalidArgument, "{} is {}; it must be 1 to {}", what, value,
                kMaxRanks);
  }
  if (parallel.ranks() > kMaxRanks) {
    return fail(ErrorCode::kInvalidArgument, "fsdp {} times tp {} are more than {} ranks",
                parallel.fsdp, parallel.tp, kMaxRanks);
  }
  if (!(parallel.network_gbit >= 0 && parallel.network_gbit <= 1e6)) {
    return fail(ErrorCode::kInvalidArgument,
                "the network has {} Gbit/s; give what one rank's card has, e.g. 400",
                parallel.network_gbit);
  }
  const int64_t hosts = F8_TRY(hosts_of(parallel));
  const int64_t of_host = parallel.ranks() / hosts;
  RankLayout layout{.hosts = hosts};
  layout.tp = {parallel.tp, std::max<int64_t>(parallel.tp / of_host, 1)};
  layout.fsdp = {parallel.fsdp, parallel.tp > of_host ? parallel.fsdp : hosts};
  return layout;
}

double WireCost::Sent::exposed(double compute_us, double scale) const {
  return std::max(0.0, forward * scale - compute_us / 3) +
         std::max(0.0, backward * scale - compute_us * 2 / 3) + alone * scale;
}

Result<WireCost> WireCost::create(std::span<const NamedLinear> layers, int64_t tokens,
                                  const Recipe& recipe, const Parallelism& parallel,
                                  WireModel model) {
  WireCost cost;
  cost.layout_ = F8_TRY(layout_ranks(parallel));
  cost.model_ = std::move(model);
  const bool other_network = parallel.network_gbit != 0 && cost.layout_.hosts > 1;
  if (parallel.network_gbit != 0) cost.model_.network.gb_per_s = parallel.network_gbit / 8;
  for (const RankGroup group : {cost.layout_.fsdp, cost.layout_.tp}) {
    cost.is_prediction_ |= group.ranks > 1 && (other_network || !cost.model_.is_measured(group));
  }
  cost.layers_.resize(layers.size());
  if (parallel.fsdp > 1) cost.add_fsdp(layers, recipe);
  if (parallel.tp > 1) cost.add_tp(layers, tokens, recipe);
  if (parallel.ranks() > 1) cost.add_weight_amaxes(layers, recipe);
  return cost;
}

void WireCost::add_fsdp(std::span<const NamedLinear> layers, const Recipe& recipe) {
  const Traffic fp8 = traffic_of(recipe);
  const RankGroup group = layout_.fsdp;
  std::map<std::string_view, double> blocks;
  for (const NamedLinear& layer : layers) {
    if (layer.is_experts()) continue;
    blocks[block_of(layer.fqn)] += padded_elements(layer, group.ranks);
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    const NamedLinear& layer = layers[i];
    if (layer.is_experts()) continue;
    const double block = blocks[block_of(layer.fqn)];
    const double share = padded_elements(layer, group.ranks) / block;
    const double reduce = share * model_.us(Collective::kReduceScatter, group, block * kGradBytes);
    const auto gather = [&](double bytes) {
      return share * model_.us(Collective::kAllGather, group, block * bytes);
    };
    for (const auto& [sent, bytes] :
         {std::pair(&layers_[i].bf16, kBf16.weight), {&layers_[i].fp8, fp8.weight}}) {
      sent->forward += gather(bytes);
      sent->backward += gather(bytes) + reduce;
    }
    if (fp8.weight > 1) continue;
    layers_[i].cast_saved_us = elements(layer.out_features, layer.in_features) * kCastBytes /
                               (model_.cast_gb_per_s * 1e3) *
                               (1 - 1 / static_cast<double>(group.ranks));
  }
}

void WireCost::add_tp(std::span<const NamedLinear> layers, int64_t tokens, const Recipe& recipe) {
  const Traffic fp8 = traffic_of(recipe);
  const RankGroup group = layout_.tp;
  const auto us = [&](Collective collective, double bytes) {
    return bytes == 0 ? 0 : model_.us(collective, group, bytes);
  };
  using Reader = std::tuple<std::string_view, int64_t>;  // beside which layers, of what k
  const auto reader = [](const NamedLinear& layer) {
    return Reader{parent_of(layer.fqn), layer.in_features};
  };
  std::map<Reader, double> readers;
  for (const NamedLinear& layer : layers) {
    if (split_of(layer) == TensorSplit::kColumn) ++readers[reader(layer)];
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    const NamedLinear& layer = layers[i];
    const TensorSplit split = split_of(layer);
    if (split == TensorSplit::kWhole) continue;
    const bool column = split == TensorSplit::kColumn;
    const int64_t slice = column ? layer.out_features : layer.in_features;
    if (recipe.has_block_scales() && slice % kBlock != 0) {
      layers_[i].kept = f8::format(
          "kept in bf16: tensor parallelism leaves a rank {} of its {}, no whole blocks of {}",
          slice, column ? "out_features" : "in_features", kBlock);
    }
    const double share = column ? 1 / readers[reader(layer)] : 1;
    const int64_t m = tokens_of(layer, tokens);
    const double moved = elements(m, column ? layer.in_features : layer.out_features);
    const double reduced = share * us(Collective::kReduceScatter, moved * kOutputBytes);
    for (const auto& [sent, traffic] :
         {std::pair(&layers_[i].bf16, &kBf16), {&layers_[i].fp8, &fp8}}) {
      sent->alone += reduced;
      if (column) {
        sent->alone +=
            share * (us(Collective::kAllGather, moved * traffic->x_forward) +
                     us(Collective::kAllGather, moved * traffic->x_backward) +
                     us(Collective::kAllReduce, bytes_of(traffic->x_by_tokens, layer.in_features)));
      } else {
        sent->alone +=
            us(Collective::kAllGather, moved * traffic->dy) +
            us(Collective::kAllReduce, bytes_of(traffic->dy_by_tokens, layer.out_features));
      }
      // dy of a column-wise linear, and x of a row-wise one.
      const Words by_columns = column ? traffic->dy_by_columns : traffic->x_by_columns;
      sent->alone += us(Collective::kAllReduce, bytes_of(by_columns, m));
    }
  }
}

// Once a step, for all weights; a layer has the share of its words.
void WireCost::add_weight_amaxes(std::span<const NamedLinear> layers, const Recipe& recipe) {
  const Traffic fp8 = traffic_of(recipe);
  const bool sharded = layout_.fsdp.ranks > 1;
  const auto words = [&](const NamedLinear& layer) {
    if (layer.is_experts()) return 0.0;
    const TensorSplit split = layout_.tp.ranks > 1 ? split_of(layer) : TensorSplit::kWhole;
    if (!sharded && split == TensorSplit::kWhole) return 0.0;
    if (cuts_blocks(layer, recipe, layout_.fsdp.ranks)) {
      return kWordBytes *
             elements(ceil_div(layer.out_features, kBlock), ceil_div(layer.in_features, kBlock));
    }
    return split == TensorSplit::kRow ? bytes_of(fp8.w_row, layer.out_features)
                                      : bytes_of(fp8.w_column, layer.in_features);
  };
  const auto scales = [&](const NamedLinear& layer) {
    const bool gathered = !layer.is_experts() && sharded && fp8.row_scales &&
                          !cuts_blocks(layer, recipe, layout_.fsdp.ranks);
    return gathered ? kWordBytes * static_cast<double>(layer.out_features) : 0;
  };
  const RankGroup group = sharded ? layout_.fsdp : layout_.tp;
  const auto share_out = [&](Collective collective, const auto& bytes) {
    double all = 0;
    for (const NamedLinear& layer : layers) all += bytes(layer) * static_cast<double>(layer.count);
    if (all == 0) return;
    const double us = model_.us(collective, group, all);
    for (size_t i = 0; i < layers.size(); ++i) layers_[i].fp8.alone += us * bytes(layers[i]) / all;
  };
  share_out(Collective::kAllReduce, words);
  share_out(Collective::kAllGather, scales);
}

double WireCost::Layer::fp8_compute_us(double bf16_us, double speedup) const {
  const double whole_us = bf16_us / speedup;
  return whole_us - std::min(cast_saved_us, whole_us / 2);
}

double WireCost::Layer::speedup(double compute, double bf16_us, double scale, double saving) const {
  const auto with_saving = [saving](double bf16_sent, double fp8_sent) {
    return std::max(0.0, bf16_sent + saving * (fp8_sent - bf16_sent));
  };
  const Sent sent = {with_saving(bf16.forward, fp8.forward),
                     with_saving(bf16.backward, fp8.backward), with_saving(bf16.alone, fp8.alone)};
  const double fp8_us = fp8_compute_us(bf16_us, compute);
  return (bf16_us + bf16.exposed(bf16_us, scale)) / (fp8_us + sent.exposed(fp8_us, scale));
}

WiredSpeedup WireCost::speedup(size_t i, const SpeedupInterval& compute, Evidence evidence,
                               double bf16_ns) const {
  const Layer& layer = layers_[i];
  const double bf16_us = bf16_ns / 1e3;
  const double half = std::min(model_.half_width(), 0.9);
  WiredSpeedup out;
  out.speedup.speedup = layer.speedup(compute.speedup, bf16_us, 1, 1);
  out.speedup.lo = out.speedup.hi = out.speedup.speedup;
  for (const double scale : {1 - half, 1 + half}) {
    for (const double saving : {1 - half, 1 + half}) {
      out.speedup.lo = std::min(out.speedup.lo, layer.speedup(compute.lo, bf16_us, scale, saving));
      out.speedup.hi = std::max(out.speedup.hi, layer.speedup(compute.hi, bf16_us, scale, saving));
    }
  }
  out.share = {
      .bf16_us = layer.bf16.all(),
      .fp8_us = layer.fp8.all(),
      .bf16_exposed_us = layer.bf16.exposed(bf16_us, 1),
      .fp8_exposed_us = layer.fp8.exposed(layer.fp8_compute_us(bf16_us, compute.speedup), 1),
      .compute = compute,
      .compute_evidence = evidence,
      .is_prediction = is_prediction_};
  out.bf16_ns = bf16_ns + out.share.bf16_exposed_us * 1e3;
  return out;
}

std::string WireCost::describe() const {
  return f8::format("{} for fsdp {} and tp {} on {} host{}, wire times within {:.0f} %",
                    is_prediction_ ? "predicted" : "measured", layout_.fsdp.ranks, layout_.tp.ranks,
                    layout_.hosts, layout_.hosts == 1 ? "" : "s", 100 * model_.half_width());
}

}  // namespace f8::tuning_db
