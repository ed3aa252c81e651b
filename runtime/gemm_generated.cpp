// The generated matmul as a provider: a persistent grid, tensor maps encoded for each call.
#include "codegen/kernels/kernel_args.cuh"
#include "runtime/gemm_providers.hpp"
#include "runtime/tensor_map.hpp"

namespace f8::runtime {
namespace {

class GeneratedGemm final : public GemmPlan {
 public:
  GeneratedGemm(std::shared_ptr<Context> context, const GemmDesc& desc, const GemmChoice& choice,
                const Kernel& kernel)
      : GemmPlan(desc, choice),
        context_(std::move(context)),
        driver_(context_->state().driver),
        primary_(context_->state().primary),
        kernel_(kernel),
        spec_(std::get<codegen::GemmSpec>(kernel.spec)) {}

  size_t workspace_bytes() const override { return 0; }

  Status run(const GemmCall& call, void* workspace, Stream stream) const override {
    F8_TRY(validate(desc_, call, workspace, 0));
    if (call.m == 0) {  // an empty output, or an empty contraction
      if (desc_.gemm != Gemm::kGradWeight) return {};
      return zero(driver_, primary_, call.d,
                  static_cast<size_t>(desc_.shape.n * desc_.shape.k) * size_bytes(desc_.d), stream);
    }
    const ScopedContext current(driver_, primary_);
    F8_TRY(current.status());
    const Shape shape = gemm_shape(call_shape(desc_, call), desc_.gemm);
    GemmMaps maps;
    F8_TRY(encode_gemm_maps(driver_, spec_, shape, padded(shape.k), call.a, call.b, call.d, maps));
    kernels::GemmArgs args{call.inv_scale_a,
                           call.inv_scale_b,
                           static_cast<kernels::u32>(shape.m),
                           static_cast<kernels::u32>(shape.n),
                           static_cast<kernels::u32>(shape.k),
                           static_cast<kernels::u32>(choice_.config.group)};
    void* parameters[] = {&maps.a, &maps.b, &maps.d, &args};
    return launch(driver_, kernel_, grid(shape), parameters,
                  context_->options().programmatic_launch, stream);
  }

 private:
  // Clusters take units of cluster_m x cluster_n tiles in turn, so more of them than units or than
  // fit at once would find nothing to do.
  int64_t grid(Shape shape) const {
    const codegen::GemmConfig& config = spec_.config;
    const int64_t units = ceil_div(shape.m, int64_t{config.tile_m} * config.cluster_m) *
                          ceil_div(shape.n, int64_t{config.tile_n} * config.cluster_n);
    return std::min<int64_t>(units, kernel_.resident_clusters) * kernel_.cluster_size;
  }

  std::shared_ptr<Context> context_;
  const Driver& driver_;
  CUcontext primary_;
  const Kernel& kernel_;
  codegen::GemmSpec spec_;
};

}  // namespace

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

}  // namespace f8::runtime
