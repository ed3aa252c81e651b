#include "codegen/specs/attention.hpp"

#include <algorithm>

#include "codegen/kernels/attention/attention_args.cuh"
#include "codegen/mma_text.hpp"
#include "codegen/specs/gemm.hpp"
#include "codegen/specs/text.hpp"

namespace f8::codegen {

namespace {

constexpr int kMaxStages = 6;
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr std::string_view kPacked = "/packed";
constexpr std::string_view kMasks[] = {"full", "causal", "window"};  // by AttentionMask

Status check_head_dim(int head_dim) {
  if (std::ranges::find(kAttentionHeadDims, head_dim) != std::end(kAttentionHeadDims)) return {};
  return fail(ErrorCode::kInvalidArgument, "attention of heads of {}; they are 64, 128 or 256",
              head_dim);
}

// The columns of O of an MMA of P V.
int value_columns(const AttentionForwardSpec& spec) {
  return spec.head_dim == 256 || spec.warpgroups() == 3 ? 64 : spec.head_dim;
}

}  // namespace

Result<AttentionForwardSpec> AttentionForwardSpec::parse(std::string_view, std::string_view rest) {
  for (const int head_dim : kAttentionHeadDims) {
    for (const AttentionMask mask :
         {AttentionMask::kFull, AttentionMask::kCausal, AttentionMask::kWindow}) {
      for (const bool packed : {false, true}) {
        for (int stages = 2; stages <= kMaxStages; ++stages) {
          const AttentionForwardSpec spec{head_dim, mask, packed, stages};
          if (spec.validate() && spec.key().substr(kKinds[0].size() + 1) == rest) return spec;
        }
      }
    }
  }
  return fail(ErrorCode::kInvalidArgument,
              "unknown attention {}: expected d64, d128 or d256, then /full, /causal or /window, "
              "for packed sequences /packed, then /s2 to /s{}, as many as fit shared memory",
              quote(rest), kMaxStages);
}

std::string AttentionForwardSpec::key() const {
  return f8::format("attention_forward/d{}/{}{}/s{}", head_dim, kMasks[static_cast<size_t>(mask)],
                    packed ? kPacked : "", stages);
}

Status AttentionForwardSpec::validate() const {
  F8_TRY(check_head_dim(head_dim));
  if (stages >= 2 && stages <= kMaxStages && launch().dynamic_smem_bytes <= kMaxSharedBytes) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              "attention of heads of {} in {} stages; they are 2 to {}, and fit shared memory",
              head_dim, stages, kMaxStages);
}

Stub AttentionForwardSpec::stub() const {
  const bool window = mask == AttentionMask::kWindow;
  std::string args = window ? "AttentionWindowArgs" : "AttentionArgs";
  if (packed) args = f8::format("AttentionPackedArgs<{}>", args);
  const std::string kernel = window || packed ? f8::format("AttentionForward<Config, {}>", args)
                                              : "AttentionForward<Config>";
  const std::string config =
      "struct Config {\n" + constant("kHeadDim", head_dim) + constant("kWarpgroups", warpgroups()) +
      constant("kCausal", mask != AttentionMask::kFull) + constant("kStages", stages) +
      mma_function("mma", Dtype::kE4m3, Dtype::kE4m3, 128) +
      mma_function("mma_registers", Dtype::kE4m3, Dtype::kE4m3, value_columns(*this),
                   MmaA::kRegisters) +
      "};\n" + check(f8::format("sizeof({})", args), parameters().second, "kernel_args.cuh") +
      check("sizeof(AttentionMaps)", parameters().first, "kernel_args.cuh") +
      check(kernel + "::kValueColumns", static_cast<size_t>(value_columns(*this)),
            "value_columns()") +
      check(kernel + "::kSharedBytes", static_cast<size_t>(launch().dynamic_smem_bytes),
            "dynamic_smem_bytes()") +
      check_threads(kernel + "::kThreads", launch());
  return {
      "attention_forward.cuh", "float8_attention_forward",
      config + f8::format("extern \"C\" __global__ void __launch_bounds__({}, 1)\n"
                          "float8_attention_forward(const __grid_constant__ AttentionMaps maps,\n"
                          "                         const __grid_constant__ {} args) {{\n"
                          "  extern __shared__ __align__(1024) u8 shared[];\n"
                          "  {}::run(maps, args, shared);\n"
                          "}}\n",
                          launch().threads, args, kernel)};
}

LaunchTraits AttentionForwardSpec::launch() const {
  // Two tiles of queries, stages of keys and values, and barriers of each.
  return {.threads = kernels::attention_threads(warpgroups()),
          .dynamic_smem_bytes = 2 * 64 * warpgroups() * head_dim +
                                2 * stages * kernels::kAttentionTile * head_dim +
                                8 * (4 + 4 * stages)};
}

ParameterBytes AttentionForwardSpec::parameters() const {
  using kernels::AttentionArgs, kernels::AttentionWindowArgs, kernels::AttentionPackedArgs;
  const bool window = mask == AttentionMask::kWindow;
  return {.first = 3 * kTensorMapBytes,
          .second = packed && window ? sizeof(AttentionPackedArgs<AttentionWindowArgs>)
                    : packed         ? sizeof(AttentionPackedArgs<AttentionArgs>)
                    : window         ? sizeof(AttentionWindowArgs)
                                     : sizeof(AttentionArgs)};
}

Result<AttentionCastSpec> AttentionCastSpec::parse(std::string_view kind, std::string_view rest) {
  const auto* const at = std::ranges::find(kKinds, kind);
  const auto step = static_cast<AttentionStep>(at - std::begin(kKinds));
  for (const int head_dim : kAttentionHeadDims) {
    for (const bool packed : {false, true}) {
      const AttentionCastSpec spec{head_dim, step, packed};
      if (spec.validate() && spec.key().substr(kind.size() + 1) == rest) return spec;
    }
  }
  return fail(
      ErrorCode::kInvalidArgument,
      "unknown heads {}: expected d64, d128 or d256, for packed sequences followed by /packed",
      quote(rest));
}

std::string AttentionCastSpec::key() const {
  return f8::format("{}/d{}{}", kKinds[static_cast<size_t>(step)], head_dim, packed ? kPacked : "");
}

Status AttentionCastSpec::validate() const {
  F8_TRY(check_head_dim(head_dim));
  if (packed || step != AttentionStep::kLayout) return {};
  return fail(ErrorCode::kInvalidArgument, "a layout is that of packed sequences");
}

Stub AttentionCastSpec::stub() const {
  constexpr std::string_view kFunctions[] = {"sum_keys", "cast", "dequantize", "layout"};
  const auto index = static_cast<size_t>(step);
  const std::string_view args = packed ? "AttentionPackedCastArgs" : "AttentionCastArgs";
  return {"attention_cast.cuh", f8::format("float8_{}", kKinds[index]),
          check(f8::format("sizeof({})", args), parameters().first, "kernel_args.cuh") +
              check_threads("kTileThreads", launch()) +
              f8::format("extern \"C\" __global__ void __launch_bounds__(kTileThreads, {})\n"
                         "float8_{}(const __grid_constant__ {} args) {{\n"
                         "  AttentionCast<{}{}>::{}(args);\n"
                         "}}\n",
                         head_dim == 256 ? 2 : 4, kKinds[index], args, head_dim,
                         packed ? ", AttentionPackedCastArgs" : "", kFunctions[index])};
}

LaunchTraits AttentionCastSpec::launch() const {
  return {};
}

ParameterBytes AttentionCastSpec::parameters() const {
  return {.first = packed ? sizeof(kernels::AttentionPackedCastArgs)
                          : sizeof(kernels::AttentionCastArgs)};
}

}  // namespace f8::codegen
