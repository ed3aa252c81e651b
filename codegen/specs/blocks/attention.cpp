#include "codegen/specs/blocks/attention.hpp"

#include <algorithm>

#include "codegen/kernels/attention/attention_backward_args.cuh"
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

constexpr AttentionMask kAllMasks[] = {AttentionMask::kFull, AttentionMask::kCausal,
                                       AttentionMask::kWindow};

// The arguments of a kernel of a mask, by their name in the templates and in bytes.
std::string args_name(std::string_view name, AttentionMask mask, bool packed) {
  const std::string of_mask =
      mask == AttentionMask::kWindow ? f8::format("AttentionWindow<{}>", name) : std::string(name);
  return packed ? f8::format("AttentionPackedArgs<{}>", of_mask) : of_mask;
}
template <class Args>
size_t args_bytes(AttentionMask mask, bool packed) {
  using kernels::AttentionWindow, kernels::AttentionPackedArgs;
  if (mask != AttentionMask::kWindow) {
    return packed ? sizeof(AttentionPackedArgs<Args>) : sizeof(Args);
  }
  return packed ? sizeof(AttentionPackedArgs<AttentionWindow<Args>>)
                : sizeof(AttentionWindow<Args>);
}

// The columns of O of an MMA of P V.
int value_columns(const AttentionForwardSpec& spec) {
  return spec.head_dim == 256 || spec.warpgroups() == 3 ? 64 : spec.head_dim;
}

}  // namespace

Result<AttentionForwardSpec> AttentionForwardSpec::parse(std::string_view, std::string_view rest) {
  for (const int head_dim : kAttentionHeadDims) {
    for (const AttentionMask mask : kAllMasks) {
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
  const std::string args = args_name("AttentionArgs", mask, packed);
  const std::string kernel = f8::format("AttentionForward<Config, {}>", args);
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
  return {.first = 3 * kTensorMapBytes, .second = args_bytes<kernels::AttentionArgs>(mask, packed)};
}

Result<AttentionBackwardSpec> AttentionBackwardSpec::parse(std::string_view kind,
                                                           std::string_view rest) {
  const auto* const at = std::ranges::find(kKinds, kind);
  const auto gradients = static_cast<AttentionGradients>(at - std::begin(kKinds));
  for (const int head_dim : kAttentionHeadDims) {
    for (const AttentionMask mask : kAllMasks) {
      for (const bool packed : {false, true}) {
        const AttentionBackwardSpec spec{head_dim, mask, packed, gradients};
        if (spec.validate() && spec.key().substr(kind.size() + 1) == rest) return spec;
      }
    }
  }
  return fail(ErrorCode::kInvalidArgument,
              "unknown {} {}: expected d64, d128 or d256 (dkv has heads of 64 and 128, dk and dv "
              "of 256), then /full, /causal or /window, for packed sequences followed by /packed",
              kind, quote(rest));
}

std::string AttentionBackwardSpec::key() const {
  return f8::format("{}/d{}/{}{}", kKinds[static_cast<size_t>(gradients)], head_dim,
                    kMasks[static_cast<size_t>(mask)], packed ? kPacked : "");
}

Status AttentionBackwardSpec::validate() const {
  F8_TRY(check_head_dim(head_dim));
  if (gradients == AttentionGradients::kDq ||
      (gradients == AttentionGradients::kDkv) == has_both(head_dim)) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              "{} of heads of {}; dK and dV have one kernel for heads of 64 and 128, and two for "
              "heads of 256",
              kKinds[static_cast<size_t>(gradients)], head_dim);
}

Stub AttentionBackwardSpec::stub() const {
  const bool dq = gradients == AttentionGradients::kDq;
  const std::string args = args_name("AttentionBackwardArgs", mask, packed);
  const std::string name = dq ? "AttentionDq" : "AttentionDkv";
  const std::string kernel = f8::format("{}<Config, {}>", name, args);
  const std::string entry = f8::format("float8_{}", kKinds[static_cast<size_t>(gradients)]);
  std::string config = "struct Config {\n" + constant("kHeadDim", head_dim) +
                       constant("kWarpgroups", 2) +
                       constant("kCausal", mask != AttentionMask::kFull);
  if (!dq) {
    config += constant("kDk", gradients != AttentionGradients::kDv) +
              constant("kDv", gradients != AttentionGradients::kDk);
  }
  return {
      dq ? "attention_backward_dq.cuh" : "attention_backward_dkv.cuh", entry,
      config + mma_function("mma", Dtype::kE4m3, Dtype::kE4m3, 64) +
          mma_function("mma_registers", Dtype::kE4m3, Dtype::kE4m3, head_dim, MmaA::kRegisters) +
          "};\n" + check(f8::format("sizeof({})", args), parameters().second, "kernel_args.cuh") +
          check(f8::format("sizeof({}Maps)", name), parameters().first, "kernel_args.cuh") +
          check(kernel + "::kSharedBytes", static_cast<size_t>(launch().dynamic_smem_bytes),
                "dynamic_smem_bytes()") +
          check_threads(kernel + "::kThreads", launch()) +
          f8::format("extern \"C\" __global__ void __launch_bounds__({}, 1)\n"
                     "{}(const __grid_constant__ {}Maps maps,\n"
                     "    const __grid_constant__ {} args) {{\n"
                     "  extern __shared__ __align__(1024) u8 shared[];\n"
                     "  {}::run(maps, args, shared);\n"
                     "}}\n",
                     launch().threads, entry, name, args, kernel)};
}

LaunchTraits AttentionBackwardSpec::launch() const {
  const int tile = kernels::kAttentionTile * head_dim;
  const int threads = kernels::attention_threads(2);
  if (gradients == AttentionGradients::kDq) {
    // Tiles of Q and of dO, stages of K, V and K^T, and barriers of each.
    constexpr int kStages = 3;
    const int stage = keys_of_stage(head_dim) * head_dim, queries = stage == tile ? 2 : 1;
    return {.threads = threads,
            .dynamic_smem_bytes =
                2 * queries * tile + 3 * kStages * stage + 8 * (2 * queries + 4 * kStages)};
  }
  // K and V, stages of Q, dO, their transposed copies and records, and barriers; without dK no V, dO and Q^T, and without
  // dV no dO^T.
  constexpr int kWarps = 8, kBytesOfWarp = 32;
  const int rows = gradients == AttentionGradients::kDv ? 1 : 2;
  const int tiles = gradients == AttentionGradients::kDkv ? 4 : rows + 1;
  const int stages = gradients == AttentionGradients::kDk ? 3 : 4;
  const int stage = tiles * kernels::kAttentionStep * head_dim + 4 * kernels::kAttentionStepFloats;
  return {.threads = threads,
          .dynamic_smem_bytes =
              rows * tile + stages * stage + kWarps * kBytesOfWarp + 8 * (2 + 4 * stages),
          .cluster_size = kernels::kAttentionKeyCluster};
}

ParameterBytes AttentionBackwardSpec::parameters() const {
  return {.first = (gradients == AttentionGradients::kDq ? 5 : 6) * kTensorMapBytes,
          .second = args_bytes<kernels::AttentionBackwardArgs>(mask, packed)};
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
  const bool of_packs = step == AttentionStep::kLayout || is_beside_library();
  if (packed || !of_packs) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{} is a step of packed sequences: its heads are followed by /packed",
              kKinds[static_cast<size_t>(step)]);
}

Stub AttentionCastSpec::stub() const {
  if (is_beside_library()) {
    const bool spans = step == AttentionStep::kSpans;
    const std::string_view args = spans ? "AttentionSpanArgs" : "AttentionFinishArgs";
    const std::string entry = f8::format("float8_{}", kKinds[static_cast<size_t>(step)]);
    return {"attention_spans.cuh", entry,
            check(f8::format("sizeof({})", args), parameters().first, "kernel_args.cuh") +
                check_threads("kTileThreads", launch()) +
                f8::format("extern \"C\" __global__ void __launch_bounds__(kTileThreads)\n"
                           "{}(const __grid_constant__ {} args) {{\n"
                           "  {}(args);\n"
                           "}}\n",
                           entry, args, spans ? "write_attention_spans" : "finish_attention")};
  }
  constexpr std::string_view kFunctions[] = {"sum_keys", "cast", "dequantize", "layout", "run"};
  const auto index = static_cast<size_t>(step);
  const bool backward = step == AttentionStep::kBackwardCast;
  const std::string_view kept = packed ? "AttentionPackedCastArgs" : "AttentionCastArgs";
  const std::string args =
      backward ? f8::format("AttentionBackwardCastArgs<{}>", kept) : std::string(kept);
  const int blocks = head_dim == 256 ? 2 : backward ? 3 : 4;  // of an SM, as registers let
  return {backward ? "attention_backward_cast.cuh" : "attention_cast.cuh",
          f8::format("float8_{}", kKinds[index]),
          check(f8::format("sizeof({})", args), parameters().first, "kernel_args.cuh") +
              check_threads("kTileThreads", launch()) +
              f8::format("extern \"C\" __global__ void __launch_bounds__(kTileThreads, {})\n"
                         "float8_{}(const __grid_constant__ {} args) {{\n"
                         "  {}<{}, {}>::{}(args);\n"
                         "}}\n",
                         blocks, kKinds[index], args,
                         backward ? "AttentionBackwardCast" : "AttentionCast", head_dim, args,
                         kFunctions[index])};
}

LaunchTraits AttentionCastSpec::launch() const {
  return {};
}

ParameterBytes AttentionCastSpec::parameters() const {
  using kernels::AttentionBackwardCastArgs, kernels::AttentionCastArgs,
      kernels::AttentionPackedCastArgs;
  if (step == AttentionStep::kSpans) return {.first = sizeof(kernels::AttentionSpanArgs)};
  if (step == AttentionStep::kFinish) return {.first = sizeof(kernels::AttentionFinishArgs)};
  if (step == AttentionStep::kBackwardCast) {
    return {.first = packed ? sizeof(AttentionBackwardCastArgs<AttentionPackedCastArgs>)
                            : sizeof(AttentionBackwardCastArgs<AttentionCastArgs>)};
  }
  return {.first = packed ? sizeof(AttentionPackedCastArgs) : sizeof(AttentionCastArgs)};
}

}  // namespace f8::codegen
