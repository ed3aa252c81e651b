// Lists of matrices: the layout of the workspace, and the launches group by group.
#include "runtime/quantize/quantize_list.hpp"

#include <algorithm>
#include <limits>

#include "recipes/fp8_layout.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

using codegen::ScaleMode;

bool is_list(size_t count) {
  return count > static_cast<size_t>(kernels::kMaxTensors);
}

// An amax of a tensor alone leaves a word of each block. One that finds rows beside it raises a
// single word, which ranks can reduce.
std::optional<codegen::AmaxSpec> amax_of(const codegen::CastSpec& cast, size_t count,
                                         const ListOptions& options) {
  std::optional<codegen::AmaxSpec> amax = amax_before(cast);
  if (!amax) return amax;
  amax->list = is_list(count);
  if (options.given_maxima && amax->tensor && !amax->col) amax->row = true;
  return amax;
}

codegen::CastSpec cast_of(codegen::CastSpec cast, size_t count) {
  cast.one_launch = false;
  cast.list = is_list(count);
  return cast;
}

bool raises(const std::optional<codegen::AmaxSpec>& amax) {
  return amax && (amax->row || amax->col);
}

}  // namespace

std::vector<codegen::KernelSpec> QuantizeList::kernel_specs(const codegen::CastSpec& cast,
                                                            size_t count,
                                                            const ListOptions& options) {
  std::vector<codegen::KernelSpec> specs;
  const auto amax = amax_of(cast, count, options);
  if (amax) specs.emplace_back(*amax);
  specs.emplace_back(cast_of(cast, count));
  if (options.one_launch && amax && can_be_one_launch(cast)) {
    codegen::CastSpec one = cast;
    one.one_launch = true;
    specs.emplace_back(one);
  }
  return specs;
}

Result<QuantizeList> QuantizeList::plan(const std::shared_ptr<Context>& context,
                                        const codegen::CastSpec& cast,
                                        std::vector<MatrixSize> sizes, const ListOptions& options) {
  QuantizeList list;
  list.context_ = context;
  list.cast_ = cast_of(cast, sizes.size());
  list.options_ = options;
  list.sizes_ = std::move(sizes);
  const auto amax = amax_of(cast, list.sizes_.size(), options);
  const int64_t tiles = F8_TRY(list.lay_out(amax, context->device().sm_count));
  if (tiles > std::numeric_limits<int32_t>::max()) {
    return fail(ErrorCode::kInvalidArgument, "a list of {} matrices: more than 2^31 tiles",
                list.sizes_.size());
  }
  const auto specs = kernel_specs(cast, list.sizes_.size(), options);
  F8_TRY(context->compile(specs));
  for (const codegen::KernelSpec& spec : specs) {
    const auto* of_cast = std::get_if<codegen::CastSpec>(&spec);
    const Kernel*& kernel = of_cast == nullptr    ? list.amax_kernel_
                            : of_cast->one_launch ? list.one_launch_kernel_
                                                  : list.cast_kernel_;
    kernel = F8_TRY(context->kernel(spec));
  }
  return list;
}

// Gives each matrix its words, those that a run clears first. Every part begins at a multiple of 16
// bytes. The result is the number of tiles.
Result<int64_t> QuantizeList::lay_out(const std::optional<codegen::AmaxSpec>& amax, int sm_count) {
  const auto take = [](int64_t& words, int64_t count) {
    const int64_t at = words;
    words += ceil_div(count, 4) * 4;
    return at;
  };
  int64_t tiles = 0;
  int64_t others = 0;
  for (size_t i = 0; i < sizes_.size(); ++i) {
    const auto& [rows, cols] = sizes_[i];
    if (rows < 1 || cols < 1 || cols % 16 != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "matrix {} of a list is {} x {}: sizes are positive, columns a multiple of 16", i,
                  rows, cols);
    }
    if (rows > kMaxDim || cols > kMaxDim) {
      return fail(ErrorCode::kInvalidArgument, "matrix {} of a list is {} x {}: at most {} each", i,
                  rows, cols, kMaxDim);
    }
    tiles += cast_tiles(rows, cols);
    Words at{};
    if (amax && !options_.given_maxima) {
      if (amax->tensor && !raises(amax))
        at.partials = take(others, amax_partials(rows, cols, sm_count));
      if (amax->tensor && raises(amax)) at.partials = take(cleared_words_, 1);
      if (amax->row) at.row = take(cleared_words_, rows);
      if (amax->col) at.column = take(cleared_words_, cols);
      if (options_.tile_amax) {
        at.tiles = take(others, static_cast<int64_t>(tile_amax_bytes(*amax, rows, cols)) / 4);
      }
    }
    at_.push_back(at);
  }
  for (Words& at : at_) {
    at.tiles += cleared_words_;
    if (!raises(amax)) at.partials += cleared_words_;
  }
  words_ = cleared_words_ + others;
  return tiles;
}

size_t QuantizeList::groups() const {
  constexpr auto kMost = static_cast<size_t>(kernels::kMaxListed);
  return (sizes_.size() + kMost - 1) / kMost;
}

size_t QuantizeList::launches() const {
  return groups() * (amax_kernel_ != nullptr ? 2 : 1);
}

Status QuantizeList::check(const Run& run) const {
  const auto operands = run.operands;
  if (operands.size() != sizes_.size()) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "a list of {} matrices was given {}", sizes_.size(),
                operands.size());
  }
  const auto uses = [&](ScaleMode mode) { return codegen::has_scale(cast_, mode); };
  const bool vector_q = cast_.q && cast_.scale_q != ScaleMode::kTensor;
  const bool vector_qt = cast_.qt && cast_.scale_qt != ScaleMode::kTensor;
  for (size_t i = 0; i < operands.size(); ++i) {
    const QuantizeOperand& x = operands[i];
    if (x.rows < 0 || x.rows > sizes_[i].rows || x.cols != sizes_[i].cols) [[unlikely]] {
      return fail(ErrorCode::kInvalidArgument,
                  "matrix {} of a list is {} x {}, the plan was made for {} x {}", i, x.rows,
                  x.cols, sizes_[i].rows, sizes_[i].cols);
    }
    if (x.rows == 0) continue;
    if (cast_.shard && (x.first_row < 0 || x.first_row + x.rows > x.whole_rows)) [[unlikely]] {
      return fail(ErrorCode::kInvalidArgument,
                  "matrix {} of a list: {} rows from row {} on are none of a whole of {}", i,
                  x.rows, x.first_row, x.whole_rows);
    }
    struct Needed {
      const char* name;
      bool wanted;
      const void* pointer;
      size_t alignment;
    };
    const bool casts = run.casts;
    const Needed all[] = {{"x", true, x.x, 16},
                          {"q", casts && cast_.q, x.q, 16},
                          {"qt", casts && cast_.qt, x.qt, 16},
                          {"scale", casts && uses(ScaleMode::kTensor), x.scale, 4},
                          {"inv_row", casts && vector_q, x.inv_row, 16},
                          {"inv_col", casts && vector_qt, x.inv_col, 16},
                          {"delayed", casts && cast_.delayed, x.delayed, 4},
                          {"block_amax", cast_.shard, x.block_amax, 4}};
    for (const auto& [name, wanted, pointer, alignment] : all) {
      if (!wanted || (pointer != nullptr && is_aligned(pointer, alignment))) [[likely]] {
        continue;
      }
      return fail(ErrorCode::kInvalidArgument, "matrix {} of a list: {} is {}", i, name,
                  pointer == nullptr ? "null" : f8::format("not aligned to {} bytes", alignment));
    }
  }
  if (words_ > 0 && (run.words == nullptr || !is_aligned(run.words))) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "a list's workspace is {}",
                run.words == nullptr ? "null; see workspace_bytes()" : "not aligned to 16 bytes");
  }
  return {};
}

bool QuantizeList::has_tile_amax(const QuantizeOperand& x) const {
  return options_.tile_amax && amax_kernel_ != nullptr &&
         fits_tile_amax(std::get<codegen::AmaxSpec>(amax_kernel_->spec), x.rows, x.cols);
}

// Gives the matrices of a group that have rows, with the places of their maxima.
size_t QuantizeList::take_group(const Run& run, size_t group, Group& out) const {
  const size_t first = sizes_.size() * group / groups();
  const size_t end = sizes_.size() * (group + 1) / groups();
  size_t count = 0;
  for (size_t i = first; i < end; ++i) {
    if (run.operands[i].rows == 0) continue;
    QuantizeOperand& x = out[count++] = run.operands[i];
    x.tile_amax = nullptr;
    if (options_.given_maxima) continue;
    const Words& at = at_[i];
    x.partials = run.words + at.partials;
    x.row_amax = run.words + at.row;
    x.col_amax = run.words + at.column;
    if (has_tile_amax(x)) x.tile_amax = reinterpret_cast<uint16_t*>(run.words + at.tiles);
  }
  return count;
}

bool QuantizeList::is_one_launch(const Run& run) const {
  if (one_launch_kernel_ == nullptr || run.sync == nullptr || groups() != 1) return false;
  Group group;
  const std::span<const QuantizeOperand> all(group.data(), take_group(run, 0, group));
  if (all.size() > static_cast<size_t>(kernels::kMaxTensors)) return false;
  const auto& spec = std::get<codegen::CastSpec>(one_launch_kernel_->spec);
  if (codegen::is_cooperative(spec) && !context_->options().cooperative_launch) return false;
  return quantize_launches(spec, context_->device().sm_count, all) == Launches::kOne;
}

size_t QuantizeList::launches(std::span<const QuantizeOperand> operands) const {
  const auto has_rows = [](const QuantizeOperand& x) { return x.rows > 0; };
  if (std::ranges::none_of(operands, has_rows)) return 0;
  int any = 0;
  return is_one_launch({.operands = operands, .sync = &any}) ? 1 : launches();
}

template <class AmaxArgs, class CastArgs>
Status QuantizeList::run_groups(const Run& run) const {
  const Driver& driver = context_->state().driver;
  const bool programmatic = context_->options().programmatic_launch;
  const int sm_count = context_->device().sm_count;
  Group group;
  for (size_t g = 0; g < groups(); ++g) {
    const std::span<const QuantizeOperand> some(group.data(), take_group(run, g, group));
    if (some.empty()) continue;
    if (amax_kernel_ != nullptr && run.finds) {
      const auto& spec = std::get<codegen::AmaxSpec>(amax_kernel_->spec);
      auto args = amax_args<AmaxArgs>(spec, sm_count, some);
      args.noop_flag = run.noop_flag;
      F8_TRY(launch_amax(driver, *amax_kernel_, args, programmatic, run.stream));
    }
    if (!run.casts) continue;
    auto args = cast_args<CastArgs>(cast_, sm_count, some);
    args.noop_flag = run.noop_flag;
    for (size_t i = 0; options_.given_maxima && i < some.size(); ++i) {
      kernels::CastTensor& tensor = args.tensors[i];
      if (tensor.partial_count > 0) tensor.partial_count = 1;
    }
    F8_TRY(launch_cast(driver, *cast_kernel_, args, programmatic, run.stream));
  }
  return {};
}

Status QuantizeList::start(const Run& run) const {
  F8_TRY(check(run));
  const auto has_rows = [](const QuantizeOperand& x) { return x.rows > 0; };
  if (std::ranges::none_of(run.operands, has_rows)) return {};
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  if (run.finds && run.casts && is_one_launch(run)) {
    Group group;
    const std::span<const QuantizeOperand> all(group.data(), take_group(run, 0, group));
    const auto& spec = std::get<codegen::CastSpec>(one_launch_kernel_->spec);
    const auto args = quantize_args(spec, context_->device().sm_count, all, run.sync);
    return launch_quantize(state.driver, *one_launch_kernel_, args,
                           context_->options().programmatic_launch, run.stream);
  }
  const auto raises_words = [&](const QuantizeOperand& x) {
    return x.rows > 0 && !has_tile_amax(x);
  };
  if (run.finds && cleared_words_ > 0 && std::ranges::any_of(run.operands, raises_words)) {
    F8_TRY(set_words(state.driver, run.words, 0, static_cast<size_t>(cleared_words_), run.stream));
  }
  return cast_.list ? run_groups<kernels::AmaxListArgs, kernels::CastListArgs>(run)
                    : run_groups<kernels::AmaxArgs, kernels::CastArgs>(run);
}

Status QuantizeList::run(std::span<const QuantizeOperand> operands, void* workspace, Stream stream,
                         const uint32_t* noop_flag, void* sync) const {
  return start({.operands = operands,
                .words = static_cast<uint32_t*>(workspace),
                .noop_flag = noop_flag,
                .sync = sync,
                .stream = stream,
                .finds = true,
                .casts = true});
}

Status QuantizeList::find(std::span<const QuantizeOperand> operands, Stream stream) const {
  return start({.operands = operands, .stream = stream, .finds = true});
}

Status QuantizeList::cast(std::span<const QuantizeOperand> operands, Stream stream) const {
  return start({.operands = operands, .stream = stream, .casts = true});
}

}  // namespace f8::runtime
