#include "runtime/linear/plan/plan_casts.hpp"

#include <algorithm>

namespace f8::runtime {
namespace {

using codegen::ScaleMode;

using Tiles = ByRows<int32_t, kernels::kCastTile>;

// The tiles and the bytes of casts, of which each element takes `bytes`.
Tiles tiles_of(std::span<const CastOperand> operands) {
  Tiles tiles;
  for (const CastOperand& x : operands) {
    (x.rows == 0 ? tiles.of_step : tiles.fixed) +=
        static_cast<int32_t>(cast_tiles(std::max<int64_t>(x.rows, 1), x.cols));
  }
  return tiles;
}
ByRows<double, 1> bytes_of(std::span<const CastOperand> operands, double bytes) {
  ByRows<double, 1> all;
  for (const CastOperand& x : operands) {
    (x.rows == 0 ? all.of_step : all.fixed) +=
        static_cast<double>(std::max<int64_t>(x.rows, 1) * x.cols) * bytes;
  }
  return all;
}

// A launch's operands with the call's pointers; nothing is written but these.
class Operands {
 public:
  Operands(const std::vector<CastOperand>& from, const CallArguments& call) : count_(from.size()) {
    for (size_t i = 0; i < count_; ++i) std::construct_at(&list_[i], from[i].at(call));
  }
  operator std::span<const QuantizeOperand>() const { return {list_, count_}; }  // NOLINT

 private:
  union {
    QuantizeOperand list_[kernels::kMaxTensors];
  };
  size_t count_;
};

// Finds the operands' maxima, casts them, or does both, as the kernel's spec says.
struct CastLaunch {
  const Kernel* kernel;
  std::vector<CastOperand> operands;
  Ref sync = {};
  Ref sums = {};  // of the columns of dy
  // It is overlapped with the launch before by programmatic dependent launch.
  bool overlapped = false;
  Tiles neighbour = {};  // the blocks of the other of such two
  Status operator()(const LaunchTarget& to) const;
};

Status CastLaunch::operator()(const LaunchTarget& to) const {
  const auto& [context, call, stream, in_order] = to;
  const bool overlaps = overlapped && in_order;
  const Driver& driver = context.driver;
  const bool programmatic = context.options.programmatic_launch;
  const int sm_count = context.info.sm_count;
  const Operands all(operands, call);
  const auto* noop_flag = call.at<uint32_t>(Slot::kNoopFlag);
  if (const auto* amax = std::get_if<codegen::AmaxSpec>(&kernel->spec)) {
    auto args = amax_args(*amax, sm_count, all);
    args.noop_flag = noop_flag;
    return launch_amax(driver, *kernel, args, programmatic, stream);
  }
  const auto& spec = std::get<codegen::CastSpec>(kernel->spec);
  auto* words = call.at<uint8_t>(sync + (overlaps ? second_sync(sm_count) : 0));
  auto args = quantize_args(spec, sm_count, all, words);
  args.cast.noop_flag = noop_flag;
  args.cast.overlap = overlaps ? 1 : 0;
  args.cast.sums = call.at<float>(sums);
  const int64_t beside = in_order ? neighbour.at(call.m) : 0;
  return spec.one_launch ? launch_quantize(driver, *kernel, args, programmatic, stream, beside)
                         : launch_cast(driver, *kernel, args.cast, programmatic, stream, beside);
}

}  // namespace

CastOperand cast_operand(const FusedCast& fused, const TensorBuffers& at, Ref recorded) {
  const codegen::CastSpec& cast = fused.cast;
  CastOperand operand{.x = at.x, .rows = at.rows, .cols = at.cols};
  operand.partials = has_scale(cast, ScaleMode::kAxis) ? at.amax : at.partials;
  operand.row_amax = at.row_amax;
  operand.col_amax = at.col_amax;
  operand.block_amax = at.block_amax;
  operand.q = at.q;
  operand.qt = at.qt;
  operand.scale = cast.qt && cast.scale_qt == ScaleMode::kTensor ? at.qt_scale : at.q_scale;
  operand.inv_row = at.q_scale;
  operand.inv_col = at.qt_scale;
  if (fused.slot >= 0) {
    operand.delayed = word_at(Slot::kScale, fused.slot * kernels::kScaleStride);
    operand.recorded_amax = word_at(recorded, fused.slot);
  }
  if (fused.kept_scale) operand.delayed = at.kept_scale;
  operand.counters =
      Ref(Slot::kCounters) + 2 * static_cast<size_t>(fused.tensor) * sizeof(kernels::CastCounters);
  return operand;
}

ClearWords clear_amax(Ref begin, Ref end, int64_t rows) {
  const auto words = static_cast<int64_t>((end.offset() - begin.offset()) / sizeof(uint32_t));
  return {.words = begin, .count = words + rows, .and_m = rows == 0};
}

Result<std::span<const CastPlanner::Pass>> CastPlanner::load(CopySet copies, bool first_step) {
  const auto [at, is_new] = passes_.try_emplace({copies, first_step});
  if (!is_new) return at->second;
  const ContextOptions& options = context_.options();
  for (KernelPass& spec : kernels_.passes(copies, first_step)) {
    Pass pass{.spec = std::move(spec)};
    if (pass.spec.amax) pass.amax = F8_TRY(context_.kernel(*pass.spec.amax));
    pass.cast = F8_TRY(context_.kernel(pass.spec.cast));
    if (const auto& one = pass.spec.one_launch;
        one && (options.cooperative_launch || !codegen::is_cooperative(*one))) {
      pass.quantize = F8_TRY(context_.kernel(*one));
    }
    if (pass.spec.summing) pass.summing = F8_TRY(context_.kernel(*pass.spec.summing));
    at->second.push_back(std::move(pass));
  }
  return at->second;
}

// A pass may overlap the one before it where both have one launch each, of different tensors; and,
// where blocks wait for each other, are so small that all are resident.
std::vector<CastPlanner::Choice> CastPlanner::choose(std::span<const Pass> passes,
                                                     const CallTensors& tensors, int64_t m) const {
  const int sm_count = context_.device().sm_count;
  std::vector<Choice> all;
  bool single_before = false;
  bool waits_before = false;
  int64_t tiles_before = 0;
  for (size_t i = 0; i < passes.size(); ++i) {
    const KernelPass& spec = passes[i].spec;
    Choice choice;
    bool apart = true;  // from the tensors of the pass before
    int64_t tiles = 0;
    std::vector<QuantizeOperand> sizes;
    for (const FusedCast& cast : spec.casts) {
      const TensorBuffers& at = tensors.of(cast.tensor);
      const int64_t rows = at.rows == 0 ? m : at.rows;
      if (spec.amax && fits_tile_amax(*spec.amax, rows, at.cols)) {
        choice.tile_amaxes |= 1U << sizes.size();
      }
      sizes.push_back({.rows = rows, .cols = at.cols});
      tiles += cast_tiles(rows, at.cols);
      apart = apart && (i == 0 || std::ranges::count(passes[i - 1].spec.casts, cast.tensor,
                                                     &FusedCast::tensor) == 0);
    }
    if (passes[i].quantize != nullptr) {
      choice.launches = quantize_launches(*spec.one_launch, sm_count, sizes);
    }
    const bool single = !spec.amax || choice.launches == Launches::kOne;
    const bool waits = spec.amax && !codegen::scales_rows_alone(spec.cast);
    choice.overlapped =
        i > 0 && !all.back().overlapped && single_before && single && apart &&
        ((!waits_before && !waits) || tiles_before + tiles <= resident_quantize_blocks(sm_count));
    single_before = single;
    waits_before = waits;
    tiles_before = tiles;
    all.push_back(choice);
  }
  return all;
}

std::vector<CastOperand> CastPlanner::operands(const CastSection& section, const Pass& pass,
                                               const Choice& choice) const {
  std::vector<CastOperand> all;
  for (const FusedCast& fused : pass.spec.casts) {
    const TensorBuffers& at = section.tensors.of(fused.tensor);
    CastOperand operand = cast_operand(fused, at, section.recording ? shared_.first : Slot::kAmax);
    if (section.recording) operand.counters = {};
    if ((choice.tile_amaxes >> all.size() & 1) != 0) operand.tile_amax = at.tile_amax;
    all.push_back(operand);
  }
  return all;
}

void CastPlanner::add(LaunchRange& range, const CastSection& section, std::span<const Pass> passes,
                      std::span<const Choice> choices) const {
  bool cleared = false;
  for (size_t i = 0; i < passes.size(); ++i) {
    const auto& [spec, amax, cast, quantize, summing] = passes[i];
    CastLaunch launch{.kernel = quantize,
                      .operands = operands(section, passes[i], choices[i]),
                      .sync = shared_.sync,
                      .overlapped = choices[i].overlapped};
    const bool overlaps_next = i + 1 < passes.size() && choices[i + 1].overlapped;
    if (const size_t other = launch.overlapped ? i - 1 : i + 1;
        launch.overlapped || overlaps_next) {
      launch.neighbour = tiles_of(operands(section, passes[other], choices[other]));
    }
    const auto read = static_cast<double>(size_bytes(codegen::memory_type(spec.cast)));
    const double moved = read + (spec.cast.q ? 1 : 0) + (spec.cast.qt ? 1 : 0);
    const auto all = launch.operands;
    switch (choices[i].launches) {
      case Launches::kOne:
        range.add("quantize " + spec.operands, launch, bytes_of(all, moved));
        break;
      case Launches::kOneEach:
        for (size_t v = 0; v < all.size(); ++v) {
          launch.operands = {all[v]};
          range.add("quantize " + spec.casts[v].operand, launch, bytes_of(launch.operands, moved));
        }
        break;
      case Launches::kTwo:
        if (amax != nullptr) {
          const bool raises = (spec.amax->row || spec.amax->col) &&
                              choices[i].tile_amaxes != (1U << all.size()) - 1;
          if (raises && !std::exchange(cleared, true)) range.add("clear amax", section.clear);
          launch.kernel = amax;
          range.add("amax " + spec.operands, launch, bytes_of(all, read));
        }
        launch.kernel = cast;
        if (section.sums && summing != nullptr) {
          launch.kernel = summing;
          launch.sums = shared_.sums;
          range.has_sums = true;
        }
        range.add("cast " + spec.operands, launch, bytes_of(all, moved));
    }
  }
}

// A first step over ranks runs the casts of later steps: first for the maxima that they record,
// then with the scales of these over all ranks.
Status CastPlanner::add_first_step(LaunchRange& range, const CastSection& section,
                                   std::span<const Pass> passes,
                                   std::span<const Choice> choices) const {
  const size_t count = kernels_.slots.size();
  const Ref at = shared_.first;
  range.add("clear amax", ClearWords{at, static_cast<int64_t>(kFirstWords * count)});
  add(range, {.tensors = section.tensors, .clear = section.clear, .recording = true}, passes,
      choices);
  range.add("reduce amax", [at, count](const LaunchTarget& to) {
    return to.call.reduce(to.call.at<uint32_t>(at), count, to.call.ranks, to.stream);
  });
  const Kernel* kernel = F8_TRY(context_.kernel(codegen::ScaleUpdateSpec{}));
  range.add("first scales", [kernel, at, count, hold = kernels_.hold](const LaunchTarget& to) {
    auto* amax = to.call.at<uint32_t>(at);
    const auto args = first_scale_args(amax, amax + count, count, to.call.scales, hold);
    return launch_scale_update(to.context, *kernel, args, to.stream);
  });
  add(range, section, passes, choices);
  return {};
}

Result<LaunchList> CastPlanner::plan(const CastSection& section, CopySet copies, CallKind kind) {
  const bool over_ranks = (kind & kOverRanks) != 0;
  const auto passes = F8_TRY(load(copies, (kind & kFirstStep) != 0 && !over_ranks));
  LaunchList list(1);
  while (list.back().up_to_m < m_max_) {
    LaunchRange range;
    int64_t same = list.back().up_to_m + 1;
    const auto choices = choose(passes, section.tensors, same);
    for (int64_t other = m_max_ + 1; other - same > 1;) {
      const int64_t middle = same + (other - same) / 2;
      (choose(passes, section.tensors, middle) == choices ? same : other) = middle;
    }
    range.up_to_m = same;
    if (over_ranks) {
      F8_TRY(add_first_step(range, section, passes, choices));
    } else {
      add(range, section, passes, choices);
    }
    list.push_back(std::move(range));
  }
  return list;
}

}  // namespace f8::runtime
