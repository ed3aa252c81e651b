// The maxima of a tensor's absolute values.
//   amax := "amax/" in "/" over ["/from_f32"] ["/flag"] ["/list"] ["/group" source]
//           over := "tensor" | "block" | axes ["+tensor"]
//           axes := "row" | "col" | "rowcol"
//           source := "" | "/gather" | "/gather_score" | "/swiglu" | "/swiglu_backward" | "/pair"
#pragma once

#include "codegen/kernels/experts/group_args.cuh"
#include "codegen/specs/kind.hpp"

namespace f8::codegen {

struct AmaxSpec {
  Dtype in = Dtype::kBf16;
  bool tensor = true;
  bool row = false;
  bool col = false;
  bool block = false;      // alone: over the 128x128 blocks of a whole that x is some rows of
  bool list = false;       // takes up to kernels::kMaxListed matrices, else kMaxTensors
  bool noop_flag = false;  // does nothing where a flag says that its results are there already
  bool from_f32 = false;   // x is in fp32, and each element is rounded to `in` as it is read
  bool group = false;      // of groups of rows, each with amaxes of its own
  kernels::RowSource source = kernels::RowSource::kMatrix;  // of groups

  static constexpr std::string_view kKinds[] = {"amax"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<AmaxSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const AmaxSpec&) const = default;
};

// A source of rows as the end of a key, and taken off the end of one.
[[nodiscard]] std::string_view to_string(kernels::RowSource source);
[[nodiscard]] kernels::RowSource take_source(std::string_view& rest);
// Fails where the kernel of these rows cannot be.
[[nodiscard]] Status check_source(kernels::RowSource source, bool group, bool from_f32);
// The line of a Config.
[[nodiscard]] std::string source_constant(kernels::RowSource source);

// The stub's Config.
[[nodiscard]] std::string amax_config(const AmaxSpec& spec);

}  // namespace f8::codegen
