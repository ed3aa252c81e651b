#include "codegen/specs/column_sums.hpp"

#include "codegen/kernels/kernel_args.cuh"
#include "codegen/specs/text.hpp"

namespace f8::codegen {

Result<ColumnSumsSpec> ColumnSumsSpec::parse(std::string_view, std::string_view rest) {
  return ColumnSumsSpec{F8_TRY(parse_dtype(rest))};
}

std::string ColumnSumsSpec::key() const {
  return f8::format("column_sums/{}", to_string(in));
}

Status ColumnSumsSpec::validate() const {
  return check_input(in);
}

Stub ColumnSumsSpec::stub() const {
  return {"column_sums.cuh", "float8_column_sums",
          check_args<kernels::ColumnSumsArgs>("ColumnSumsArgs") +
              check_threads("kTileThreads", launch()) +
              f8::format("extern \"C\" __global__ void __launch_bounds__(kTileThreads)\n"
                         "float8_column_sums(const __grid_constant__ ColumnSumsArgs args) {{\n"
                         "  column_sums<{}>(args);\n"
                         "}}\n",
                         input_name(in))};
}

LaunchTraits ColumnSumsSpec::launch() const {
  return {};
}

ParameterBytes ColumnSumsSpec::parameters() const {
  return {.first = sizeof(kernels::ColumnSumsArgs)};
}

Result<BiasGradSpec> BiasGradSpec::parse(std::string_view, std::string_view rest) {
  return BiasGradSpec{F8_TRY(parse_dtype(rest))};
}

std::string BiasGradSpec::key() const {
  return f8::format("bias_grad/{}", to_string(out));
}

Status BiasGradSpec::validate() const {
  return check_input(out);
}

Stub BiasGradSpec::stub() const {
  return {"column_sums.cuh", "float8_bias_grad",
          check_args<kernels::BiasGradArgs>("BiasGradArgs") +
              check_threads("kTileThreads", launch()) +
              f8::format("extern \"C\" __global__ void __launch_bounds__(kTileThreads)\n"
                         "float8_bias_grad(const __grid_constant__ BiasGradArgs args) {{\n"
                         "  bias_grad<{}>(args);\n"
                         "}}\n",
                         input_name(out))};
}

LaunchTraits BiasGradSpec::launch() const {
  return {};
}

ParameterBytes BiasGradSpec::parameters() const {
  return {.first = sizeof(kernels::BiasGradArgs)};
}

}  // namespace f8::codegen
