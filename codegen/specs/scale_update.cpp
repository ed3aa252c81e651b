#include "codegen/specs/scale_update.hpp"

#include "codegen/kernels/kernel_args.cuh"
#include "codegen/specs/text.hpp"

namespace f8::codegen {

Result<ScaleUpdateSpec> ScaleUpdateSpec::parse(std::string_view, std::string_view) {
  return ScaleUpdateSpec{};
}

std::string ScaleUpdateSpec::key() const {
  return "scale_update";
}

Status ScaleUpdateSpec::validate() const {
  return {};
}

Stub ScaleUpdateSpec::stub() const {
  return {"scale_update.cuh", "float8_scale_update",
          check_args<kernels::ScaleUpdateArgs>("ScaleUpdateArgs") +
              check_threads("kUpdateThreads", launch()) +
              "extern \"C\" __global__ void __launch_bounds__(kUpdateThreads)\n"
              "float8_scale_update(const __grid_constant__ ScaleUpdateArgs args) {\n"
              "  scale_update(args);\n"
              "}\n"};
}

LaunchTraits ScaleUpdateSpec::launch() const {
  return {};
}

ParameterBytes ScaleUpdateSpec::parameters() const {
  return {.first = sizeof(kernels::ScaleUpdateArgs)};
}

Result<FoundInfSpec> FoundInfSpec::parse(std::string_view, std::string_view) {
  return FoundInfSpec{};
}

std::string FoundInfSpec::key() const {
  return "found_inf";
}

Status FoundInfSpec::validate() const {
  return {};
}

Stub FoundInfSpec::stub() const {
  return {"scale_update.cuh", "float8_found_inf",
          "extern \"C\" __global__ void __launch_bounds__(kUpdateThreads)\n"
          "float8_found_inf(const __grid_constant__ FoundInfArgs args) {\n"
          "  found_inf(args);\n"
          "}\n"};
}

LaunchTraits FoundInfSpec::launch() const {
  return {};
}

ParameterBytes FoundInfSpec::parameters() const {
  return {.first = sizeof(kernels::FoundInfArgs)};
}

}  // namespace f8::codegen
