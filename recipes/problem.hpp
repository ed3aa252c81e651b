// The problem key: one vocabulary for command line, database, log lines and test names.
//
//   key      := op "/" settings "/" types "/" dims
//   op       := "output" | "grad_input" | "grad_weight" | "linear"       what spec_of() registers
//             | "grouped_output" | "grouped_grad_input" | "grouped_grad_weight" | "experts"
//             | "attention" | "attention_forward" | "attention_backward" | "mlp"
//   settings := recipe [ "+bias" ] [ "+fast" ]                           fast accumulation
//   recipe   := (a-z | 0-9 | "_")+
//   types    := a "." b "." d                  dtypes of the GEMM's operands and result
//   dims     := { NAME INT }                   those of the operation, in its order
// The dims of a linear and of its GEMMs are "m" INT "n" INT "k" INT: the linear's tokens,
// out_features and in_features. Those of an expert linear and of its grouped GEMMs are "e" INT before and
// "skew" INT behind: e experts share m rows by a routing of that skew, see rows_of_experts(). For ops
// "linear" and "experts", types and settings are those of the output GEMM. recipes/attention.hpp has the
// dims of attention, recipes/mlp.hpp those of MLPs.
// INT has no sign and no leading zero, so a problem has one key: parse(key).key() == key.
//
// Example: output/tensorwise+fast/e4m3.e4m3.bf16/m8192n4096k4096
//
// Version 0.1 spelled keys in another way, which parse() takes for ever:
//   key      := op "/" recipe "/" types "/" "tn" "/" dims "/" "b" ("0"|"1") "f" ("0"|"1")
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "recipes/dtype.hpp"
#include "recipes/recipe.hpp"

namespace f8 {

inline constexpr int64_t kMaxDim = int64_t{1} << 30;

struct Shape {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  auto operator<=>(const Shape&) const = default;
};

// A size that an operation has.
struct DimSpec {
  std::string_view name;     // in keys: lower-case letters
  std::string_view meaning;  // for people: "tokens"
  int64_t least = 1;
  int64_t multiple = 1;
  int64_t most = kMaxDim;
};

// The sizes of a problem, in the order of its operation's dims; 0 behind them.
inline constexpr size_t kMaxDims = 6;
struct Dims {
  std::array<int64_t, kMaxDims> sizes{};
  Dims() = default;
  Dims(Shape shape) : sizes{shape.m, shape.n, shape.k} {}  // of a linear or one of its GEMMs
  Dims(std::initializer_list<int64_t> values) {
    std::copy_n(values.begin(), std::min(values.size(), kMaxDims), sizes.begin());
  }
  auto operator<=>(const Dims&) const = default;
};
[[nodiscard]] std::string to_string(const Dims& dims, std::span<const DimSpec> specs);
[[nodiscard]] Result<Dims> parse_dims(std::string_view text, std::span<const DimSpec> specs);
[[nodiscard]] std::string to_string(Shape shape);               // the key's dims: "m8n16k32"
[[nodiscard]] Result<Shape> parse_dims(std::string_view text);  // the reverse; a valid shape

// Those of expert linears are in the order of those of linears.
enum class Op : uint8_t {
  kOutput,
  kGradInput,
  kGradWeight,
  kLinear,
  kGroupedOutput,
  kGroupedGradInput,
  kGroupedGradWeight,
  kExperts,
  kAttention,
  kAttentionForward,
  kAttentionBackward,
  kMlp
};
struct Problem;

// What is registered of an operation: databases, tables and keys know no more of it.
struct OpSpec {
  Op op;
  std::string_view name;   // in keys
  std::string_view alias;  // also taken on the command line; empty: none
  std::span<const DimSpec> dims;
  // The parts of an operation of several kernels, for each of which a trial names its kernel.
  std::span<const std::string_view> parts;
  int products = 1;  // of 2mnk flops, or of what product_flops() says
  // Of an operation that is neither a linear nor its GEMM: what its sizes and settings must be besides
  // those of each dim, and its counts.
  Status (*check)(const Problem&) = nullptr;
  double (*product_flops)(const Problem&) = nullptr;
  double (*bytes)(const Problem&) = nullptr;
};
[[nodiscard]] std::span<const OpSpec> registered_ops();  // indexed by Op
[[nodiscard]] const OpSpec& spec_of(Op op);
[[nodiscard]] std::string_view to_string(Op op);
// Takes a name or an alias of a linear or of one of its GEMMs, whose grouped form grouped() gives.
[[nodiscard]] Result<Op> parse_op(std::string_view text);
[[nodiscard]] Result<Op> parse_any_op(std::string_view text);  // of every operation
inline constexpr auto kOpsOfLinears = static_cast<size_t>(Op::kLinear) + 1;
[[nodiscard]] constexpr bool is_grouped(Op op) {
  return static_cast<size_t>(op) / kOpsOfLinears == 1;
}
[[nodiscard]] constexpr bool is_attention(Op op) {
  return op >= Op::kAttention && op <= Op::kAttentionBackward;
}
[[nodiscard]] constexpr Op grouped(Op op) {
  return is_grouped(op) ? op : static_cast<Op>(static_cast<size_t>(op) + kOpsOfLinears);
}
[[nodiscard]] constexpr Op dense(Op op) {
  return static_cast<Op>(static_cast<size_t>(op) % kOpsOfLinears);
}
[[nodiscard]] constexpr bool is_gemm(Op op) {
  return op < Op::kAttention && op != Op::kLinear && op != Op::kExperts;
}
[[nodiscard]] constexpr Op to_op(Gemm g) {
  return static_cast<Op>(g);
}
// The GEMM that an operation is; of another one its first, which has its types.
[[nodiscard]] constexpr Gemm to_gemm(Op op) {
  return is_gemm(op) ? static_cast<Gemm>(dense(op)) : Gemm::kOutput;
}

// How the rows of an expert linear are shared: the skew of a problem is the exponent of Zipf's law, and
// under the largest one a single expert has all rows.
inline constexpr int64_t kMaxExperts = 1024;
inline constexpr int64_t kEven = 0, kZipf = 1, kOneExpert = 100;
struct Groups {
  int64_t experts = 0;
  int64_t skew = kEven;
  auto operator<=>(const Groups&) const = default;
};
// Expert e has a share of 1 / (e + 1)^skew of m rows, in whole rows: the largest remainders are rounded up.
[[nodiscard]] std::vector<int64_t> rows_of_experts(int64_t m, const Groups& groups);

// Gives the GEMM's own shape, d[m,n] = a[m,k] b[n,k]^T, for the linear's shape.
[[nodiscard]] Shape gemm_shape(Shape linear, Gemm g);

struct Problem {
  Op op = Op::kLinear;
  std::string recipe;
  Dtype a = Dtype::kE4m3;
  Dtype b = Dtype::kE4m3;
  Dtype d = Dtype::kBf16;
  Dims dims;
  bool bias = false;
  bool fast = false;

  [[nodiscard]] static Result<Problem> make(Op op, const Recipe& recipe, const Dims& dims);
  // Makes an operation of a linear or, where there are experts, its grouped form.
  [[nodiscard]] static Result<Problem> make(Op op, const Recipe& recipe, Shape shape,
                                            const Groups& groups);
  [[nodiscard]] std::string key() const;
  // The recipe need not be a built-in one: a database may hold a user's.
  [[nodiscard]] static Result<Problem> parse(std::string_view key);
  // The dims m, n and k; 0 where the operation has no such dim.
  [[nodiscard]] Shape shape() const;
  [[nodiscard]] Groups groups() const;  // no experts: it is not of any
  // The shape with the m of a group of average size, which is shape() where there are no groups.
  [[nodiscard]] Shape group_shape() const;
  // The operation `other` of the same settings and sizes, grouped as this one is.
  [[nodiscard]] Op sibling(Op other) const { return is_grouped(op) ? grouped(other) : other; }
  // 2mnk, 6mnk for a linear, and for each linear of an MLP; of attention two products forward and five backward, of the queries and
  // keys that its mask leaves.
  [[nodiscard]] double flops() const;
  // The fewest bytes that must be moved: a GEMM's operands and its result once; a linear's x, w, y,
  // dy, dx and dw once each, in the type of d, and an MLP's likewise; of attention q, k, v and o, and their
  // gradients.
  [[nodiscard]] double bytes() const;
  bool operator==(const Problem&) const = default;
};

// A valid shape has M >= 1, positive multiples of 16 as K and N, and nothing above kMaxDim. The
// error names the dimension.
[[nodiscard]] Status validate_shape(Shape shape);
// Parses "8192,4096,4096[;...]", where each number may be a range: "1024:16384:x2" or
// "1024:4096:1024". A range includes its end if a step meets it; m varies slowest; a shape that is
// named twice counts once.
[[nodiscard]] Result<std::vector<Shape>> parse_shapes(std::string_view text);
inline constexpr size_t kMaxShapes = 100'000;  // one text names no more

// A linear layer of a model, as filters and plans name it; or, where it has groups, the SwiGLU experts of
// a layer, which are decided as one: in_features is then the model's width and out_features that of an
// expert between its two linears.
struct NamedLinear {
  std::string fqn;
  int64_t in_features = 0;   // K
  int64_t out_features = 0;  // N
  int64_t count = 1;         // identical layers this entry stands for
  // The share of a step's tokens that it sees: of an expert's linear top_k / experts, which a router
  // makes less than 1, and of all experts together top_k.
  double tokens_share = 1;
  std::string kept = {};  // why ranks that share it keep it in bf16; empty: they need not
  Groups groups = {};     // of a layer's experts: those of a rank
  [[nodiscard]] bool is_experts() const { return groups.experts > 0; }
  bool operator==(const NamedLinear&) const = default;
};

// The expert linears of a layer's experts, where they have so many rows.
struct ExpertLinear {
  std::string_view name;  // "w13", which has an expert's gate and up at once, or "w2"
  Shape shape;
};
[[nodiscard]] std::array<ExpertLinear, 2> expert_linears(const NamedLinear& experts, int64_t rows);

// M of this linear, where a step has so many tokens: rounded to the nearest, and at least 1.
[[nodiscard]] int64_t tokens_of(const NamedLinear& layer, int64_t tokens);

}  // namespace f8
