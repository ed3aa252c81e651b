// The gradient of a bias in two kernels, in a fixed order: the column sums of each 128 rows, and
// the sums of those.
//   sums := "column_sums/" in
//   bias := "bias_grad/" out
#pragma once

#include "codegen/specs/kind.hpp"

namespace f8::codegen {

struct ColumnSumsSpec {
  Dtype in = Dtype::kBf16;

  static constexpr std::string_view kKinds[] = {"column_sums"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<ColumnSumsSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const ColumnSumsSpec&) const = default;
};

struct BiasGradSpec {
  Dtype out = Dtype::kBf16;

  static constexpr std::string_view kKinds[] = {"bias_grad"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<BiasGradSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const BiasGradSpec&) const = default;
};

}  // namespace f8::codegen
