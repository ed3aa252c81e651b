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
// The elements that share a scale. An operand is [rows, K], with K the dimension that is summed over.
//   tensor        one scale
//   axis          one for each row
//   block1x128    (1D) one for each row and 128 of K: [ceil(K/128)][padded rows], so that the rows
//                 of one block of K are neighbours
//   block128x128  (2D) one for each 128 rows and 128 of K: [ceil(rows/128)][padded K blocks]
// The last dimension of block scales is padded to a multiple of 4 values (16 bytes).
enum class Granularity : uint8_t { kTensor, kAxis, kBlock1x128, kBlock128x128 };
[[nodiscard]] constexpr bool is_block(Granularity granularity) {
  return granularity == Granularity::kBlock1x128 || granularity == Granularity::kBlock128x128;
}
// "tensor", "axis", "block1x128", "block128x128"
[[nodiscard]] std::string_view to_string(Granularity granularity);

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

// What a kernel knows of the scales of its operands. With blocks `mode` is b's, and a has 1x128; with
// axis a tensor's scale may stand for all rows of one operand.
struct GemmScales {
  Granularity mode = Granularity::kTensor;
  bool scalar_a = false;
  bool scalar_b = false;
};
[[nodiscard]] GemmScales gemm_scales(const GemmSetting& gemm);  // defaults in high precision

struct Recipe {
  std::string name;
  std::array<GemmSetting, 3> gemms;  // indexed by Gemm

  [[nodiscard]] const GemmSetting& at(Gemm g) const { return gemms[static_cast<size_t>(g)]; }

  [[nodiscard]] bool has_delayed_scales() const;
  [[nodiscard]] bool has_block_scales() const;
  [[nodiscard]] bool is_fp8_throughout() const;  // all GEMMs are: what float8.torch.fuse takes

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

// Names are for people: what decides is whether the settings are the same. Granularity and pow2 of
// an operand in high precision are no settings.
[[nodiscard]] bool same_settings(const Recipe& a, const Recipe& b);
// The word for a recipe's settings in problem keys, tables and filter files: the name of the named
// recipe that has them, else "custom_" and a hash of them.
[[nodiscard]] std::string settings_label(const Recipe& recipe);
// Whether rows and files of this label are of the recipe. The label that version 0.1 gave to a recipe
// of the caller's own was its name, which tells no settings: it stands for the caller's recipe of
// that name. The name of a named recipe stands for its settings alone.
[[nodiscard]] bool is_label_of(std::string_view label, const Recipe& recipe);
// The recipe of a label. Settings that cannot be known from it count as high precision.
[[nodiscard]] Recipe recipe_of_label(std::string_view label);
// A recipe in a message: "rowwise", "mine (with the settings of rowwise)".
[[nodiscard]] std::string describe(const Recipe& recipe);

}  // namespace f8
