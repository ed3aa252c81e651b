// Whether weights changed since the fingerprints that are in device memory.
//   "fingerprint"
#pragma once

#include "codegen/specs/kind.hpp"

namespace f8::codegen {

struct FingerprintSpec {
  static constexpr std::string_view kKinds[] = {"fingerprint"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<FingerprintSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const FingerprintSpec&) const = default;
};

}  // namespace f8::codegen
