#include "codegen/kernel_spec.hpp"

#include <algorithm>
#include <optional>

#include "base/text.hpp"
#include "codegen/kernels/kernel_args.cuh"
#include "codegen/mma_text.hpp"

namespace f8::codegen {
namespace {

constexpr int kMaxSmemBytes = 232448;

bool take(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

std::string over_text(const AmaxSpec& s) {
  if (s.block) return "block";
  if (!s.row && !s.col) return "tensor";
  return f8::format("{}{}{}", s.row ? "row" : "", s.col ? "col" : "", s.tensor ? "+tensor" : "");
}

// The scales of a cast's copies: one text where they are the same, or where there is one copy.
std::string scale_text(const CastSpec& s) {
  const auto one = [&](ScaleMode mode) -> std::string_view {
    return s.delayed && mode == ScaleMode::kTensor ? "delayed" : to_string(mode);
  };
  if (!s.q || !s.qt || s.scale_q == s.scale_qt)
    return std::string(one(s.q ? s.scale_q : s.scale_qt));
  return f8::format("{}+{}", one(s.scale_q), one(s.scale_qt));
}

// The options that may follow a cast's copies, in order.
constexpr std::pair<std::string_view, bool CastSpec::*> kCastOptions[] = {
    {"/from_f32", &CastSpec::from_f32}, {"/pow2", &CastSpec::pow2}, {"/hold", &CastSpec::saturate},
    {"/count", &CastSpec::count},       {"/sums", &CastSpec::sums}, {"/flag", &CastSpec::noop_flag},
    {"/shard", &CastSpec::shard},       {"/list", &CastSpec::list}};

struct KeyOf {
  std::string operator()(const AmaxSpec& s) const {
    return f8::format("amax/{}/{}{}{}{}", to_string(s.in), over_text(s),
                      s.from_f32 ? "/from_f32" : "", s.noop_flag ? "/flag" : "",
                      s.list ? "/list" : "");
  }
  std::string operator()(const CastSpec& s) const {
    std::string text = f8::format("{}/{}.{}/{}/{}", s.one_launch ? "quantize" : "cast",
                                  to_string(s.in), to_string(s.out), scale_text(s),
                                  s.q && s.qt ? "q+qt"
                                  : s.q       ? "q"
                                              : "qt");
    for (const auto& [name, field] : kCastOptions) {
      if (s.*field) text += name;
    }
    return text;
  }
  std::string operator()(const GemmSpec& s) const {
    const std::string extras =
        f8::format("{}{}{}{}{}", s.bias ? "+bias" : "", s.add ? "+add" : "", s.amax ? "+amax" : "",
                   s.pow2 ? "+pow2" : "", s.shards ? "+shards" : "");
    return f8::format("gemm{}/{}.{}.{}/{}/{}/{}{}{}", s.problems == 2 ? "2" : "", to_string(s.a),
                      to_string(s.b), to_string(s.d), to_string(s.scale),
                      s.fast ? "fast" : "precise", tile_key(s.config), extras.empty() ? "" : "/",
                      extras);
  }
  std::string operator()(const ScaleUpdateSpec&) const { return "scale_update"; }
  std::string operator()(const FoundInfSpec&) const { return "found_inf"; }
  std::string operator()(const FingerprintSpec&) const { return "fingerprint"; }
  std::string operator()(const ColumnSumsSpec& s) const {
    return f8::format("column_sums/{}", to_string(s.in));
  }
  std::string operator()(const BiasGradSpec& s) const {
    return f8::format("bias_grad/{}", to_string(s.out));
  }
};

Result<ScaleMode> parse_scale(std::string_view text) {
  for (const ScaleMode mode :
       {ScaleMode::kTensor, ScaleMode::kAxis, ScaleMode::kBlock1x128, ScaleMode::kBlock128x128}) {
    if (text == to_string(mode)) return mode;
  }
  return fail(ErrorCode::kInvalidArgument,
              "unknown scale {}: expected tensor, axis, block1x128 or block128x128", quote(text));
}

bool take_off_end(std::string_view& text, std::string_view word) {
  if (!text.ends_with(word)) return false;
  text.remove_suffix(word.size());
  return true;
}

Result<KernelSpec> parse_amax(std::string_view rest) {
  AmaxSpec s;
  s.list = take_off_end(rest, "/list");
  s.noop_flag = take_off_end(rest, "/flag");
  s.from_f32 = take_off_end(rest, "/from_f32");
  s.in = F8_TRY(parse_dtype(take_until(rest, '/')));
  std::string_view more = rest;
  const std::string_view axes = take_until(more, '+');
  s.row = axes == "row" || axes == "rowcol";
  s.col = axes == "col" || axes == "rowcol";
  s.tensor = rest == "tensor" || more == "tensor";
  s.block = rest == "block";
  if ((!s.row && !s.col && !s.block && rest != "tensor") || rest != over_text(s)) {
    return fail(
        ErrorCode::kInvalidArgument,
        "amax over {}: expected tensor, block, or row, col or rowcol with or without +tensor",
        quote(rest));
  }
  return s;
}

Result<KernelSpec> parse_cast(std::string_view rest, bool one_launch) {
  CastSpec s;
  s.one_launch = one_launch;
  std::string_view types = take_until(rest, '/');
  s.in = F8_TRY(parse_dtype(take_until(types, '.')));
  s.out = F8_TRY(parse_dtype(types));
  std::string_view scales = take_until(rest, '/');
  const std::string_view whole = scales;
  const std::string_view first = take_until(scales, '+');
  s.delayed = first == "delayed" || scales == "delayed";
  const auto parse = [](std::string_view text) {
    return text == "delayed" ? ScaleMode::kTensor : parse_scale(text);
  };
  s.scale_q = F8_TRY(parse(first));
  s.scale_qt = whole.size() == first.size() ? s.scale_q : F8_TRY(parse(scales));
  const std::string_view copies = rest.substr(0, rest.find('/'));
  const std::string_view all_options = rest.substr(copies.size());
  std::string_view options = all_options;
  s.q = copies == "q" || copies == "q+qt";
  s.qt = copies == "qt" || copies == "q+qt";
  if (!s.q && !s.qt) {
    return fail(ErrorCode::kInvalidArgument, "copies {}: expected q, qt or q+qt", quote(copies));
  }
  while (!options.empty()) {
    const auto known = std::ranges::find_if(
        kCastOptions, [&](const auto& option) { return options.starts_with(option.first); });
    if (known == std::end(kCastOptions)) break;
    take(options, known->first);
    s.*(known->second) = true;
  }
  // Each option comes once and in order.
  if (!options.empty() || !key(KernelSpec(s)).ends_with(all_options)) {
    return fail(ErrorCode::kInvalidArgument,
                "{} after the copies: expected /from_f32 /pow2 /hold /count /sums /flag /shard "
                "/list, some of them in this order",
                quote(all_options));
  }
  if (scale_text(s) != whole) {
    return fail(ErrorCode::kInvalidArgument,
                "scales {}: two are for two copies with different scales, tensor or delayed alike",
                quote(whole));
  }
  return s;
}

Result<KernelSpec> parse_gemm_spec(std::string_view rest, int problems) {
  GemmSpec s;
  s.problems = problems;
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
  if (!rest.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "{} after the tile: expected +bias, +add, +amax, +pow2, +shards", quote(rest));
  }
  return s;
}

template <class Spec>
Result<KernelSpec> parse_of_type(std::string_view rest) {
  return KernelSpec(Spec{F8_TRY(parse_dtype(rest))});
}

Status check_input(Dtype in, bool from_f32 = false) {
  if (is_fp8(in)) {
    return fail(ErrorCode::kInvalidArgument, "type {}: expected bf16, f16 or f32", to_string(in));
  }
  if (from_f32 && in == Dtype::kF32) {
    return fail(ErrorCode::kInvalidArgument, "/from_f32 rounds fp32 elements to bf16 or f16");
  }
  return {};
}

struct Validate {
  Status operator()(const AmaxSpec& s) const {
    F8_TRY(check_input(s.in, s.from_f32));
    if (s.block ? s.tensor || s.row || s.col : !s.tensor && !s.row && !s.col) {
      return fail(ErrorCode::kInvalidArgument,
                  "an amax is over the tensor, rows or columns, or over blocks alone");
    }
    return {};
  }

  Status operator()(const CastSpec& s) const {
    F8_TRY(check_input(s.in, s.from_f32));
    if (!is_fp8(s.out)) {
      return fail(ErrorCode::kInvalidArgument, "cast to {}: expected e4m3 or e5m2",
                  to_string(s.out));
    }
    if (!s.q && !s.qt) return fail(ErrorCode::kInvalidArgument, "a cast writes at least one copy");
    if (s.delayed && !has_scale(s, ScaleMode::kTensor)) {
      return fail(ErrorCode::kInvalidArgument, "a delayed scale is the tensor's");
    }
    if (s.one_launch && !can_be_one_launch(s)) {
      return fail(ErrorCode::kInvalidArgument,
                  "one launch computes the amaxes of tensors that are 16-bit in memory for dynamic "
                  "tensor and "
                  "axis scales, "
                  "without /count, /sums, /flag and /list");
    }
    if (s.shard && !takes_shards(s)) {
      return fail(ErrorCode::kInvalidArgument,
                  "a shard's given amaxes are of 128x128 blocks: all copies have their scales");
    }
    if (s.sums && s.list) {
      return fail(ErrorCode::kInvalidArgument, "sums of columns are of one matrix, not of a list");
    }
    return {};
  }

  Status operator()(const ScaleUpdateSpec&) const { return {}; }
  Status operator()(const FoundInfSpec&) const { return {}; }
  Status operator()(const FingerprintSpec&) const { return {}; }
  Status operator()(const ColumnSumsSpec& s) const { return check_input(s.in); }
  Status operator()(const BiasGradSpec& s) const { return check_input(s.out); }

  Status operator()(const GemmSpec& s) const {
    const GemmConfig& c = s.config;
    const auto bad = [&](std::string why) {
      return fail(ErrorCode::kInvalidArgument, "configuration {}: {}", key(c), why);
    };
    if (!is_fp8(s.a) || !is_fp8(s.b)) return bad("operands must be e4m3 or e5m2");
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
    // Columns behind n are not zeros then.
    if (s.shards && s.amax) return bad("an amax is of a b in one piece");
    if (c.tile_m / c.cluster_n % 8 != 0 || c.tile_n / c.cluster_m % 8 != 0) {
      return bad("each CTA of a cluster must copy a multiple of 8 rows");
    }
    if (c.raster_group < 1) return bad("the raster group must be positive");
    if (c.stages < 2 || c.stages > 16) return bad("2 to 16 stages");
    if (const int smem = dynamic_smem_bytes(s); smem > kMaxSmemBytes) {
      return bad(f8::format("needs {} bytes of shared memory, {} over the limit of {}", smem,
                            smem - kMaxSmemBytes, kMaxSmemBytes));
    }
    // The schedule of a grouped GEMM takes registers, and so do scales of columns, a bias and an
    // amax where a whole ping-pong tile is in registers, without promotion accumulators.
    const bool two_blocks = !c.pingpong && c.tile_m / c.warpgroups > 64;
    const bool blocks = s.scale == ScaleMode::kBlock1x128 && two_blocks && s.problems == 2;
    const bool whole_tile = s.scale == ScaleMode::kAxis && s.fast && c.pingpong &&
                            (s.problems == 2 || s.bias || s.amax);
    const int taken = blocks || whole_tile ? 8 : 0;
    if (const int most = max_accumulators(c.warpgroups) - taken; gemm_accumulators(s) > most) {
      return bad(f8::format("needs {} accumulators a thread, {} fit without spilling",
                            gemm_accumulators(s), most));
    }
    return {};
  }
};

}  // namespace

bool takes_pow2(const GemmSpec& spec) {
  return spec.scale == ScaleMode::kAxis && spec.d == Dtype::kBf16 && !spec.bias && !spec.amax;
}

bool has_scale(const CastSpec& spec, ScaleMode mode) {
  return (spec.q && spec.scale_q == mode) || (spec.qt && spec.scale_qt == mode);
}

bool takes_shards(const CastSpec& spec) {
  constexpr ScaleMode kBlock = ScaleMode::kBlock128x128;
  return (!spec.q || spec.scale_q == kBlock) && (!spec.qt || spec.scale_qt == kBlock);
}

bool can_be_one_launch(const CastSpec& spec) {
  return memory_type(spec) != Dtype::kF32 && !spec.delayed && !spec.list && !spec.count &&
         !spec.sums && !spec.noop_flag && !spec.shard && !has_scale(spec, ScaleMode::kBlock1x128) &&
         !has_scale(spec, ScaleMode::kBlock128x128);
}

bool scales_rows_alone(const CastSpec& spec) {
  return can_be_one_launch(spec) && spec.q && !spec.qt && spec.scale_q == ScaleMode::kAxis;
}

bool is_cooperative(const CastSpec& spec) {
  return spec.one_launch && !scales_rows_alone(spec);
}

std::string key(const KernelSpec& spec) {
  return std::visit(KeyOf{}, spec);
}

Result<KernelSpec> parse_kernel_spec(std::string_view text) {
  std::string_view rest = text;
  const std::string_view kind = take_until(rest, '/');
  Result<KernelSpec> spec = fail(ErrorCode::kInvalidArgument,
                                 "expected amax/, cast/, quantize/, gemm/, gemm2/, column_sums/, "
                                 "bias_grad/, scale_update, found_inf or fingerprint");
  if (text == "scale_update") spec = ScaleUpdateSpec{};
  if (text == "found_inf") spec = FoundInfSpec{};
  if (text == "fingerprint") spec = FingerprintSpec{};
  if (kind == "amax") spec = parse_amax(rest);
  if (kind == "cast" || kind == "quantize") spec = parse_cast(rest, kind == "quantize");
  if (kind == "column_sums") spec = parse_of_type<ColumnSumsSpec>(rest);
  if (kind == "bias_grad") spec = parse_of_type<BiasGradSpec>(rest);
  if (kind == "gemm" || kind == "gemm2") spec = parse_gemm_spec(rest, kind == "gemm" ? 1 : 2);
  if (spec) {
    if (const Status legal = validate(*spec); !legal) spec = std::unexpected(legal.error());
  }
  if (!spec) {
    return fail(ErrorCode::kInvalidArgument, "kernel {}: {}", quote(text), spec.error().message);
  }
  return spec;
}

Status validate(const KernelSpec& spec) {
  return std::visit(Validate{}, spec);
}

int threads_per_block(const KernelSpec& spec) {
  const auto* gemm = std::get_if<GemmSpec>(&spec);
  return gemm == nullptr ? 256 : 128 * (gemm->config.warpgroups + 1);
}

int out_row_bytes(const GemmSpec& spec) {
  const auto element = static_cast<int>(size_bytes(spec.d));
  return kernels::out_columns(spec.config.tile_n / spec.config.split_k, element) * element;
}

namespace {

int gemm_smem_bytes(const GemmSpec& s, int out_buffers) {
  const GemmConfig& c = s.config;
  const int scales = !is_block(s.scale) ? 0
                     : s.scale == ScaleMode::kBlock128x128
                         ? 4 * c.tile_m + kernels::scale_rows_2d(c.tile_n) * kernels::kScaleBytes2d
                         : 4 * (c.tile_m + c.tile_n);
  // Epilogue operands of each row and column, and two barriers.
  const int floats =
      (s.scale == ScaleMode::kAxis ? c.tile_m + c.tile_n : 0) + (s.bias ? c.tile_n : 0);
  const int operands = floats > 0 ? (c.pingpong ? 2 : 1) * (4 * floats + 16) : 0;
  const int split = kernels::split_k_bytes(c.tile_m, c.tile_n, c.split_k, c.warpgroups);
  return c.stages * ((c.tile_m + c.tile_n) * kernels::kStageK + 16 + scales) +
         c.warpgroups * out_buffers * kernels::kOutRows * out_row_bytes(s) + operands + split;
}

}  // namespace

int gemm_out_buffers(const GemmSpec& s) {
  const GemmConfig& c = s.config;
  const int rows = c.tile_m / (c.pingpong ? 1 : c.warpgroups);
  const int written = c.tile_n / c.split_k * static_cast<int>(size_bytes(s.d));
  const int whole = rows / kernels::kOutRows * written / out_row_bytes(s);
  int buffers = is_block(s.scale) ? 1 : 2;  // the scales take room
  while (buffers < whole && gemm_smem_bytes(s, buffers + 1) <= kMaxSmemBytes) ++buffers;
  return buffers;
}

int dynamic_smem_bytes(const KernelSpec& spec) {
  const auto* cast = std::get_if<CastSpec>(&spec);
  if (cast != nullptr) return is_cooperative(*cast) ? kernels::kStashBytes : 0;
  const auto* gemm = std::get_if<GemmSpec>(&spec);
  if (gemm == nullptr) return 0;
  return gemm_smem_bytes(*gemm, gemm_out_buffers(*gemm));
}

std::optional<AmaxSpec> amax_before(const CastSpec& spec) {
  const AmaxSpec amax{.in = spec.in,
                      .tensor = !spec.delayed && has_scale(spec, ScaleMode::kTensor),
                      .row = spec.q && spec.scale_q == ScaleMode::kAxis,
                      .col = spec.qt && spec.scale_qt == ScaleMode::kAxis,
                      .block = spec.shard,
                      .noop_flag = spec.noop_flag,
                      .from_f32 = spec.from_f32};
  if (!amax.tensor && !amax.row && !amax.col && !amax.block) return std::nullopt;
  return amax;
}

}  // namespace f8::codegen
