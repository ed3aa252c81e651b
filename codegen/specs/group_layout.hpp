// The layout of a routing: where the rows of each expert are.
//   "group_layout"
#pragma once

#include "codegen/specs/kind.hpp"

namespace f8::codegen {

struct GroupLayoutSpec {
  static constexpr std::string_view kKinds[] = {"group_layout"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<GroupLayoutSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const GroupLayoutSpec&) const = default;
};

}  // namespace f8::codegen
