#include "runtime/gemm/m_grouped.hpp"

#include <algorithm>

#include "runtime/device/tensor_map.hpp"
#include "runtime/gemm/generated.hpp"
#include "runtime/gemm/provider.hpp"

namespace f8::runtime {
namespace {

using codegen::ScaleMode;
using kernels::u32;

// The most tiles of rows that a layout of m rows may have.
int64_t most_row_tiles(int64_t m, int64_t groups, int64_t tile_rows) {
  return m / tile_rows + std::min(groups, m);
}

kernels::GroupedGemmArgs arguments(const GroupedDesc& desc, const GemmConfig& config, Shape own,
                                   const MGroupedCall& call) {
  const bool axis = desc.gemm.scale == ScaleMode::kAxis;
  const bool rows_a = axis && !desc.gemm.scalar_a;
  const bool rows_b = axis && !desc.gemm.scalar_b;
  const bool block = is_block(desc.gemm.scale);
  const int64_t blocks_stride = kernels::padded_scales(ceil_div(own.k, kernels::kCastTile));
  const auto* words = static_cast<const int32_t*>(call.layout);
  const int32_t table = config.tile_m / kernels::kRowTileStep - 1;
  kernels::GroupedGemmArgs args{};
  args.problems[0] = {.inv_scale_a = call.inv_scale_a,
                      .inv_scale_b = call.inv_scale_b,
                      .bias = nullptr,
                      .amax = nullptr,
                      .m = static_cast<kernels::u32>(own.m),
                      .n = static_cast<kernels::u32>(own.n),
                      .k = static_cast<kernels::u32>(own.k),
                      .stride_a = block    ? static_cast<u32>(call.scale_rows)
                                  : rows_a ? 1U
                                           : 0U,
                      .stride_b = block    ? static_cast<u32>(blocks_stride)
                                  : rows_b ? 1U
                                           : 0U,
                      .shard_blocks = 0};
  args.raster_group = static_cast<kernels::u32>(config.raster_group);
  args.groups = words;
  args.row_tiles =
      reinterpret_cast<const kernels::RowTile*>(words + desc.layout.at_row_tiles(table));
  args.row_tile_count = words + kernels::kRowTileCounts + table;
  args.d = call.d;
  args.ld_d =
      static_cast<kernels::u64>(call.ld_d == 0 ? own.n : call.ld_d) * size_bytes(desc.gemm.d);
  args.group_stride_a = rows_a || desc.one_scale_a ? 0 : kernels::kScaleStride;
  args.group_stride_b = block              ? static_cast<u32>(kernels::scales_2d(own.n, own.k))
                        : rows_b           ? static_cast<u32>(own.n)
                        : desc.one_scale_b ? 0
                                           : static_cast<u32>(kernels::kScaleStride);
  args.zero_tail = call.zero_tail ? 1 : 0;
  return args;
}

}  // namespace

codegen::GemmSpec m_grouped_spec(const GemmDesc& desc, const GemmConfig& config) {
  codegen::GemmSpec spec = gemm_spec(desc, config);
  spec.groups = codegen::GemmGroups::kM;
  if (is_fp8(spec.a)) return spec;
  spec.fast = true;  // the tensor core has sums in fp32
  spec.mn_b = desc.gemm == Gemm::kGradInput;
  return spec;
}

Result<MGroupedGemm> MGroupedGemm::create(const std::shared_ptr<Context>& context,
                                          const GroupedDesc& desc, const GemmConfig& config) {
  F8_TRY(validate(desc.gemm));
  if (desc.gemm.gemm == Gemm::kGradWeight || desc.gemm.a == Dtype::kF32) {
    return fail(ErrorCode::kUnsupported,
                "gemm {} with operands in {}: groups of rows have operands in fp8, bf16 or f16, in "
                "output and grad_input",
                to_string(desc.gemm.gemm), to_string(desc.gemm.a));
  }
  const Kernel* kernel = F8_TRY(context->kernel(m_grouped_spec(desc.gemm, config)));
  return MGroupedGemm(context, desc, config, *kernel);
}

Status MGroupedGemm::run(const MGroupedCall& call, Stream stream) const {
  if (call.m == 0) return {};
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const Shape own = gemm_shape({call.m, desc_.gemm.shape.n, desc_.gemm.shape.k}, desc_.gemm.gemm);
  const codegen::GemmSpec& spec = std::get<codegen::GemmSpec>(kernel_->spec);
  GemmMaps maps;
  const int64_t ld_d = call.ld_d == 0 ? own.n : call.ld_d;
  F8_TRY(is_fp8(spec.a)
             ? encode_grouped_maps(state.driver, spec, own, desc_.layout.experts, ld_d, call.a,
                                   call.b, call.d, maps)
             : encode_m_grouped_16_bit_maps(state.driver, spec, own, desc_.layout.experts,
                                            call.ld_a == 0 ? own.k : call.ld_a,
                                            call.ld_b == 0 ? desc_.gemm.shape.k : call.ld_b, ld_d,
                                            call.a, call.b, call.d, maps));
  kernels::GroupedGemmArgs args = arguments(desc_, config_, own, call);
  const int64_t tiles = most_row_tiles(own.m, desc_.layout.experts, config_.tile_m) *
                        ceil_div(own.n, int64_t{config_.tile_n} * config_.cluster_n);
  const int64_t blocks = persistent_grid(*kernel_, tiles, desc_.gemm.sm_limit);
  const bool programmatic = state.options.programmatic_launch &&
                            overlaps_previous(*kernel_, config_, tiles, tiles * own.k);
  if (kernel_->cluster_size == 2) {
    const auto pairs = static_cast<size_t>(blocks) / 2;
    std::ranges::copy(programmatic ? identity_remap() : remap_of_first(*state.cluster_remap, pairs),
                      args.cluster_remap);
  }
  void* parameters[] = {&maps, &args};
  return launch(state.driver, *kernel_, blocks, parameters, programmatic, stream);
}

}  // namespace f8::runtime
