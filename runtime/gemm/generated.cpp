// The grid is persistent; tensor maps are encoded for each call.
#include "runtime/gemm/generated.hpp"

#include <algorithm>
#include <array>
#include <numeric>

#include "codegen/kernels/kernel_args.cuh"
#include "runtime/device/tensor_map.hpp"

namespace f8::runtime {
namespace {

using codegen::ScaleMode;

kernels::GemmProblem problem(const GemmDesc& desc, Shape own, const GemmCall& call) {
  const ScaleStrides strides = scale_strides(desc, own);
  return {.inv_scale_a = call.inv_scale_a,
          .inv_scale_b = call.inv_scale_b,
          .bias = call.bias,
          .amax = call.amax,
          .m = static_cast<kernels::u32>(own.m),
          .n = static_cast<kernels::u32>(own.n),
          .k = static_cast<kernels::u32>(own.k),
          .stride_a = static_cast<kernels::u32>(strides.a),
          .stride_b = static_cast<kernels::u32>(strides.b),
          .shard_blocks =
              static_cast<kernels::u32>(ceil_div(own.k / call.shards, int64_t{kernels::kStageK}))};
}

int64_t work_tiles(const GemmConfig& config, Shape own) {
  return ceil_div(own.m, int64_t{config.tile_m} * config.cluster_m) *
         ceil_div(own.n, int64_t{config.tile_n} * config.cluster_n);
}

// The tail-balancing offset: how many tiles of the second GEMM take as long as one of the first.
// The cost of a tile beside its main loop is that of about 512 of K.
kernels::u32 tail_offset(int64_t first_k, int64_t second_k) {
  constexpr int64_t kTileOverhead = 512;
  return static_cast<kernels::u32>((2 * (first_k + kTileOverhead) + second_k + kTileOverhead) /
                                   (2 * (second_k + kTileOverhead)));
}

// A kernel that reads b in shards reads one in one piece too.
bool same_kernel(codegen::GemmSpec first, codegen::GemmSpec second) {
  first.shards = second.shards = first.shards || second.shards;
  return first == second;
}

struct Launcher {
  std::shared_ptr<Context> context;
  const Kernel& kernel;
  const codegen::GemmSpec& spec = std::get<codegen::GemmSpec>(kernel.spec);

  template <size_t kCount>
  [[nodiscard]] Status run(const std::array<const GemmDesc*, kCount>& descs,
                           const std::array<const GemmCall*, kCount>& calls, Stream stream) const {
    const Driver& driver = context->state().driver;
    const ScopedContext current(driver, context->state().primary);
    F8_TRY(current.status());
    std::array<GemmMaps, kCount> maps;
    kernels::GemmArgs args{};
    args.raster_group = static_cast<kernels::u32>(spec.config.raster_group);
    std::array<int64_t, kCount> tile_counts;
    std::array<int64_t, kCount> ks;
    for (size_t i = 0; i < kCount; ++i) {
      const GemmCall& call = *calls[i];
      const Shape own = gemm_shape(call_shape(*descs[i], call), descs[i]->gemm);
      F8_TRY(encode_gemm_maps(driver, spec, own, call.shards, call.ld_d == 0 ? own.n : call.ld_d,
                              call.a, call.b, call.d, maps[i]));
      args.problems[i] = problem(*descs[i], own, call);
      tile_counts[i] = work_tiles(spec.config, own);
      ks[i] = own.k;
    }
    const int64_t total = std::reduce(tile_counts.begin(), tile_counts.end());
    const int64_t blocks = persistent_grid(kernel, total, descs[0]->sm_limit);
    const int64_t work =
        std::inner_product(tile_counts.begin(), tile_counts.end(), ks.begin(), int64_t{0});
    const bool programmatic = context->options().programmatic_launch &&
                              overlaps_previous(kernel, spec.config, total, work);
    if (kernel.cluster_size == 2) {
      const auto pairs = static_cast<size_t>(blocks) / 2;
      std::ranges::copy(
          programmatic ? identity_remap() : remap_of_first(*context->state().cluster_remap, pairs),
          args.cluster_remap);
    }
    if constexpr (kCount == 2) args.tail_offset = tail_offset(ks[0], ks[1]);
    void* parameters[] = {maps.data(), &args};
    return launch(driver, kernel, blocks, parameters, programmatic, stream);
  }
};

class GeneratedGemm final : public GemmPlan {
 public:
  GeneratedGemm(std::shared_ptr<Context> context, const GemmDesc& desc, const GemmChoice& choice,
                const Kernel& kernel)
      : GemmPlan(desc, choice), launcher_{std::move(context), kernel} {}

  size_t workspace_bytes() const override { return 0; }

  Status run(const GemmCall& call, void* workspace, Stream stream) const override {
    F8_TRY(validate(desc_, call, workspace, 0));
    if (call.m == 0) return run_empty(*launcher_.context, desc_, call, stream);
    return launcher_.run<1>({&desc_}, {&call}, stream);
  }

 private:
  Launcher launcher_;
};

class GeneratedGroupedGemm final : public GroupedGemm {
 public:
  // The GEMM with the longer K comes first: what remains for the last wave is then short.
  GeneratedGroupedGemm(std::shared_ptr<Context> context, const GemmDesc& first,
                       const GemmDesc& second, const Kernel& kernel)
      : launcher_{std::move(context), kernel}, descs_{first, second} {}

  Status run(const GemmCall& first, const GemmCall& second, Stream stream) const override {
    F8_TRY(validate(descs_[0], first, nullptr, 0));
    F8_TRY(validate(descs_[1], second, nullptr, 0));
    const auto own_k = [&](const GemmDesc& desc, const GemmCall& call) {
      return gemm_shape(call_shape(desc, call), desc.gemm).k;
    };
    if (own_k(descs_[0], first) >= own_k(descs_[1], second)) {
      return launcher_.run<2>({&descs_[0], &descs_[1]}, {&first, &second}, stream);
    }
    return launcher_.run<2>({&descs_[1], &descs_[0]}, {&second, &first}, stream);
  }

 private:
  Launcher launcher_;
  std::array<GemmDesc, 2> descs_;
};

}  // namespace

int64_t persistent_grid(const Kernel& kernel, int64_t work_tiles, int sm_limit) {
  int64_t clusters = std::min<int64_t>(work_tiles, kernel.resident_clusters);
  if (sm_limit > 0) {
    clusters = std::clamp<int64_t>(sm_limit / kernel.cluster_size, 1, clusters);
  }
  return clusters * kernel.cluster_size;
}

// Tells whether to overlap the previous kernel by programmatic dependent launch. Blocks then go to
// SMs in the order in which these become free, so neighbours in the grid, which read the same tiles
// at the same time, lie far apart, and the GEMM takes longer for it than the microsecond that is
// gained: up to 1.6 times as long without clusters, up to 1.05 times for small tiles with clusters.
// Tiles below 128x128 and split-K read the most for what they multiply: for them the limit is the K
// (`work`: its sum over work tiles) that a cluster passes through, for the others the waves.
bool overlaps_previous(const Kernel& kernel, const GemmConfig& config, int64_t work_tiles,
                       int64_t work) {
  constexpr int kMedium = 128 * 128;
  constexpr int64_t kLongK = 3072;
  const int area = config.tile_m * config.tile_n;
  if (area < kMedium || config.split_k > 1) {
    return work <= kLongK * config.split_k * kernel.resident_clusters;
  }
  if (kernel.cluster_size > 1 && area > kMedium) return true;
  const int64_t waves = kernel.cluster_size > 1 ? 4 : 2;
  return work_tiles <= waves * kernel.resident_clusters;
}

Result<GemmPlanPtr> create_generated(const std::shared_ptr<Context>& context, const GemmDesc& desc,
                                     const GemmChoice& choice) {
  if (!is_fp8(desc.a)) {
    return fail(ErrorCode::kUnsupported,
                "gemm {}: generated kernels take fp8 operands; {} operands need provider cublaslt",
                to_string(desc.gemm), to_string(desc.a));
  }
  const Kernel* kernel = F8_TRY(context->kernel(gemm_spec(desc, choice.config)));
  return std::make_shared<const GeneratedGemm>(context, desc, choice, *kernel);
}

bool GroupedGemm::fits(const GemmDesc& first, const GemmChoice& first_choice,
                       const GemmDesc& second, const GemmChoice& second_choice) {
  return first_choice.provider == Provider::kGenerated &&
         second_choice.provider == Provider::kGenerated && is_fp8(first.a) && is_fp8(second.a) &&
         same_kernel(gemm_spec(first, first_choice.config),
                     gemm_spec(second, second_choice.config)) &&
         codegen::validate(spec(first, first_choice)).has_value();
}

codegen::GemmSpec GroupedGemm::spec(const GemmDesc& desc, const GemmChoice& choice) {
  codegen::GemmSpec spec = gemm_spec(desc, choice.config);
  spec.problems = 2;
  return spec;
}

Result<std::shared_ptr<const GroupedGemm>> GroupedGemm::create(
    const std::shared_ptr<Context>& context, const GemmDesc& first, const GemmDesc& second,
    const GemmChoice& choice) {
  if (!fits(first, choice, second, choice)) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm {} and {}: one launch computes two GEMMs of the same types alone",
                to_string(first.gemm), to_string(second.gemm));
  }
  GemmDesc both = first;
  both.shards = first.shards || second.shards;
  const Kernel* kernel = F8_TRY(context->kernel(spec(both, choice)));
  return std::make_shared<const GeneratedGroupedGemm>(context, first, second, *kernel);
}

}  // namespace f8::runtime
