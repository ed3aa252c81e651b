#include "codegen/specs/blocks/moe.hpp"

#include "codegen/kernels/experts/moe_args.cuh"
#include "codegen/specs/text.hpp"

namespace f8::codegen {

Result<RouteSpec> RouteSpec::parse(std::string_view, std::string_view rest) {
  for (const bool place : {false, true}) {
    for (const bool long_ids : {false, true}) {
      const RouteSpec spec{place, long_ids};
      if (spec.key().substr(kKinds[0].size() + 1) == rest) return spec;
    }
  }
  return fail(ErrorCode::kInvalidArgument,
              "unknown routing {}: expected count or place, then /i32 or /i64", quote(rest));
}

std::string RouteSpec::key() const {
  return f8::format("route/{}/{}", place ? "place" : "count", long_ids ? "i64" : "i32");
}

Status RouteSpec::validate() const {
  return {};
}

Stub RouteSpec::stub() const {
  const char* name = place ? "route_place" : "route_count";
  return {"route.cuh", f8::format("float8_{}", name),
          check_args<kernels::RouteArgs>("RouteArgs") + check_threads("kRouteThreads", launch()) +
              f8::format("extern \"C\" __global__ void __launch_bounds__(kRouteThreads)\n"
                         "float8_{0}(const __grid_constant__ RouteArgs args) {{\n"
                         "  {0}<{1}>(args);\n"
                         "}}\n",
                         name, long_ids ? "i64" : "i32")};
}

LaunchTraits RouteSpec::launch() const {
  return {.threads = kernels::kRouteThreads};
}

ParameterBytes RouteSpec::parameters() const {
  return {.first = sizeof(kernels::RouteArgs)};
}

Result<CombineSpec> CombineSpec::parse(std::string_view kind, std::string_view rest) {
  const size_t slash = rest.find('/');
  if (slash == std::string_view::npos) {
    return fail(ErrorCode::kInvalidArgument, "{} needs two types, as in {}/bf16/bf16", quote(kind),
                kind);
  }
  return CombineSpec{.y = F8_TRY(parse_dtype(rest.substr(0, slash))),
                     .out = F8_TRY(parse_dtype(rest.substr(slash + 1))),
                     .gradient = kind == kKinds[1]};
}

std::string CombineSpec::key() const {
  return f8::format("{}/{}/{}", kKinds[gradient ? 1 : 0], to_string(y), to_string(out));
}

Status CombineSpec::validate() const {
  F8_TRY(check_input(y));
  return check_input(out);
}

Stub CombineSpec::stub() const {
  const std::string_view name = kKinds[gradient ? 1 : 0];
  const char* const args = gradient ? "ScoreGradientArgs" : "CombineArgs";
  return {"combine.cuh", f8::format("float8_{}", name),
          check(f8::format("sizeof({})", args), parameters().first, "kernel_args.cuh") +
              check_threads("kTileThreads", launch()) +
              f8::format("extern \"C\" __global__ void __launch_bounds__(kTileThreads{4})\n"
                         "float8_{0}(const __grid_constant__ {1} args) {{\n"
                         "  {0}<{2}, {3}>(args);\n"
                         "}}\n",
                         name, args, input_name(gradient ? out : y), input_name(gradient ? y : out),
                         gradient || out == Dtype::kF32 ? "" : ", 3")};
}

LaunchTraits CombineSpec::launch() const {
  return {};
}

ParameterBytes CombineSpec::parameters() const {
  return {.first = gradient ? sizeof(kernels::ScoreGradientArgs) : sizeof(kernels::CombineArgs)};
}

}  // namespace f8::codegen
