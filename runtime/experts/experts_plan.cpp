// An expert linear is planned here: its casts, its GEMMs, and where a call's copies lie.
#include <limits>
#include <tuple>

#include "recipes/fp8_layout.hpp"
#include "runtime/experts/experts.hpp"
#include "runtime/experts/first_scale.hpp"
#include "runtime/experts/group_layout.hpp"
#include "runtime/gemm/choose.hpp"

namespace f8::runtime {
namespace {

// The copies that a linear makes of each tensor: q and qt.
constexpr CopySet kCopySets[3][2] = {{kXq, kXqt}, {kWq, kWqt}, {kDyq, kDyqt}};

Status check_recipe(const Recipe& recipe, Dtype tensor_dtype) {
  F8_TRY(recipe.validate());
  for (const Gemm gemm : kGemms) {
    const GemmSetting& setting = recipe.at(gemm);
    if (!setting.is_fp8() && tensor_dtype != Dtype::kF32) continue;
    if (!setting.is_fp8()) {
      return fail(
          ErrorCode::kUnsupported,
          "recipe {}, GEMM {}, f32 tensors: expert linears multiply tensors of bf16 and f16 "
          "in high precision; cast them, or use another recipe",
          recipe.name, to_string(gemm));
    }
    const Granularity blocks =
        gemm == Gemm::kGradWeight ? Granularity::kBlock1x128 : Granularity::kBlock128x128;
    if (is_block(setting.b.granularity) && setting.b.granularity != blocks) {
      return fail(ErrorCode::kUnsupported,
                  "recipe {}, GEMM {}: b has scales of {}; expert linears have those of {} there",
                  recipe.name, to_string(gemm), to_string(setting.b.granularity),
                  to_string(blocks));
    }
  }
  return {};
}

// Rows of all experts' weights, and tiles of a launch, are counted in 32 bits.
Status check_size(const ExpertsDesc& desc) {
  const auto [m, n, k] = desc.shape;
  const auto tiles = [](int64_t extent) { return ceil_div(extent, kernels::kCastTile); };
  const int64_t limit = std::numeric_limits<int32_t>::max();
  if (desc.experts * n <= limit && desc.experts * tiles(n) * tiles(k) <= limit &&
      (tiles(m) + desc.experts) * tiles(std::max(n, k)) <= limit) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              "{} experts of shape {}: more than 2^31 rows of weights or tiles of 128 by 128",
              desc.experts, to_string(desc.shape));
}

constexpr runtime::Tensor kTensors[] = {runtime::Tensor::kInput, runtime::Tensor::kWeight,
                                        runtime::Tensor::kGradOutput};
constexpr CopyBlock kCopyBlocks[] = {CopyBlock::kScratch, CopyBlock::kQ, CopyBlock::kQt};

}  // namespace

size_t Experts::layout_bytes() const {
  return GroupLayoutPlan::bytes_of(layout_);
}

const GemmConfig& Experts::config(Gemm gemm) const {
  if (gemm == Gemm::kGradWeight) return grad_weight_[0]->config();
  return gemms_[static_cast<size_t>(gemm)]->config();
}
Result<std::shared_ptr<const Experts>> Experts::plan(const std::shared_ptr<Context>& context,
                                                     const ExpertsDesc& desc) {
  F8_TRY(check_recipe(desc.recipe, desc.tensor_dtype));
  const kernels::GroupLayout layout = F8_TRY(group_layout_of(desc.shape.m, desc.experts));
  LinearDesc of_expert;
  of_expert.shape = desc.shape;
  of_expert.recipe = desc.recipe;
  of_expert.tensor_dtype = desc.tensor_dtype;
  of_expert.grad_weight_dtype = desc.grad_weight_dtype;
  of_expert.accumulate_grad_weight = desc.accumulate_grad_weight;
  of_expert.needs_grad_input = desc.needs_grad_input;
  of_expert.needs_grad_weight = desc.needs_grad_weight;
  of_expert.non_finite = desc.non_finite;
  of_expert.sm_limit = desc.sm_limit;
  const LinearKernels linear = F8_TRY(linear_kernels(of_expert));
  F8_TRY(check_size(desc));
  std::shared_ptr<Experts> experts(new Experts(context, desc, layout));
  experts->slots_ = linear.slots;
  if (!linear.slots.empty()) {
    experts->scale_update_ = F8_TRY(context->kernel(codegen::ScaleUpdateSpec{}));
  }
  F8_TRY(experts->plan_casts(linear));
  F8_TRY(experts->plan_gemms(linear));
  experts->lay_out();
  return experts;
}

Status Experts::plan_casts(const LinearKernels& linear) {
  const auto [m, n, k] = desc_.shape;
  const int64_t rows[] = {m, desc_.experts * n, m};
  const int64_t cols[] = {k, k, n};
  constexpr kernels::RowSource kMatrix = kernels::RowSource::kMatrix;
  const kernels::RowSource of_weight = desc_.weight_pair ? kernels::RowSource::kPair : kMatrix;
  const kernels::RowSource sources[] = {desc_.input, of_weight, desc_.grad_output};
  const auto maxima_of = [this](size_t i) {
    return is_over_ranks(static_cast<runtime::Tensor>(i)) ? Maxima::kRaised : Maxima::kOwn;
  };
  std::vector<codegen::KernelSpec> specs;
  const auto each = [&](const auto& work) -> Status {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      for (unsigned made = 1; made <= (kQ | kQt); ++made) {
        if (made == (kQ | kQt) && is_recomputed(static_cast<runtime::Tensor>(i))) continue;
        const CopySet copies =
            ((made & kQ) != 0 ? kCopySets[i][0] : 0U) | ((made & kQt) != 0 ? kCopySets[i][1] : 0U);
        for (const KernelPass& pass : linear.passes(copies, false)) {
          codegen::CastSpec spec = pass.cast;
          spec.group = true;
          spec.source = sources[i];
          F8_TRY(work(i, made, spec, pass.casts.front().slot));
        }
      }
    }
    return {};
  };
  F8_TRY(each([&](size_t i, unsigned, const codegen::CastSpec& spec, int) -> Status {
    std::ranges::move(GroupCastPlan::specs(spec, rows[i] / desc_.experts, cols[i], maxima_of(i)),
                      std::back_inserter(specs));
    return {};
  }));
  for (size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].copies = linear.copies[i];
    tensors_[i].rows = rows[i];
    tensors_[i].cols = cols[i];
  }
  F8_TRY(check_over_ranks());
  F8_TRY(context_->compile(specs));  // side by side
  const Status planned =
      each([&](size_t i, unsigned made, const codegen::CastSpec& spec, int slot) -> Status {
        tensors_[i].casts[made].push_back(
            {F8_TRY(GroupCastPlan::create(context_, spec, rows[i] / desc_.experts, cols[i],
                                          maxima_of(i))),
             slot});
        return {};
      });
  F8_TRY(planned);
  return {};
}

GroupedDesc Experts::grouped(const GemmDesc& gemm) const {
  const GemmSetting& setting = desc_.recipe.at(gemm.gemm);
  return {.gemm = gemm,
          .layout = layout_,
          .one_scale_a = setting.a.scaling == Scaling::kDelayed,
          .one_scale_b = setting.b.scaling == Scaling::kDelayed};
}

bool Experts::is_recomputed(runtime::Tensor tensor) const {
  return tensor == runtime::Tensor::kInput ? desc_.recompute_input
                                           : tensor == runtime::Tensor::kWeight &&
                                                 desc_.recompute_weight && desc_.needs_grad_input;
}

bool Experts::is_over_ranks(runtime::Tensor tensor) const {
  return tensor == runtime::Tensor::kInput
             ? desc_.input_over_ranks
             : tensor == runtime::Tensor::kGradOutput && desc_.grad_output_over_ranks;
}

Status Experts::check_over_ranks() const {
  for (const auto& [tensor, name, cols] : {std::tuple{runtime::Tensor::kInput, "x", desc_.shape.k},
                                           {runtime::Tensor::kGradOutput, "dy", desc_.shape.n}}) {
    if (!is_over_ranks(tensor)) continue;
    const Copies& copies = at(tensor).copies;
    const auto delayed = [](const std::optional<CastSetting>& copy) {
      return copy && copy->scaling == Scaling::kDelayed;
    };
    if (copies.q && copies.qt && delayed(copies.q) != delayed(copies.qt)) {
      return fail(
          ErrorCode::kUnsupported,
          "float8_experts_desc.{}_over_ranks is set, and recipe {} has delayed scales of {} "
          "beside others",
          name, desc_.recipe.name, name);
    }
    if (copies.q && is_block(copies.q->granularity) && cols % kernels::kCastTile != 0) {
      return fail(ErrorCode::kUnsupported,
                  "float8_experts_desc.{}_over_ranks is set, and recipe {} has scales of {} of {}, "
                  "which {} columns cut: ranks have whole 128s",
                  name, desc_.recipe.name, to_string(copies.q->granularity), name, cols);
    }
  }
  return {};
}

Result<GemmConfig> Experts::choose(const GroupedDesc& desc) const {
  if (const auto& config = desc_.configs[static_cast<size_t>(desc.gemm.gemm)]) return *config;
  const auto table = context_->table();
  return F8_TRY(choose_grouped(table.get(), desc, context_->device().sm_count)).config;
}

Status Experts::plan_gemms(const LinearKernels& linear) {
  for (size_t i = 0; i < gemms_.size(); ++i) {
    if (!linear.gemms[i]) continue;
    const GroupedDesc desc = grouped(*linear.gemms[i]);
    const GemmConfig config = F8_TRY(choose(desc));
    gemms_[i] = F8_TRY(MGroupedGemm::create(context_, desc, config));
  }
  constexpr auto kGradWeight = static_cast<size_t>(Gemm::kGradWeight);
  for (const bool add : {false, true}) {
    const auto& gemm = add ? linear.adding[kGradWeight] : linear.gemms[kGradWeight];
    if (!gemm) continue;
    GroupedDesc desc = grouped(*gemm);
    desc.gemm.shape.n = weight_rows();
    const GemmConfig config = F8_TRY(choose(desc));
    grad_weight_[add ? 1 : 0] = F8_TRY(KGroupedGemm::create(context_, desc, config));
  }
  return {};
}

int64_t Experts::row_scales(const Tensor& tensor) const {
  switch (tensor.copies.q->granularity) {
    case Granularity::kBlock1x128:
      return ceil_div(tensor.cols, kernels::kCastTile) *
             scale_rows_of_groups(desc_.shape.m, desc_.experts);
    case Granularity::kBlock128x128:
      return desc_.experts * kernels::scales_2d(desc_.shape.n, tensor.cols);
    default:
      return tensor.rows;
  }
}

int64_t Experts::column_scales(const Tensor& tensor) const {
  switch (tensor.copies.qt->granularity) {
    case Granularity::kBlock1x128:
      return columns_of_groups(desc_.shape.m, desc_.experts) / kernels::kCastTile *
             kernels::padded_scales(tensor.cols);
    case Granularity::kBlock128x128:
      return desc_.experts * kernels::scales_2d(tensor.cols, desc_.shape.n);
    default:
      return desc_.experts * tensor.cols;
  }
}

void Experts::lay_out() {
  const auto floats = [](int64_t count) { return static_cast<size_t>(count) * sizeof(float); };
  const int64_t experts = desc_.experts;
  const size_t scales = floats(experts * kernels::kScaleStride);
  for (const auto tensor : kTensors) {
    Tensor& t = at(tensor);
    size_t words = 0;
    for (const auto& casts : t.casts) {
      for (const Cast& cast : casts) words = std::max(words, cast.plan.words(t.rows, experts));
    }
    Arena scratch, q, qt;
    t.words = scratch.take(words * sizeof(uint32_t));
    t.first = scratch.take(slots_.empty() ? 0 : FirstScale::kBytes);
    if (t.copies.q) {
      t.q = q.take(fp8_copy_bytes(t.rows, t.cols));
      t.q_scale = q.take(scales);
      t.row_inverse = q.take(floats(row_scales(t)));
    }
    if (t.copies.qt) {
      t.qt = qt.take(tensor == runtime::Tensor::kWeight
                         ? static_cast<size_t>(experts) * fp8_copy_bytes(t.cols, desc_.shape.n)
                         : fp8_copy_bytes(t.cols, columns_of_groups(desc_.shape.m, experts)));
      t.qt_scale = qt.take(scales);
      t.column_inverse = qt.take(floats(column_scales(t)));
    }
    block_bytes_.at(tensor, CopyBlock::kScratch) = scratch.size();
    block_bytes_.at(tensor, CopyBlock::kQ) = q.size();
    block_bytes_.at(tensor, CopyBlock::kQt) = qt.size();
  }
  Arena saved;
  for (const auto tensor : {runtime::Tensor::kInput, runtime::Tensor::kWeight}) {
    if (!saves(tensor)) continue;
    const size_t at = saved.take(block_bytes(tensor, CopyBlock::kQt));
    if (tensor == runtime::Tensor::kWeight) saved_weight_ = at;
  }
  saved_bytes_ = saved.size();
  // A call of an expert linear itself has one workspace, whether it is given a weight in fp8 or not.
  IntervalArena forward, backward;
  forward_ = add_forward(forward, 0, false);
  backward_ = add_backward(backward, 0, false);
  for (const auto& [blocks, arena] : {std::pair(&forward_, &forward), {&backward_, &backward}}) {
    arena->place();
    place_blocks(*blocks, *arena);
  }
  workspace_bytes_ = std::max(forward.size(), backward.size());
}

BlockOffsets Experts::add_forward(IntervalArena& arena, int launch, bool given_weight) const {
  BlockOffsets out;
  const int gemm = launch + kForwardLaunches - 1;
  const auto add = [&](runtime::Tensor tensor, CopyBlock block, int first, int last) {
    out.at(tensor, block) = arena.add(block_bytes(tensor, block), first, last);
  };
  int cast = launch;
  for (const auto tensor : {runtime::Tensor::kInput, runtime::Tensor::kWeight}) {
    const bool casts = tensor == runtime::Tensor::kInput || !given_weight;
    if (casts) add(tensor, CopyBlock::kScratch, cast, cast);
    if (casts) add(tensor, CopyBlock::kQ, cast, gemm);
    ++cast;
  }
  return out;
}

BlockOffsets Experts::add_backward(IntervalArena& arena, int launch, bool given_weight,
                                   unsigned parts) const {
  BlockOffsets out;
  const auto add = [&](runtime::Tensor tensor, CopyBlock block, int first, int last) {
    out.at(tensor, block) = arena.add(block_bytes(tensor, block), launch + first, launch + last);
  };
  constexpr auto kDy = runtime::Tensor::kGradOutput;
  constexpr int kCastDyLaunch = 0, kCastWLaunch = 1, kDx = 2, kCastXLaunch = 3, kDw = 4;
  if ((parts & kCastDy) != 0) add(kDy, CopyBlock::kScratch, kCastDyLaunch, kCastDyLaunch);
  if (parts == kAllParts) {
    add(kDy, CopyBlock::kQ, kCastDyLaunch, kDx);
    add(kDy, CopyBlock::kQt, kCastDyLaunch, kDw);
  }
  const auto add_again = [&](runtime::Tensor tensor, Gemm gemm, int cast, int last) {
    if (!recomputes(tensor) || (parts & part_of(gemm)) == 0) return;
    add(tensor, CopyBlock::kScratch, cast, cast);
    add(tensor, CopyBlock::kQt, cast, last);
  };
  if (!given_weight) add_again(runtime::Tensor::kWeight, Gemm::kGradInput, kCastWLaunch, kDx);
  add_again(runtime::Tensor::kInput, Gemm::kGradWeight, kCastXLaunch, kDw);
  return out;
}

void place_blocks(BlockOffsets& blocks, const IntervalArena& arena) {
  for (const auto tensor : kTensors) {
    for (const auto block : kCopyBlocks) {
      auto& at = blocks.at(tensor, block);
      if (at) at = arena.at(*at);
    }
  }
}

void add_blocks(BlockPlaces& places, const BlockOffsets& blocks, const float8_buffer& workspace) {
  for (const auto tensor : kTensors) {
    for (const auto block : kCopyBlocks) {
      const auto& at = blocks.at(tensor, block);
      if (at) places.at(tensor, block) = static_cast<uint8_t*>(workspace.data) + *at;
    }
  }
}

void Experts::add_saved(BlockPlaces& places, const float8_buffer& saved) const {
  if (saved.data == nullptr) return;
  auto* const at = static_cast<uint8_t*>(saved.data);
  if (saves(runtime::Tensor::kInput)) places.at(runtime::Tensor::kInput, CopyBlock::kQt) = at;
  if (saves(runtime::Tensor::kWeight)) {
    places.at(runtime::Tensor::kWeight, CopyBlock::kQt) = at + saved_weight_;
  }
}

BlockPlaces Experts::forward_places(const ExpertsForwardCall& call) const {
  BlockPlaces out;
  add_blocks(out, forward_, call.workspace);
  add_saved(out, call.saved);
  return out;
}

BlockPlaces Experts::backward_places(const ExpertsBackwardCall& call) const {
  BlockPlaces out;
  add_blocks(out, backward_, call.workspace);
  add_saved(out, call.saved);
  return out;
}

}  // namespace f8::runtime
