// Recipes: named sets of cast settings, one for each operand of each of a linear's three GEMMs.
//
// The linear is y[M,N] = x[M,K] w[N,K]^T; M tokens, K in_features, N out_features.
//   gemm          a        b        sums over   gives
//   output        x        w        K           y  [M,N]
//   grad_input    dy       w        N           dx [M,K]
//   grad_weight   dy       x        M           dw [N,K]
// With granularity `axis` the amax of an operand is taken over the dimension that its GEMM sums
// over.
#pragma once

#include <array>
#include <span>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "recipes/dtype.hpp"

namespace f8 {

enum class Gemm : uint8_t { kOutput, kGradInput, kGradWeight };
inline constexpr std::array kGemms = {Gemm::kOutput, Gemm::kGradInput, Gemm::kGradWeight};
[[nodiscard]] std::string_view to_string(Gemm g);  // "output", "grad_input", "grad_weight"
[[nodiscard]] Result<Gemm> parse_gemm(std::string_view text);

enum class Scaling : uint8_t { kDisabled, kDynamic, kDelayed };
enum class Granularity : uint8_t { kTensor, kAxis, kBlock1x128, kBlock128x128 };

struct CastSetting {
  Scaling scaling = Scaling::kDynamic;
  Granularity granularity = Granularity::kTensor;
  Dtype dtype = Dtype::kE4m3;
  bool pow2 = false;

  bool operator==(const CastSetting&) const = default;
};

struct GemmSetting {
  CastSetting a;
  CastSetting b;
  bool fast = false;  // fast accumulation in the tensor core; else promotion to fp32 every 128 of K

  [[nodiscard]] bool is_fp8() const { return a.scaling != Scaling::kDisabled; }
  bool operator==(const GemmSetting&) const = default;
};

struct Recipe {
  std::string name;
  std::array<GemmSetting, 3> gemms;  // indexed by Gemm

  [[nodiscard]] const GemmSetting& at(Gemm g) const { return gemms[static_cast<size_t>(g)]; }

  // In a legal recipe both operands of a GEMM are fp8, or both are disabled with one bf16, f16 or
  // f32 type; e5m2 with e5m2 is refused. In one GEMM tensor and axis mix freely (a tensor's scale
  // is every row's), but blocks go with blocks alone: 1x128 by 128x128 or 1x128 by 1x128. Delayed
  // scaling needs granularity tensor, and fast accumulation an fp8 GEMM without blocks. The error
  // names the recipe, the GEMM and the operand.
  [[nodiscard]] Status validate() const;
  bool operator==(const Recipe&) const = default;
};

// (a-z | 0-9 | "_")+: a name is a field of the problem key and of the tuning table.
[[nodiscard]] bool is_recipe_name(std::string_view text);
[[nodiscard]] std::span<const Recipe> builtin_recipes();
[[nodiscard]] Result<Recipe> find_recipe(std::string_view name);  // the error lists the names
// "bf16", in which no GEMM is fp8: the baseline of recipes, which is not among the built-in ones.
[[nodiscard]] const Recipe& bf16_recipe();

}  // namespace f8
