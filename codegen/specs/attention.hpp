// The forward of attention in fp8 (kernels/attention/attention_forward.cuh), for heads of 128.
//   attention := "attention_forward/d128/" ("causal" | "full") "/s" stages
#pragma once

#include "codegen/specs/kind.hpp"

namespace f8::codegen {

struct AttentionForwardSpec {
  int head_dim = 128;
  bool causal = false;
  int stages = 3;

  static constexpr std::string_view kKinds[] = {"attention_forward"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<AttentionForwardSpec> parse(std::string_view kind,
                                                          std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const AttentionForwardSpec&) const = default;
};

}  // namespace f8::codegen
