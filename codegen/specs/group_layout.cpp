#include "codegen/specs/group_layout.hpp"

#include "codegen/kernels/experts/group_args.cuh"
#include "codegen/specs/text.hpp"

namespace f8::codegen {

Result<GroupLayoutSpec> GroupLayoutSpec::parse(std::string_view, std::string_view) {
  return GroupLayoutSpec{};
}

std::string GroupLayoutSpec::key() const {
  return "group_layout";
}

Status GroupLayoutSpec::validate() const {
  return {};
}

Stub GroupLayoutSpec::stub() const {
  return {"group_layout.cuh", "float8_group_layout",
          check_args<kernels::GroupLayoutArgs>("GroupLayoutArgs") +
              check_threads("kGroupThreads", launch()) +
              "extern \"C\" __global__ void __launch_bounds__(kGroupThreads)\n"
              "float8_group_layout(const __grid_constant__ GroupLayoutArgs args) {\n"
              "  group_layout(args);\n"
              "}\n"};
}

LaunchTraits GroupLayoutSpec::launch() const {
  return {.threads = kernels::kGroupThreads};
}

ParameterBytes GroupLayoutSpec::parameters() const {
  return {.first = sizeof(kernels::GroupLayoutArgs)};
}

}  // namespace f8::codegen
