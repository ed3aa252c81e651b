#include "codegen/specs/blocks/rms_norm.hpp"

#include "codegen/kernels/norm/norm_args.cuh"
#include "codegen/specs/text.hpp"

namespace f8::codegen {
namespace {

constexpr std::string_view kNormalized = "/normalized";

}  // namespace

Result<RmsNormSpec> RmsNormSpec::parse(std::string_view kind, std::string_view rest) {
  RmsNormSpec spec;
  spec.backward = kind == kKinds[1];
  spec.normalized = take_off_end(rest, kNormalized);
  spec.in = F8_TRY(parse_dtype(take_until(rest, '/')));
  spec.weight = F8_TRY(parse_dtype(take_until(rest, '/')));
  spec.out = F8_TRY(parse_dtype(take_until(rest, '/')));
  for (int cols = kernels::kMinNormCols; cols <= kernels::kMaxNormCols; cols *= 2) {
    if (rest == fmt::to_string(cols)) spec.cols = cols;
  }
  if (spec.cols != 0) return spec;
  return fail(ErrorCode::kInvalidArgument,
              "{} columns of {}: expected a power of two from {} to {}, as in "
              "{}/bf16/f32/bf16/4096",
              quote(rest), kind, kernels::kMinNormCols, kernels::kMaxNormCols, kind);
}

std::string RmsNormSpec::key() const {
  return f8::format("{}/{}/{}/{}/{}{}", kKinds[backward ? 1 : 0], to_string(in), to_string(weight),
                    to_string(out), cols, normalized ? kNormalized : "");
}

Status RmsNormSpec::validate() const {
  for (const Dtype type : {in, weight, out}) F8_TRY(check_input(type));
  if (cols >= kernels::kMinNormCols && cols <= kernels::kMaxNormCols && (cols & (cols - 1)) == 0) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{} columns: expected a power of two from {} to {}",
              cols, kernels::kMinNormCols, kernels::kMaxNormCols);
}

Stub RmsNormSpec::stub() const {
  const std::string_view name = kKinds[backward ? 1 : 0];
  const std::string_view args = backward ? "RmsNormBackwardArgs" : "RmsNormArgs";
  return {backward ? "rms_norm_backward.cuh" : "rms_norm.cuh", f8::format("float8_{}", name),
          check(f8::format("sizeof({})", args), parameters().first, "norm_args.cuh") +
              check_threads(f8::format("norm_threads({}, {}).of_block", cols, backward), launch()) +
              f8::format("extern \"C\" __global__ void __launch_bounds__({0}, {1})\n"
                         "float8_{2}(const __grid_constant__ {3} args) {{\n"
                         "  {2}<{4}, {5}, {6}, {7}, {8}>(args);\n"
                         "}}\n",
                         launch().threads, kernels::norm_blocks_of_sm(cols, backward), name, args,
                         input_name(in), input_name(weight), input_name(out), cols, normalized)};
}

LaunchTraits RmsNormSpec::launch() const {
  return {.threads = kernels::norm_threads(cols, backward).of_block};
}

ParameterBytes RmsNormSpec::parameters() const {
  return {.first = backward ? sizeof(kernels::RmsNormBackwardArgs) : sizeof(kernels::RmsNormArgs)};
}

}  // namespace f8::codegen
