#include "codegen/specs/gemm.hpp"

#include "codegen/kernels/experts/group_args.cuh"
#include "codegen/kernels/gemm/gemm_layout.cuh"
#include "codegen/mma_text.hpp"
#include "codegen/specs/text.hpp"

namespace f8::codegen {
namespace {

constexpr int kMaxSmemBytes = 232448;

static_assert(static_cast<int>(ScaleMode::kAxis) == static_cast<int>(kernels::Scale::kAxis) &&
              static_cast<int>(ScaleMode::kBlock1x128) ==
                  static_cast<int>(kernels::Scale::kBlock1x128) &&
              static_cast<int>(ScaleMode::kBlock128x128) ==
                  static_cast<int>(kernels::Scale::kBlock128x128));

kernels::GemmLayout layout_of(const GemmSpec& s, int out_buffers) {
  const GemmConfig& c = s.config;
  return {.tile_m = c.tile_m,
          .tile_n = c.tile_n,
          .stages = c.stages,
          .warpgroups = c.warpgroups,
          .split_k = c.split_k,
          .pingpong = c.pingpong,
          .scale = static_cast<kernels::Scale>(s.scale),
          .bias = s.bias,
          .element_bytes = static_cast<int>(size_bytes(s.d)),
          .out_buffers = out_buffers};
}

// True where the epilogue rounds first and multiplies by the scales in bf16, two values at a time:
// scales are powers of two, but promoted sums of smaller tiles would lose by it.
bool scales_in_bf16(const GemmSpec& s) {
  return s.pow2 && (s.fast || s.config.tile_m * s.config.tile_n >= 128 * 256);
}

const char* args_name(const GemmSpec& s) {
  return s.groups == GemmGroups::kM   ? "GroupedGemmArgs"
         : s.groups == GemmGroups::kK ? "KGroupedGemmArgs"
                                      : "GemmArgs";
}

std::string check_gemm(const GemmSpec& s) {
  const GemmConfig& c = s.config;
  const auto of_traits = [](std::string_view name, int value, std::string_view host) {
    return check(f8::format("GemmTraits<Config>::{}", name), static_cast<size_t>(value), host);
  };
  return (s.groups == GemmGroups::kM   ? check_args<kernels::GroupedGemmArgs>(args_name(s))
          : s.groups == GemmGroups::kK ? check_args<kernels::KGroupedGemmArgs>(args_name(s))
                                       : check_args<kernels::GemmArgs>(args_name(s))) +
         check_threads("GemmTraits<Config>::kThreads", s.launch()) +
         of_traits("kLayout.bytes()", s.launch().dynamic_smem_bytes, "dynamic_smem_bytes()") +
         of_traits("kAccumulators", gemm_accumulators(s), "gemm_accumulators()") +
         of_traits("Schedule::kClusterSize", c.cluster_m * c.cluster_n * c.split_k,
                   "the cluster's size");
}

// What operands of 16 bits ask for beside the rest.
Status validate_16_bits(const GemmSpec& s) {
  const GemmConfig& c = s.config;
  const auto bad = [&](const char* why) {
    return fail(ErrorCode::kInvalidArgument, "configuration {}: {}", f8::key(c), why);
  };
  if (s.groups == GemmGroups::kNone || s.a != s.b || s.a == Dtype::kF32) {
    return bad("operands must be e4m3 or e5m2; over groups both may be bf16 or both f16");
  }
  if (s.scale != ScaleMode::kTensor || !s.fast) {
    return bad("operands of 16 bits have no scales, and sums in fp32: tensor, fast");
  }
  if (s.d != s.a && s.d != Dtype::kF32) return bad("operands of 16 bits give their type or f32");
  const auto in_boxes = [](int extent) { return extent % kernels::kMnBox == 0; };
  const bool boxes_a = in_boxes(c.tile_m / c.cluster_n);
  const bool boxes_b = in_boxes(c.tile_n) && in_boxes(c.tile_n / c.cluster_m);
  if ((s.mn_major_a() && !boxes_a) || (s.mn_major_b() && !boxes_b)) {
    return bad("MN-major operands are copied in boxes of 64 columns");
  }
  return {};
}

}  // namespace

bool takes_pow2(const GemmSpec& spec) {
  return spec.scale == ScaleMode::kAxis && spec.d == Dtype::kBf16 && !spec.bias && !spec.amax;
}

int out_row_bytes(const GemmSpec& spec) {
  return layout_of(spec, 1).out_row();
}

int gemm_out_buffers(const GemmSpec& s) {
  const GemmConfig& c = s.config;
  const int rows = c.tile_m / (c.pingpong ? 1 : c.warpgroups);
  const int written = c.tile_n / c.split_k * static_cast<int>(size_bytes(s.d));
  const int whole = rows / kernels::kOutRows * written / out_row_bytes(s);
  int buffers = is_block(s.scale) ? 1 : 2;  // the scales take room
  while (buffers < whole && layout_of(s, buffers + 1).bytes() <= kMaxSmemBytes) ++buffers;
  return buffers;
}

Result<GemmSpec> GemmSpec::parse(std::string_view kind, std::string_view rest) {
  GemmSpec s;
  s.problems = kind == "gemm2" ? 2 : 1;
  s.groups = kind == "gemm_m"   ? GemmGroups::kM
             : kind == "gemm_k" ? GemmGroups::kK
                                : GemmGroups::kNone;
  std::string_view types = take_until(rest, '/');
  s.a = F8_TRY(parse_dtype(take_until(types, '.')));
  s.b = F8_TRY(parse_dtype(take_until(types, '.')));
  s.d = F8_TRY(parse_dtype(types));
  s.scale = F8_TRY(parse_scale(take_until(rest, '/')));
  const std::string_view accumulation = take_until(rest, '/');
  if (accumulation != "fast" && accumulation != "precise") {
    return fail(ErrorCode::kInvalidArgument, "accumulation {}: expected fast or precise",
                quote(accumulation));
  }
  s.fast = accumulation == "fast";
  s.config = F8_TRY(parse_gemm_tile(take_until(rest, '/')));
  s.bias = take(rest, "+bias");
  s.add = take(rest, "+add");
  s.amax = take(rest, "+amax");
  s.pow2 = take(rest, "+pow2");
  s.shards = take(rest, "+shards");
  s.mn_b = take(rest, "+mn_b");
  if (!rest.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "{} after the tile: expected +bias, +add, +amax, +pow2, +shards, +mn_b",
                quote(rest));
  }
  return s;
}

std::string GemmSpec::key() const {
  const auto& s = *this;
  const std::string extras =
      f8::format("{}{}{}{}{}{}", s.bias ? "+bias" : "", s.add ? "+add" : "", s.amax ? "+amax" : "",
                 s.pow2 ? "+pow2" : "", s.shards ? "+shards" : "", s.mn_b ? "+mn_b" : "");
  return f8::format("gemm{}/{}.{}.{}/{}/{}/{}{}{}",
                    s.problems == 2              ? "2"
                    : s.groups == GemmGroups::kM ? "_m"
                    : s.groups == GemmGroups::kK ? "_k"
                                                 : "",
                    to_string(s.a), to_string(s.b), to_string(s.d), to_string(s.scale),
                    s.fast ? "fast" : "precise", tile_key(s.config), extras.empty() ? "" : "/",
                    extras);
}

Status GemmSpec::validate() const {
  const auto& s = *this;
  const GemmConfig& c = s.config;
  const auto bad = [&](std::string why) {
    return fail(ErrorCode::kInvalidArgument, "configuration {}: {}", f8::key(c), why);
  };
  if (is_fp8(s.a) != is_fp8(s.b)) return bad("operands must be e4m3 or e5m2");
  if (!is_fp8(s.a)) F8_TRY(validate_16_bits(s));
  if (s.mn_b && (is_fp8(s.a) || s.groups != GemmGroups::kM)) {
    return bad("an MN-major b is of 16 bits, and over groups of rows");
  }
  if (is_fp8(s.d)) return bad("the result must be bf16, f16 or f32");
  if (c.warpgroups < 1 || c.warpgroups > 3) return bad("1 to 3 consumer warpgroups");
  if (c.tile_m < 64 || c.tile_m > 256 || c.tile_m % (c.pingpong ? 64 : 64 * c.warpgroups) != 0) {
    return bad("tile_m must be 64 to 256 in steps of 64 rows for each warpgroup");
  }
  if (c.tile_n < 64 || c.tile_n > 256 || c.tile_n % 32 != 0) {
    return bad("tile_n must be 64 to 256 in steps of 32");
  }
  if (is_block(s.scale) && c.tile_n % 64 != 0) {
    return bad("block scales need a tile_n in steps of 64");
  }
  if (c.pingpong && c.warpgroups != 2) return bad("ping-pong needs two consumer warpgroups");
  const auto few = [](int ctas) { return ctas >= 1 && ctas <= 4; };
  if (!few(c.cluster_m) || !few(c.cluster_n) || !few(c.split_k) ||
      c.cluster_m * c.cluster_n * c.split_k > 4) {
    return bad("clusters of 1 to 4 CTAs");
  }
  if (c.split_k > 1 && (c.cluster_m * c.cluster_n > 1 || c.pingpong)) {
    return bad("split-K takes the whole cluster, and no ping-pong");
  }
  if (c.split_k > 1 && is_block(s.scale)) {
    return bad("block scales need split_k 1");
  }
  if (s.pow2 && !takes_pow2(s)) {
    return bad("pow2 is for axis scales and a bf16 result without bias and amax");
  }
  if (s.fast && is_block(s.scale)) return bad("block scales need precise accumulation");
  if (c.tile_n / c.split_k % 32 != 0) {
    return bad("each CTA of a split-K cluster must write a multiple of 32 columns");
  }
  if (s.problems < 1 || s.problems > 2) return bad("one or two problems a launch");
  if (s.groups == GemmGroups::kM &&
      (c.cluster_m > 1 || s.scale == ScaleMode::kBlock1x128 || s.add)) {
    return bad(
        "a GEMM over groups of rows has clusters along n alone, a b with scales of tensors, axes "
        "or "
        "128x128 blocks, and no add");
  }
  if (s.groups != GemmGroups::kNone &&
      (c.split_k > 1 || s.problems > 1 || s.bias || s.amax || s.shards)) {
    return bad("a GEMM over groups has no split-K, bias, amax and shards");
  }
  if (s.groups == GemmGroups::kK && s.scale == ScaleMode::kBlock128x128) {
    return bad("a GEMM over groups of K has block scales of 1x128 alone");
  }
  // Columns behind n are not zeros then.
  if (s.shards && s.amax) return bad("an amax is of a b in one piece");
  if (c.tile_m / c.cluster_n % 8 != 0 || c.tile_n / c.cluster_m % 8 != 0) {
    return bad("each CTA of a cluster must copy a multiple of 8 rows");
  }
  if (c.raster_group < 1) return bad("the raster group must be positive");
  if (c.stages < 2 || c.stages > 16) return bad("2 to 16 stages");
  if (const int smem = launch().dynamic_smem_bytes; smem > kMaxSmemBytes) {
    return bad(f8::format("needs {} bytes of shared memory, {} over the limit of {}", smem,
                          smem - kMaxSmemBytes, kMaxSmemBytes));
  }
  // The schedule of a grouped GEMM takes registers, and so do scales of columns, a bias and an
  // amax where a whole ping-pong tile is in registers, without promotion accumulators.
  const bool two_blocks = !c.pingpong && c.tile_m / c.warpgroups > 64;
  const bool blocks = s.scale == ScaleMode::kBlock1x128 && two_blocks && s.problems == 2;
  const bool whole_tile =
      s.scale == ScaleMode::kAxis && s.fast && c.pingpong && (s.problems == 2 || s.bias || s.amax);
  const int taken = blocks || whole_tile ? 8 : 0;
  if (const int most = max_accumulators(c.warpgroups) - taken; gemm_accumulators(s) > most) {
    return bad(f8::format("needs {} accumulators a thread, {} fit without spilling",
                          gemm_accumulators(s), most));
  }
  return {};
}

Stub GemmSpec::stub() const {
  const auto& s = *this;
  const GemmConfig& c = s.config;
  const GemmRegisters registers = gemm_registers(c.warpgroups);
  const GemmMma mma = gemm_mma(s);
  Stub stub{"gemm.cuh", "float8_gemm", {}};
  stub.text =
      "struct Config {\n" + constant("kTileM", c.tile_m) + constant("kTileN", c.tile_n) +
      constant("kStages", c.stages) + constant("kClusterM", c.cluster_m) +
      constant("kClusterN", c.cluster_n) + constant("kSplitK", c.split_k) +
      constant("kWarpgroups", c.warpgroups) + constant("kPingpong", c.pingpong) +
      constant("kProblems", s.problems) +
      constant("Group", "kGroup",
               s.groups == GemmGroups::kM   ? "Group::kM"
               : s.groups == GemmGroups::kK ? "Group::kK"
                                            : "Group::kNone") +
      constant("kConsumerRegisters", registers.consumer) +
      constant("kProducerRegisters", registers.producer) +
      constant("Scale", "kScale", scale_name(s.scale)) + "  // main loop\n" +
      constant("kShards", s.shards) + constant("kFast", s.fast) +
      constant("kOperandBytes", static_cast<int>(size_bytes(s.a))) +
      constant("kMnMajorA", s.mn_major_a()) + constant("kMnMajorB", s.mn_major_b()) +
      constant("kMmaN", mma.n) + constant("kPromotionAccumulators", mma.promotion_accumulators) +
      mma_function(s, mma.n) + "  // epilogue\n" + constant("kFloatOutput", s.d == Dtype::kF32) +
      constant("kHalfOutput", s.d == Dtype::kF16) + constant("kBias", s.bias) +
      constant("kAdd", s.add) + constant("kAmax", s.amax) + constant("kPow2", scales_in_bf16(s)) +
      constant("kOutBuffers", gemm_out_buffers(s)) + "};\n" + check_gemm(s) +
      f8::format(
          "extern \"C\" __global__ void __launch_bounds__({}, 1)\n"
          "float8_gemm(const __grid_constant__ GemmMaps<{}> maps,\n"
          "            const __grid_constant__ {} args) {{\n"
          "  extern __shared__ __align__(1024) u8 shared[];\n"
          "  Gemm<Config>::run(maps, args, shared);\n"
          "}}\n",
          launch().threads, s.problems, args_name(s));
  return stub;
}

LaunchTraits GemmSpec::launch() const {
  return {.threads = 128 * (config.warpgroups + 1),
          .dynamic_smem_bytes = layout_of(*this, gemm_out_buffers(*this)).bytes(),
          .cluster_size = config.cluster_m * config.cluster_n * config.split_k};
}

ParameterBytes GemmSpec::parameters() const {
  return {.first = 3 * kTensorMapBytes * static_cast<size_t>(problems),
          .second = groups == GemmGroups::kM   ? sizeof(kernels::GroupedGemmArgs)
                    : groups == GemmGroups::kK ? sizeof(kernels::KGroupedGemmArgs)
                                               : sizeof(kernels::GemmArgs)};
}

}  // namespace f8::codegen
