#include "codegen/kernel_spec.hpp"

#include <charconv>
#include <optional>

#include "base/text.hpp"
#include "codegen/mma_text.hpp"

namespace f8::codegen {
namespace {

constexpr int kMaxSmemBytes = 232448;
constexpr int kStageK = 128;
constexpr int kOutBufferBytes = 2 * 64 * 128;  // of each math warpgroup
constexpr int kSmemAlignment = 1024;

// Takes a leading integer off `text`.
std::optional<int> take_int(std::string_view& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

bool take(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

// Takes `word` and the integer after it.
bool take_number(std::string_view& text, std::string_view word, int& out) {
  if (!take(text, word)) return false;
  const std::optional<int> value = take_int(text);
  if (value) out = *value;
  return value.has_value();
}

bool take_tile(std::string_view& text, GemmConfig& c) {
  const bool good = take_number(text, "", c.tile_m) && take_number(text, "x", c.tile_n) &&
                    take_number(text, "s", c.stages) && take_number(text, "c", c.cluster_m) &&
                    take_number(text, "x", c.cluster_n) && take_number(text, "w", c.warpgroups);
  c.pingpong = good && take(text, "p");
  return good;
}

std::string tile_key(const GemmConfig& c) {
  return fmt::format("{}x{}s{}c{}x{}w{}{}", c.tile_m, c.tile_n, c.stages, c.cluster_m, c.cluster_n,
                     c.warpgroups, c.pingpong ? "p" : "");
}

std::string_view over_text(const AmaxSpec& s) {
  return s.tensor ? "tensor" : s.row && s.col ? "rowcol" : s.row ? "row" : "col";
}

struct KeyOf {
  std::string operator()(const AmaxSpec& s) const {
    return fmt::format("amax/{}/{}", to_string(s.in), over_text(s));
  }
  std::string operator()(const CastSpec& s) const {
    return fmt::format("cast/{}.{}/{}/{}{}", to_string(s.in), to_string(s.out), to_string(s.scale),
                       s.q && s.qt ? "q+qt"
                       : s.q       ? "q"
                                   : "qt",
                       s.pow2 ? "/pow2" : "");
  }
  std::string operator()(const GemmSpec& s) const {
    return fmt::format("gemm/{}.{}.{}/{}/{}/{}", to_string(s.a), to_string(s.b), to_string(s.d),
                       to_string(s.scale), s.fast ? "fast" : "precise", tile_key(s.config));
  }
};

Result<ScaleMode> parse_scale(std::string_view text) {
  if (text == "tensor") return ScaleMode::kTensor;
  if (text == "axis") return ScaleMode::kAxis;
  return fail(ErrorCode::kInvalidArgument, "unknown scale {}: expected tensor or axis",
              quote(text));
}

Result<KernelSpec> parse_amax(std::string_view rest) {
  AmaxSpec s;
  s.in = F8_TRY(parse_dtype(take_until(rest, '/')));
  s.tensor = rest == "tensor";
  s.row = rest == "row" || rest == "rowcol";
  s.col = rest == "col" || rest == "rowcol";
  if (!s.tensor && !s.row && !s.col) {
    return fail(ErrorCode::kInvalidArgument, "amax over {}: expected tensor, row, col or rowcol",
                quote(rest));
  }
  return s;
}

Result<KernelSpec> parse_cast(std::string_view rest) {
  CastSpec s;
  std::string_view types = take_until(rest, '/');
  s.in = F8_TRY(parse_dtype(take_until(types, '.')));
  s.out = F8_TRY(parse_dtype(types));
  s.scale = F8_TRY(parse_scale(take_until(rest, '/')));
  const std::string_view copies = take_until(rest, '/');
  s.q = copies == "q" || copies == "q+qt";
  s.qt = copies == "qt" || copies == "q+qt";
  if (!s.q && !s.qt) {
    return fail(ErrorCode::kInvalidArgument, "copies {}: expected q, qt or q+qt", quote(copies));
  }
  s.pow2 = rest == "pow2";
  if (!s.pow2 && !rest.empty()) {
    return fail(ErrorCode::kInvalidArgument, "{} after the copies: expected pow2 or nothing",
                quote(rest));
  }
  return s;
}

Result<KernelSpec> parse_gemm_spec(std::string_view rest) {
  GemmSpec s;
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
  if (!take_tile(rest, s.config) || !rest.empty()) {
    return fail(ErrorCode::kInvalidArgument, "tile {}: expected a form such as 128x256s4c2x1w2",
                quote(rest));
  }
  return s;
}

Status check_input(Dtype in) {
  if (is_fp8(in)) {
    return fail(ErrorCode::kInvalidArgument, "input type {}: expected bf16, f16 or f32",
                to_string(in));
  }
  return {};
}

struct Validate {
  Status operator()(const AmaxSpec& s) const {
    F8_TRY(check_input(s.in));
    if (s.tensor == (s.row || s.col)) {
      return fail(ErrorCode::kInvalidArgument,
                  "an amax is over the tensor, or over rows or columns");
    }
    return {};
  }

  Status operator()(const CastSpec& s) const {
    F8_TRY(check_input(s.in));
    if (!is_fp8(s.out)) {
      return fail(ErrorCode::kInvalidArgument, "cast to {}: expected e4m3 or e5m2",
                  to_string(s.out));
    }
    if (!s.q && !s.qt) return fail(ErrorCode::kInvalidArgument, "a cast writes at least one copy");
    return {};
  }

  Status operator()(const GemmSpec& s) const {
    const GemmConfig& c = s.config;
    const auto bad = [&](std::string why) {
      return fail(ErrorCode::kInvalidArgument, "configuration {}: {}", key(c), why);
    };
    if (!is_fp8(s.a) || !is_fp8(s.b)) return bad("operands must be e4m3 or e5m2");
    if (s.d != Dtype::kBf16 && s.d != Dtype::kF32) return bad("the result must be bf16 or f32");
    if (c.warpgroups < 1 || c.warpgroups > 3) return bad("1 to 3 math warpgroups");
    if (c.tile_m < 64 || c.tile_m > 256 || c.tile_m % (c.pingpong ? 64 : 64 * c.warpgroups) != 0) {
      return bad("tile_m must be 64 to 256 in steps of 64 rows for each warpgroup");
    }
    if (c.tile_n < 64 || c.tile_n > 256 || c.tile_n % 64 != 0) {
      return bad("tile_n must be 64, 128, 192 or 256");
    }
    if (c.pingpong && c.warpgroups != 2) return bad("ping-pong needs two math warpgroups");
    const int cluster = c.cluster_m * c.cluster_n;
    if (c.cluster_m < 1 || c.cluster_n < 1 || cluster > 4) return bad("clusters of 1 to 4 CTAs");
    if (c.tile_m / c.cluster_n % 8 != 0 || c.tile_n / c.cluster_m % 8 != 0) {
      return bad("each CTA of a cluster must copy a multiple of 8 rows");
    }
    if (c.group < 1) return bad("the rasterisation group must be positive");
    if (c.stages < 2 || c.stages > 16) return bad("2 to 16 stages");
    if (const int smem = dynamic_smem_bytes(s); smem > kMaxSmemBytes) {
      return bad(fmt::format("needs {} bytes of shared memory, {} over the limit of {}", smem,
                             smem - kMaxSmemBytes, kMaxSmemBytes));
    }
    if (const int most = most_accumulators(c.warpgroups); gemm_accumulators(s) > most) {
      return bad(fmt::format("needs {} accumulators a thread, {} fit without spilling",
                             gemm_accumulators(s), most));
    }
    return {};
  }
};

}  // namespace

std::string_view to_string(ScaleMode mode) {
  return mode == ScaleMode::kTensor ? "tensor" : "axis";
}

std::string key(const KernelSpec& spec) {
  return std::visit(KeyOf{}, spec);
}

std::string key(const GemmConfig& c) {
  return fmt::format("{}g{}", tile_key(c), c.group);
}

Result<GemmConfig> parse_gemm_config(std::string_view text) {
  std::string_view rest = text;
  GemmConfig c;
  if (!take_tile(rest, c) || !take_number(rest, "g", c.group) || !rest.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "GEMM configuration {}: expected a form such as 128x256s4c2x1w2g8 "
                "(tile_m x tile_n, stages, cluster, warpgroups, p for ping-pong, group)",
                quote(text));
  }
  return c;
}

Result<KernelSpec> parse_kernel_spec(std::string_view text) {
  std::string_view rest = text;
  const std::string_view kind = take_until(rest, '/');
  Result<KernelSpec> spec = fail(ErrorCode::kInvalidArgument, "expected amax/, cast/ or gemm/");
  if (kind == "amax") spec = parse_amax(rest);
  if (kind == "cast") spec = parse_cast(rest);
  if (kind == "gemm") spec = parse_gemm_spec(rest);
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

int dynamic_smem_bytes(const KernelSpec& spec) {
  const auto* gemm = std::get_if<GemmSpec>(&spec);
  if (gemm == nullptr) return 0;
  const GemmConfig& c = gemm->config;
  return kSmemAlignment + c.stages * ((c.tile_m + c.tile_n) * kStageK + 16) +
         c.warpgroups * kOutBufferBytes;
}

}  // namespace f8::codegen
