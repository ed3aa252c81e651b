#include "codegen/specs/cast.hpp"

#include <algorithm>

#include "codegen/specs/text.hpp"

namespace f8::codegen {
namespace {

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
    {"/shard", &CastSpec::shard},       {"/list", &CastSpec::list}, {"/group", &CastSpec::group}};

// True where the cast, which takes more registers than others, has four blocks an SM without
// spills.
bool fits_four_blocks(const CastSpec& s) {
  return memory_type(s) != Dtype::kF32 && s.source != kernels::RowSource::kSwigluBackward &&
         has_scale(s, ScaleMode::kBlock1x128) && !has_scale(s, ScaleMode::kBlock128x128) &&
         !s.count && !s.sums;
}

// True where a tile waits in dynamic shared memory.
bool stashes_tiles(const CastSpec& s) {
  return s.one_launch && !scales_rows_alone(s);
}

}  // namespace

Result<CastSpec> CastSpec::parse(std::string_view kind, std::string_view rest) {
  CastSpec s;
  s.one_launch = kind == "quantize";
  std::string_view types = take_until(rest, '/');
  s.in = F8_TRY(parse_dtype(take_until(types, '.')));
  s.out = F8_TRY(parse_dtype(types));
  std::string_view scales = take_until(rest, '/');
  const std::string_view whole = scales;
  const std::string_view first = take_until(scales, '+');
  s.delayed = first == "delayed" || scales == "delayed";
  const auto parse_mode = [](std::string_view text) {
    return text == "delayed" ? ScaleMode::kTensor : parse_scale(text);
  };
  s.scale_q = F8_TRY(parse_mode(first));
  s.scale_qt = whole.size() == first.size() ? s.scale_q : F8_TRY(parse_mode(scales));
  const std::string_view copies = rest.substr(0, rest.find('/'));
  const std::string_view all_options = rest.substr(copies.size());
  std::string_view options = all_options;
  s.source = take_source(options);
  s.q = copies == "q" || copies == "q+qt";
  s.qt = copies == "qt" || copies == "q+qt";
  if (!s.q && !s.qt) {
    return fail(ErrorCode::kInvalidArgument, "copies {}: expected q, qt or q+qt", quote(copies));
  }
  while (!options.empty()) {
    const auto known = std::ranges::find_if(
        kCastOptions, [&](const auto& option) { return options.starts_with(option.first); });
    if (known == std::end(kCastOptions)) break;
    options.remove_prefix(known->first.size());
    s.*(known->second) = true;
  }
  // Each option comes once and in order.
  if (!options.empty() || !s.key().ends_with(all_options)) {
    return fail(ErrorCode::kInvalidArgument,
                "{} after the copies: expected /from_f32 /pow2 /hold /count /sums /flag /shard "
                "/list /group, some of them in this order",
                quote(all_options));
  }
  if (scale_text(s) != whole) {
    return fail(ErrorCode::kInvalidArgument,
                "scales {}: two are for two copies with different scales, tensor or delayed alike",
                quote(whole));
  }
  return s;
}

std::string CastSpec::key() const {
  const auto& s = *this;
  std::string text = f8::format("{}/{}.{}/{}/{}", s.one_launch ? "quantize" : "cast",
                                to_string(s.in), to_string(s.out), scale_text(s),
                                s.q && s.qt ? "q+qt"
                                : s.q       ? "q"
                                            : "qt");
  for (const auto& [name, field] : kCastOptions) {
    if (s.*field) text += name;
  }
  return text.append(to_string(s.source));
}

Status CastSpec::validate() const {
  const auto& s = *this;
  F8_TRY(check_input(s.in, s.from_f32));
  F8_TRY(check_source(s.source, s.group, s.from_f32));
  if (!is_fp8(s.out)) {
    return fail(ErrorCode::kInvalidArgument, "cast to {}: expected e4m3 or e5m2", to_string(s.out));
  }
  if (!s.q && !s.qt) return fail(ErrorCode::kInvalidArgument, "a cast writes at least one copy");
  if (s.delayed && !has_scale(s, ScaleMode::kTensor)) {
    return fail(ErrorCode::kInvalidArgument, "a delayed scale is the tensor's");
  }
  if (s.one_launch && !can_be_one_launch(s)) {
    return fail(ErrorCode::kInvalidArgument,
                "one launch computes the amaxes of tensors that are 16-bit in memory for dynamic "
                "tensor and axis scales, without /count, /sums, /flag and /list");
  }
  if (s.shard && !takes_shards(s)) {
    return fail(ErrorCode::kInvalidArgument,
                "a shard's given amaxes are of 128x128 blocks: all copies have their scales");
  }
  if (s.group && (s.count || s.sums || s.shard || s.list)) {
    return fail(ErrorCode::kInvalidArgument, "groups have no /count, /sums, /shard and /list");
  }
  if (s.sums && s.list) {
    return fail(ErrorCode::kInvalidArgument, "sums of columns are of one matrix, not of a list");
  }
  return {};
}

std::string cast_config(const CastSpec& s) {
  return "struct Config {\n" + constant("Input", "kInput", input_name(s.in, s.from_f32)) +
         constant("Fp8", "kFormat", s.out == Dtype::kE4m3 ? "Fp8::kE4m3" : "Fp8::kE5m2") +
         constant("Scale", "kScaleQ", scale_name(s.scale_q)) +
         constant("Scale", "kScaleQt", scale_name(s.scale_qt)) + constant("kDelayed", s.delayed) +
         constant("kRowMajor", s.q) + constant("kTransposed", s.qt) + constant("kPow2", s.pow2) +
         constant("kSaturate", s.saturate) + constant("kCount", s.count) +
         constant("kSums", s.sums) + constant("kNoopFlag", s.noop_flag) +
         constant("kShard", s.shard) + (s.group ? source_constant(s.source) : std::string()) +
         "};\n";
}

namespace {

// What differs among the kernels of casts: the template, its arguments and its bounds.
struct CastKernel {
  const char* file;
  const char* templ;
  const char* args;
  std::string check;
  int blocks_per_sm;  // that registers must leave room for; 0: as it comes
};

template <class Args>
CastKernel cast_kernel(const char* file, const char* templ, const char* args, int blocks_per_sm) {
  return {file, templ, args, check_args<Args>(args), blocks_per_sm};
}

CastKernel kernel_of(const CastSpec& s) {
  const bool rows = scales_rows_alone(s);
  if (s.one_launch && s.group) {
    const bool gradients = s.source == kernels::RowSource::kSwigluBackward;
    return rows ? cast_kernel<kernels::GroupRowsArgs>("quantize_rows.cuh", "QuantizeRows",
                                                      "GroupRowsArgs", gradients ? 0 : 4)
                : cast_kernel<kernels::GroupQuantizeArgs>("group_quantize.cuh", "GroupQuantize",
                                                          "GroupQuantizeArgs",
                                                          quantize_blocks_per_sm(s));
  }
  if (s.one_launch) {
    return cast_kernel<kernels::QuantizeArgs>(rows ? "quantize_rows.cuh" : "quantize.cuh",
                                              rows ? "QuantizeRows" : "Quantize", "QuantizeArgs",
                                              kQuantizeBlocksPerSm);
  }
  const int four = fits_four_blocks(s) ? 4 : 0;
  if (s.group) {
    return cast_kernel<kernels::GroupCastArgs>("group_cast.cuh", "GroupCast", "GroupCastArgs",
                                               four);
  }
  return s.list ? cast_kernel<kernels::CastListArgs>("cast.cuh", "Cast", "CastListArgs", four)
                : cast_kernel<kernels::CastArgs>("cast.cuh", "Cast", "CastArgs", four);
}

}  // namespace

Stub CastSpec::stub() const {
  const CastKernel kernel = kernel_of(*this);
  const char* const name = one_launch ? "float8_quantize" : "float8_cast";
  Stub stub{kernel.file, name, cast_config(*this) + kernel.check};
  stub.text += check_threads("kTileThreads", launch());
  if (stashes_tiles(*this)) {
    stub.text += check(f8::format("{}<Config>::kSharedBytes", kernel.templ),
                       static_cast<size_t>(launch().dynamic_smem_bytes), "dynamic_smem_bytes()");
  }
  stub.text += f8::format(
      "extern \"C\" __global__ void __launch_bounds__(kTileThreads{})\n"
      "{}(const __grid_constant__ {} args) {{\n"
      "  {}<Config>::run(args);\n"
      "}}\n",
      kernel.blocks_per_sm > 0 ? f8::format(", {}", kernel.blocks_per_sm) : "", name, kernel.args,
      kernel.templ);
  return stub;
}

LaunchTraits CastSpec::launch() const {
  return {.dynamic_smem_bytes = stashes_tiles(*this) ? kernels::kStashBytes : 0,
          .cooperative = is_cooperative(*this),
          .occupancy_limited = true};
}

ParameterBytes CastSpec::parameters() const {
  return {.first = one_launch && group ? scales_rows_alone(*this)
                                             ? sizeof(kernels::GroupRowsArgs)
                                             : sizeof(kernels::GroupQuantizeArgs)
                   : group ? sizeof(kernels::GroupCastArgs)
                   : one_launch        ? sizeof(kernels::QuantizeArgs)
                   : list              ? sizeof(kernels::CastListArgs)
                                       : sizeof(kernels::CastArgs)};
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

bool scales_columns_alone(const CastSpec& spec) {
  return can_be_one_launch(spec) && !has_scale(spec, ScaleMode::kTensor) &&
         !(spec.q && spec.scale_q == ScaleMode::kAxis);
}

int quantize_blocks_per_sm(const CastSpec& spec) {
  // Both gradients of SwiGLU take more registers.
  return spec.source == kernels::RowSource::kSwigluBackward ? 2 : kQuantizeBlocksPerSm;
}

int quantize_tiles_per_sm(const CastSpec& spec) {
  const bool pairs = spec.source == kernels::RowSource::kSwigluBackward;
  return (pairs ? 1 : 2) * quantize_blocks_per_sm(spec);
}

bool is_cooperative(const CastSpec& spec) {
  return spec.one_launch && !spec.group && !scales_rows_alone(spec);
}

std::optional<AmaxSpec> amax_before(const CastSpec& spec) {
  const AmaxSpec amax{.in = spec.in,
                      .tensor = !spec.delayed && has_scale(spec, ScaleMode::kTensor),
                      .row = spec.q && spec.scale_q == ScaleMode::kAxis,
                      .col = spec.qt && spec.scale_qt == ScaleMode::kAxis,
                      .block = spec.shard,
                      .noop_flag = spec.noop_flag,
                      .from_f32 = spec.from_f32,
                      .group = spec.group,
                      .source = spec.source};
  if (!amax.tensor && !amax.row && !amax.col && !amax.block) return std::nullopt;
  return amax;
}

}  // namespace f8::codegen
