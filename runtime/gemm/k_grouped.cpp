#include "runtime/gemm/k_grouped.hpp"

#include <algorithm>

#include "runtime/device/tensor_map.hpp"
#include "runtime/gemm/generated.hpp"
#include "runtime/gemm/provider.hpp"

namespace f8::runtime {
namespace {

using codegen::ScaleMode;
using kernels::u32;

// d's own shape, whose k are the columns of all groups.
Shape own_shape(const GroupedDesc& desc) {
  const auto [m, n, k] = desc.gemm.shape;
  return {n, k, columns_of_groups(m, desc.layout.experts)};
}

kernels::KGroupedGemmArgs arguments(const GroupedDesc& desc, const GemmConfig& config, Shape own,
                                    const KGroupedCall& call) {
  const bool axis = desc.gemm.scale == ScaleMode::kAxis;
  const bool block = is_block(desc.gemm.scale);
  const auto stride = [&](bool scalar, int64_t rows) {
    return block ? static_cast<u32>(kernels::padded_scales(rows)) : axis && !scalar ? 1U : 0U;
  };
  const auto group_stride = [&](bool scalar, bool one, int64_t rows) {
    return axis && !scalar ? static_cast<u32>(rows)
           : one           ? 0
                           : static_cast<u32>(kernels::kScaleStride);
  };
  const int64_t rows_a = call.scale_rows_a == 0 ? own.m : call.scale_rows_a;
  kernels::KGroupedGemmArgs args{};
  args.problems[0] = {.inv_scale_a = call.inv_scale_a,
                      .inv_scale_b = call.inv_scale_b,
                      .bias = nullptr,
                      .amax = nullptr,
                      .m = static_cast<u32>(own.m),
                      .n = static_cast<u32>(own.n),
                      .k = static_cast<u32>(own.k),
                      .stride_a = stride(desc.gemm.scalar_a, rows_a),
                      .stride_b = stride(desc.gemm.scalar_b, own.n),
                      .shard_blocks = 0};
  args.raster_group = static_cast<u32>(config.raster_group);
  args.groups = static_cast<const int32_t*>(call.layout);
  args.d = call.d;
  args.ld_d =
      static_cast<kernels::u64>(call.ld_d == 0 ? own.n : call.ld_d) * size_bytes(desc.gemm.d);
  args.layout = desc.layout;
  args.group_stride_a = group_stride(desc.gemm.scalar_a, desc.one_scale_a, rows_a);
  args.group_stride_b = group_stride(desc.gemm.scalar_b, desc.one_scale_b, own.n);
  return args;
}

}  // namespace

codegen::GemmSpec k_grouped_spec(const GemmDesc& desc, const GemmConfig& config) {
  codegen::GemmSpec spec = gemm_spec(desc, config);
  if (!is_fp8(spec.a)) spec.fast = true;  // the tensor core has sums in fp32
  spec.groups = codegen::GemmGroups::kK;
  return spec;
}

Result<KGroupedGemm> KGroupedGemm::create(const std::shared_ptr<Context>& context,
                                          const GroupedDesc& desc, const GemmConfig& config) {
  F8_TRY(validate(desc.gemm));
  if (desc.gemm.gemm != Gemm::kGradWeight || desc.gemm.a == Dtype::kF32) {
    return fail(ErrorCode::kUnsupported,
                "gemm {} with operands in {}: groups of K have operands in fp8, bf16 or f16, in "
                "grad_weight",
                to_string(desc.gemm.gemm), to_string(desc.gemm.a));
  }
  const Kernel* kernel = F8_TRY(context->kernel(k_grouped_spec(desc.gemm, config)));
  return KGroupedGemm(context, desc, config, *kernel);
}

Status KGroupedGemm::run(const KGroupedCall& call, Stream stream) const {
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const codegen::GemmSpec& spec = std::get<codegen::GemmSpec>(kernel_->spec);
  Shape own = own_shape(desc_);
  if (spec.mn_major_a()) own.k = call.m;
  const int64_t ld_d = call.ld_d == 0 ? own.n : call.ld_d;
  GemmMaps maps;
  F8_TRY(spec.mn_major_a() ? encode_mn_major_maps(state.driver, spec, own, desc_.layout.experts,
                                                  call.ld_a == 0 ? own.m : call.ld_a,
                                                  call.ld_b == 0 ? own.n : call.ld_b, ld_d, call.a,
                                                  call.b, call.d, maps)
                           : encode_k_grouped_maps(state.driver, spec, own, desc_.layout.experts,
                                                   ld_d, call.a, call.b, call.d, maps));
  kernels::KGroupedGemmArgs args = arguments(desc_, config_, own, call);
  const int64_t groups = std::min<int64_t>(desc_.layout.experts, desc_.layout.m_max);
  const int64_t tiles = groups * ceil_div(own.m, int64_t{config_.tile_m} * config_.cluster_m) *
                        ceil_div(own.n, int64_t{config_.tile_n} * config_.cluster_n);
  const int64_t blocks = persistent_grid(*kernel_, tiles, desc_.gemm.sm_limit);
  const bool programmatic = state.options.programmatic_launch &&
                            overlaps_previous(*kernel_, config_, tiles, tiles * own.k / groups);
  if (kernel_->cluster_size == 2) {
    const auto pairs = static_cast<size_t>(blocks) / 2;
    std::ranges::copy(programmatic ? identity_remap() : remap_of_first(*state.cluster_remap, pairs),
                      args.cluster_remap);
  }
  void* parameters[] = {&maps, &args};
  return launch(state.driver, *kernel_, blocks, parameters, programmatic, stream);
}

}  // namespace f8::runtime
