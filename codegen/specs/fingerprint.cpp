#include "codegen/specs/fingerprint.hpp"

#include "codegen/kernels/cast/fingerprint_args.cuh"
#include "codegen/specs/text.hpp"

namespace f8::codegen {

Result<FingerprintSpec> FingerprintSpec::parse(std::string_view, std::string_view) {
  return FingerprintSpec{};
}

std::string FingerprintSpec::key() const {
  return "fingerprint";
}

Status FingerprintSpec::validate() const {
  return {};
}

Stub FingerprintSpec::stub() const {
  return {"fingerprint.cuh", "float8_fingerprint",
          check_args<kernels::FingerprintArgs>("FingerprintArgs") +
              check_threads("kTileThreads", launch()) +
              "extern \"C\" __global__ void __launch_bounds__(kTileThreads)\n"
              "float8_fingerprint(const __grid_constant__ FingerprintArgs args) {\n"
              "  fingerprint(args);\n"
              "}\n"};
}

LaunchTraits FingerprintSpec::launch() const {
  return {};
}

ParameterBytes FingerprintSpec::parameters() const {
  return {.first = sizeof(kernels::FingerprintArgs)};
}

}  // namespace f8::codegen
