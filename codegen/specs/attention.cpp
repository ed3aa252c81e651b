#include "codegen/specs/attention.hpp"

#include "codegen/kernels/attention/attention_args.cuh"
#include "codegen/mma_text.hpp"
#include "codegen/specs/gemm.hpp"
#include "codegen/specs/text.hpp"

namespace f8::codegen {

namespace {

constexpr int kTileBytes = kernels::kAttentionTile * 128;
constexpr int kMaxStages = 6;

}  // namespace

Result<AttentionForwardSpec> AttentionForwardSpec::parse(std::string_view, std::string_view rest) {
  for (const bool causal : {false, true}) {
    for (int stages = 2; stages <= kMaxStages; ++stages) {
      const AttentionForwardSpec spec{.causal = causal, .stages = stages};
      if (spec.key().substr(kKinds[0].size() + 1) == rest) return spec;
    }
  }
  return fail(ErrorCode::kInvalidArgument,
              "unknown attention {}: expected d128, then /causal or /full, then /s2 to /s{}",
              quote(rest), kMaxStages);
}

std::string AttentionForwardSpec::key() const {
  return f8::format("attention_forward/d{}/{}/s{}", head_dim, causal ? "causal" : "full", stages);
}

Status AttentionForwardSpec::validate() const {
  if (head_dim != 128 || stages < 2 || stages > kMaxStages) {
    return fail(ErrorCode::kInvalidArgument, "attention of heads of {} in {} stages", head_dim,
                stages);
  }
  return {};
}

Stub AttentionForwardSpec::stub() const {
  const std::string config =
      "struct Config {\n" + constant("kCausal", causal) + constant("kStages", stages) +
      mma_function("mma", Dtype::kE4m3, Dtype::kE4m3, 128) +
      mma_function("mma_registers", Dtype::kE4m3, Dtype::kE4m3, 128, MmaA::kRegisters) + "};\n" +
      check_args<kernels::AttentionArgs>("AttentionArgs") +
      check("sizeof(AttentionMaps)", parameters().first, "kernel_args.cuh") +
      check("AttentionForward<Config>::kSharedBytes",
            static_cast<size_t>(launch().dynamic_smem_bytes), "dynamic_smem_bytes()") +
      check_threads("kAttentionThreads", launch());
  return {"attention_forward.cuh", "float8_attention_forward",
          config +
              "extern \"C\" __global__ void __launch_bounds__(kAttentionThreads, 1)\n"
              "float8_attention_forward(const __grid_constant__ AttentionMaps maps,\n"
              "                         const __grid_constant__ AttentionArgs args) {\n"
              "  extern __shared__ __align__(1024) u8 shared[];\n"
              "  AttentionForward<Config>::run(maps, args, shared);\n"
              "}\n"};
}

LaunchTraits AttentionForwardSpec::launch() const {
  // Two tiles of queries, stages of keys and values, and barriers of each.
  return {.threads = kernels::kAttentionThreads,
          .dynamic_smem_bytes = (2 + 2 * stages) * kTileBytes + 8 * (4 + 4 * stages)};
}

ParameterBytes AttentionForwardSpec::parameters() const {
  return {.first = 3 * kTensorMapBytes, .second = sizeof(kernels::AttentionArgs)};
}

}  // namespace f8::codegen
