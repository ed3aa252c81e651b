#include "runtime/gemm/gemm.hpp"

#include "codegen/nvrtc.hpp"
#include "runtime/gemm/choose.hpp"
#include "runtime/gemm/cublaslt.hpp"
#include "runtime/gemm/emulated.hpp"
#include "runtime/gemm/generated.hpp"

namespace f8::runtime {
codegen::GemmSpec gemm_spec(const GemmDesc& desc, const GemmConfig& config) {
  codegen::GemmSpec spec{.a = desc.a,
                         .b = desc.b,
                         .d = desc.d,
                         .scale = desc.scale,
                         .fast = desc.fast,
                         .bias = desc.bias,
                         .add = desc.add,
                         .amax = desc.amax,
                         .shards = desc.shards,
                         .config = config};
  spec.pow2 = desc.pow2 && takes_pow2(spec);
  return spec;
}

ToolchainVersions toolchain_versions() {
  const auto nvrtc = codegen::nvrtc_version();
  return {.generator = codegen::kGeneratorVersion,
          .nvrtc = nvrtc ? f8::format("{}.{}", nvrtc->major, nvrtc->minor) : "none",
          .cublaslt = cublaslt_version().value_or("none")};
}

Result<GemmChoice> GemmPlan::choose(Context& context, const GemmDesc& desc) {
  return choose_gemm(context.table().get(), desc, context.device().sm_count);
}

Result<std::shared_ptr<const GemmPlan>> GemmPlan::create(const std::shared_ptr<Context>& context,
                                                         const GemmDesc& desc,
                                                         const GemmChoice& choice) {
  F8_TRY(validate(desc));
  if (choice.provider == Provider::kGenerated) return create_generated(context, desc, choice);
  F8_TRY(check_cublaslt(desc));
  if (context->device().emulated) return create_emulated(context, desc, choice);
  auto plan = create_cublaslt(context, desc, choice);
  if (plan || !choice.otherwise) return plan;
  GemmChoice generated{{.config = *choice.otherwise}};
  generated.why = f8::format("{}; cuBLASLt cannot: {}", choice.why, plan.error().message);
  return create_generated(context, desc, generated);
}

}  // namespace f8::runtime
