// Lists of matrices: sharing out the workspace, and launching group by group.
#include "runtime/quantize/quantize_list.hpp"

#include <algorithm>
#include <array>
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

std::optional<codegen::AmaxSpec> amax_of(const codegen::CastSpec& cast, size_t count) {
  std::optional<codegen::AmaxSpec> amax = amax_before(cast);
  if (amax) amax->list = is_list(count);
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
                                                            size_t count) {
  std::vector<codegen::KernelSpec> specs;
  if (const auto amax = amax_of(cast, count)) specs.emplace_back(*amax);
  specs.emplace_back(cast_of(cast, count));
  return specs;
}

Result<QuantizeList> QuantizeList::plan(const std::shared_ptr<Context>& context,
                                        const codegen::CastSpec& cast,
                                        std::vector<MatrixSize> sizes) {
  QuantizeList list;
  list.context_ = context;
  list.cast_ = cast_of(cast, sizes.size());
  list.sizes_ = std::move(sizes);
  const auto amax = amax_of(cast, list.sizes_.size());
  const int sm_count = context->device().sm_count;
  // Every part begins at a multiple of 16 bytes.
  const auto take = [&](int64_t count) {
    const int64_t at = list.words_;
    list.words_ += ceil_div(count, 4) * 4;
    return at;
  };
  int64_t tiles = 0;
  for (size_t i = 0; i < list.sizes_.size(); ++i) {
    const auto& [rows, cols] = list.sizes_[i];
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
    if (amax && amax->tensor) {
      at.partials = take(raises(amax) ? 1 : amax_partials(rows, cols, sm_count));
    }
    if (amax && amax->row) at.row = take(rows);
    if (amax && amax->col) at.column = take(cols);
    list.at_.push_back(at);
  }
  if (tiles > std::numeric_limits<int32_t>::max()) {
    return fail(ErrorCode::kInvalidArgument, "a list of {} matrices: more than 2^31 tiles",
                list.sizes_.size());
  }
  F8_TRY(context->compile(kernel_specs(cast, list.sizes_.size())));
  if (amax) list.amax_kernel_ = F8_TRY(context->kernel(*amax));
  list.cast_kernel_ = F8_TRY(context->kernel(list.cast_));
  return list;
}

size_t QuantizeList::groups() const {
  constexpr auto kMost = static_cast<size_t>(kernels::kMaxListed);
  return (sizes_.size() + kMost - 1) / kMost;
}

size_t QuantizeList::launches() const {
  return groups() * (amax_kernel_ != nullptr ? 2 : 1);
}

Status QuantizeList::check(std::span<const QuantizeOperand> operands, const void* workspace) const {
  if (operands.size() != sizes_.size()) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "a list of {} matrices was given {}", sizes_.size(),
                operands.size());
  }
  const auto uses = [&](ScaleMode mode) { return codegen::has_scale(cast_, mode); };
  const bool vector_q = cast_.q && cast_.scale_q != ScaleMode::kTensor;
  const bool vector_qt = cast_.qt && cast_.scale_qt != ScaleMode::kTensor;
  for (size_t i = 0; i < operands.size(); ++i) {
    const QuantizeOperand& x = operands[i];
    if (x.rows != sizes_[i].rows || x.cols != sizes_[i].cols) [[unlikely]] {
      return fail(ErrorCode::kInvalidArgument,
                  "matrix {} of a list is {} x {}, the plan was made for {} x {}", i, x.rows,
                  x.cols, sizes_[i].rows, sizes_[i].cols);
    }
    struct Needed {
      const char* name;
      bool wanted;
      const void* pointer;
      size_t alignment;
    };
    const Needed all[] = {{"x", true, x.x, 16},
                          {"q", cast_.q, x.q, 16},
                          {"qt", cast_.qt, x.qt, 16},
                          {"scale", uses(ScaleMode::kTensor), x.scale, 4},
                          {"inv_row", vector_q, x.inv_row, 16},
                          {"inv_col", vector_qt, x.inv_col, 16},
                          {"delayed", cast_.delayed, x.delayed, 4}};
    for (const auto& [name, wanted, pointer, alignment] : all) {
      if (!wanted || (pointer != nullptr && is_aligned(pointer, alignment))) [[likely]] {
        continue;
      }
      return fail(ErrorCode::kInvalidArgument, "matrix {} of a list: {} is {}", i, name,
                  pointer == nullptr ? "null" : f8::format("not aligned to {} bytes", alignment));
    }
  }
  if (words_ > 0 && (workspace == nullptr || !is_aligned(workspace))) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "a list's workspace is {}",
                workspace == nullptr ? "null; see workspace_bytes()" : "not aligned to 16 bytes");
  }
  return {};
}

template <class AmaxArgs, class CastArgs>
Status QuantizeList::run_groups(std::span<const QuantizeOperand> operands, uint32_t* words,
                                const uint32_t* noop_flag, Stream stream) const {
  const Driver& driver = context_->state().driver;
  const bool programmatic = context_->options().programmatic_launch;
  const int sm_count = context_->device().sm_count;
  std::array<QuantizeOperand, kernels::kMaxListed> group;
  for (size_t g = 0; g < groups(); ++g) {
    const size_t first = operands.size() * g / groups();
    const size_t count = operands.size() * (g + 1) / groups() - first;
    for (size_t i = 0; i < count; ++i) {
      const Words& at = at_[first + i];
      group[i] = operands[first + i];
      group[i].partials = words + at.partials;
      group[i].tile_amax = nullptr;
      group[i].row_amax = words + at.row;
      group[i].col_amax = words + at.column;
    }
    const std::span<const QuantizeOperand> some(group.data(), count);
    if (amax_kernel_ != nullptr) {
      const auto& spec = std::get<codegen::AmaxSpec>(amax_kernel_->spec);
      auto args = amax_args<AmaxArgs>(spec, sm_count, some);
      args.noop_flag = noop_flag;
      F8_TRY(launch_amax(driver, *amax_kernel_, args, programmatic, stream));
    }
    auto args = cast_args<CastArgs>(cast_, sm_count, some);
    args.noop_flag = noop_flag;
    F8_TRY(launch_cast(driver, *cast_kernel_, args, programmatic, stream));
  }
  return {};
}

Status QuantizeList::run(std::span<const QuantizeOperand> operands, void* workspace, Stream stream,
                         const uint32_t* noop_flag) const {
  F8_TRY(check(operands, workspace));
  if (operands.empty()) return {};
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  auto* words = static_cast<uint32_t*>(workspace);
  if (amax_kernel_ != nullptr && raises(std::get<codegen::AmaxSpec>(amax_kernel_->spec))) {
    F8_TRY(state.driver.check(state.driver.memset_d32_async(reinterpret_cast<CUdeviceptr>(words), 0,
                                                            static_cast<size_t>(words_), stream),
                              "cuMemsetD32Async"));
  }
  return cast_.list
             ? run_groups<kernels::AmaxListArgs, kernels::CastListArgs>(operands, words, noop_flag,
                                                                        stream)
             : run_groups<kernels::AmaxArgs, kernels::CastArgs>(operands, words, noop_flag, stream);
}

}  // namespace f8::runtime
