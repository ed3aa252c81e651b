// The routing of a mixture of experts, in two launches, and the sums over each token's rows.
//   route    := "route/" ("count" | "place") "/" ("i32" | "i64")          the type of the ids
//   combine  := "combine/" y "/" out
//   gradient := "score_gradient/" y "/" out                               out: the type of dout
#pragma once

#include "codegen/specs/kind.hpp"

namespace f8::codegen {

struct RouteSpec {
  bool place = false;
  bool long_ids = false;

  static constexpr std::string_view kKinds[] = {"route"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<RouteSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const RouteSpec&) const = default;
};

struct CombineSpec {
  Dtype y = Dtype::kBf16;
  Dtype out = Dtype::kBf16;
  bool gradient = false;  // that of the scores

  static constexpr std::string_view kKinds[] = {"combine", "score_gradient"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<CombineSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const CombineSpec&) const = default;
};

}  // namespace f8::codegen
