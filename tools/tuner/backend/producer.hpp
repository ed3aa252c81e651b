// A producer is a tensor that a cast computes as it reads its operands, as the C interface's float8_source has it.
// `bench produce` measures such casts.
//
//   producers  := producer ("," producer)*
//   producer   := gated ["/" activation] | norm
//   gated      := "glu" | "glu_backward" | "activation" | "activation_backward"
//   norm       := "rms_norm" | "layer_norm"               its statistics are given
//   activation := "silu" | "gelu" | "gelu_tanh" | "relu2"       by default silu
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "codegen/specs/computed.hpp"
#include "runtime/linear/tensors/quantizer.hpp"

namespace f8::tuner {

struct Producer {
  codegen::Computed source = codegen::Computed::kGlu;
  codegen::Activation activation = codegen::Activation::kSilu;

  // The operand of a linear that it makes.
  [[nodiscard]] runtime::Tensor operand() const {
    return is_gradient(source) ? runtime::Tensor::kGradOutput : runtime::Tensor::kInput;
  }
  // The matrices that it reads and makes.
  [[nodiscard]] size_t operands() const;
  [[nodiscard]] size_t results() const { return tensors_of(source); }
  [[nodiscard]] runtime::QuantizerDesc desc(const Recipe& recipe, runtime::MatrixSize size) const;
  bool operator==(const Producer&) const = default;
};
[[nodiscard]] std::string to_string(const Producer& producer);
[[nodiscard]] Result<std::vector<Producer>> parse_producers(std::string_view text);
// "ROWS,COLS[;ROWS,COLS...]".
[[nodiscard]] Result<std::vector<runtime::MatrixSize>> parse_sizes(std::string_view text);

// An element of a result in fp64, of these elements of the operands. A norm's are x, its weight and its bias.
struct Produced {
  double first = 0, second = 0;
};
inline constexpr double kRstd = 1.75, kMean = 0.0625;  // what a norm is given for each row
[[nodiscard]] Produced produced(const Producer& producer, std::array<double, 3> operands);

// The bytes that are moved where no launch finds them in a cache: of the fused casts, and of a kernel that writes the
// results in bf16 and the casts of these.
struct ProducerBytes {
  double fused = 0, apart = 0;
};
[[nodiscard]] Result<ProducerBytes> bytes_of(const Producer& producer, const Recipe& recipe,
                                             runtime::MatrixSize size);

}  // namespace f8::tuner
