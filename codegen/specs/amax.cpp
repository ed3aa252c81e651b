#include "codegen/specs/amax.hpp"

#include "codegen/specs/text.hpp"

namespace f8::codegen {
namespace {

std::string over_text(const AmaxSpec& s) {
  if (s.block) return "block";
  if (!s.row && !s.col) return "tensor";
  return f8::format("{}{}{}", s.row ? "row" : "", s.col ? "col" : "", s.tensor ? "+tensor" : "");
}

struct SourceName {
  kernels::RowSource source;
  std::string_view key, name;
};
constexpr SourceName kSources[] = {
    {kernels::RowSource::kMatrix, "", "RowSource::kMatrix"},
    {kernels::RowSource::kGather, "/gather", "RowSource::kGather"},
    {kernels::RowSource::kGatherScore, "/gather_score", "RowSource::kGatherScore"},
    {kernels::RowSource::kSwiglu, "/swiglu", "RowSource::kSwiglu"},
    {kernels::RowSource::kSwigluBackward, "/swiglu_backward", "RowSource::kSwigluBackward"},
    {kernels::RowSource::kPair, "/pair", "RowSource::kPair"}};

}  // namespace

std::string_view to_string(kernels::RowSource source) {
  return kSources[static_cast<size_t>(source)].key;
}

kernels::RowSource take_source(std::string_view& rest) {
  for (const SourceName& each : kSources) {
    if (!each.key.empty() && take_off_end(rest, each.key)) return each.source;
  }
  return kernels::RowSource::kMatrix;
}

Status check_source(kernels::RowSource source, bool group, bool from_f32) {
  const bool as_it_is =
      source == kernels::RowSource::kMatrix || source == kernels::RowSource::kPair;
  if (source == kernels::RowSource::kMatrix || (group && (!from_f32 || as_it_is))) return {};
  return fail(ErrorCode::kInvalidArgument, "{} is of groups{}", to_string(source),
              as_it_is ? "" : ", without /from_f32");
}

std::string source_constant(kernels::RowSource source) {
  return constant("RowSource", "kSource", kSources[static_cast<size_t>(source)].name);
}

Result<AmaxSpec> AmaxSpec::parse(std::string_view, std::string_view rest) {
  AmaxSpec s;
  s.source = take_source(rest);
  s.group = take_off_end(rest, "/group");
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

std::string AmaxSpec::key() const {
  const auto& s = *this;
  return f8::format("amax/{}/{}{}{}{}{}{}", to_string(s.in), over_text(s),
                    s.from_f32 ? "/from_f32" : "", s.noop_flag ? "/flag" : "",
                    s.list ? "/list" : "", s.group ? "/group" : "", to_string(s.source));
}

Status AmaxSpec::validate() const {
  const auto& s = *this;
  F8_TRY(check_input(s.in, s.from_f32));
  F8_TRY(check_source(s.source, s.group, s.from_f32));
  if (s.block ? s.tensor || s.row || s.col : !s.tensor && !s.row && !s.col) {
    return fail(ErrorCode::kInvalidArgument,
                "an amax is over the tensor, rows or columns, or over blocks alone");
  }
  if (s.group && (s.list || s.block)) {
    return fail(ErrorCode::kInvalidArgument,
                "amaxes of groups are over tensors, rows and columns, without /list");
  }
  return {};
}

std::string amax_config(const AmaxSpec& spec) {
  return "struct Config {\n" + constant("Input", "kInput", input_name(spec.in, spec.from_f32)) +
         constant("kTensor", spec.tensor) + constant("kRow", spec.row) +
         constant("kCol", spec.col) + constant("kBlock", spec.block) +
         constant("kNoopFlag", spec.noop_flag) +
         (spec.group ? source_constant(spec.source) : std::string()) + "};\n";
}

Stub AmaxSpec::stub() const {
  const auto& s = *this;
  Stub stub{s.group ? "group_cast.cuh" : "amax.cuh", "float8_amax", {}};
  stub.text = amax_config(s) +
              (s.group  ? check_args<kernels::GroupAmaxArgs>("GroupAmaxArgs")
               : s.list ? check_args<kernels::AmaxListArgs>("AmaxListArgs")
                        : check_args<kernels::AmaxArgs>("AmaxArgs")) +
              check_threads("kTileThreads", launch()) +
              f8::format(
                  "extern \"C\" __global__ void __launch_bounds__(kTileThreads)\n"
                  "float8_amax(const __grid_constant__ {} args) {{\n"
                  "  {}Amax<Config>::run(args);\n"
                  "}}\n",
                  s.group  ? "GroupAmaxArgs"
                  : s.list ? "AmaxListArgs"
                           : "AmaxArgs",
                  s.group ? "Group" : "");
  return stub;
}

LaunchTraits AmaxSpec::launch() const {
  return {.occupancy_limited = row || col || group};
}

ParameterBytes AmaxSpec::parameters() const {
  return {.first = group  ? sizeof(kernels::GroupAmaxArgs)
                   : list ? sizeof(kernels::AmaxListArgs)
                          : sizeof(kernels::AmaxArgs)};
}

}  // namespace f8::codegen
