// The built-in recipes as data, and the rules of a legal recipe.
#include "recipes/recipe.hpp"

#include <algorithm>
#include <vector>

#include "base/hash.hpp"
#include "base/text.hpp"

namespace f8 {
namespace {

constexpr CastSetting kBf16Operand = {Scaling::kDisabled, Granularity::kTensor, Dtype::kBf16,
                                      false};
constexpr CastSetting kE4m3Axis = {Scaling::kDynamic, Granularity::kAxis, Dtype::kE4m3, true};
constexpr CastSetting kE4m3TensorPow2 = {Scaling::kDynamic, Granularity::kTensor, Dtype::kE4m3,
                                         true};
constexpr CastSetting kE4m3Row128 = {Scaling::kDynamic, Granularity::kBlock1x128, Dtype::kE4m3,
                                     true};
constexpr CastSetting kE4m3Square128 = {Scaling::kDynamic, Granularity::kBlock128x128, Dtype::kE4m3,
                                        true};

constexpr CastSetting tensor(Scaling scaling, Dtype dtype) {
  return {scaling, Granularity::kTensor, dtype, false};
}

Recipe per_tensor(const char* name, Scaling scaling) {
  const CastSetting e4m3 = tensor(scaling, Dtype::kE4m3);
  const CastSetting e5m2 = tensor(scaling, Dtype::kE5m2);
  return {name,
          {GemmSetting{.a = e4m3, .b = e4m3, .fast = true},
           GemmSetting{.a = e5m2, .b = e4m3, .fast = false},
           GemmSetting{.a = e5m2, .b = e4m3, .fast = false}}};
}

std::vector<Recipe> make_builtin_recipes() {
  return {
      per_tensor("tensorwise", Scaling::kDynamic),
      {"rowwise",
       {GemmSetting{.a = kE4m3Axis, .b = kE4m3Axis, .fast = true},
        GemmSetting{.a = kE4m3Axis, .b = kE4m3Axis, .fast = false},
        GemmSetting{.a = kE4m3Axis, .b = kE4m3Axis, .fast = false}}},
      {"rowwise_with_gw_hp",
       {GemmSetting{.a = kE4m3Axis, .b = kE4m3Axis, .fast = true},
        GemmSetting{.a = kE4m3Axis, .b = kE4m3TensorPow2, .fast = false},
        GemmSetting{.a = kBf16Operand, .b = kBf16Operand, .fast = false}}},
      per_tensor("delayed", Scaling::kDelayed),
      {"blockwise",
       {GemmSetting{.a = kE4m3Row128, .b = kE4m3Square128, .fast = false},
        GemmSetting{.a = kE4m3Row128, .b = kE4m3Square128, .fast = false},
        GemmSetting{.a = kE4m3Row128, .b = kE4m3Row128, .fast = false}}},
  };
}

// Returns the settings of an operand that decide: one that is not cast has a type alone.
CastSetting settings_of(CastSetting c) {
  if (c.scaling != Scaling::kDisabled) return c;
  return {.scaling = Scaling::kDisabled, .dtype = c.dtype};
}

// `where` opens every message: recipe, GEMM and operand.
Status validate_cast(const std::string& where, const CastSetting& c) {
  if (c.scaling == Scaling::kDisabled) {
    if (f8::is_fp8(c.dtype)) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: scaling is disabled but the type is {}; use bf16, f16 or f32", where,
                  f8::to_string(c.dtype));
    }
    return {};
  }
  if (!f8::is_fp8(c.dtype)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: type {} cannot be cast to; use e4m3 or e5m2, or disable the scaling", where,
                f8::to_string(c.dtype));
  }
  if (c.scaling == Scaling::kDelayed && c.granularity != Granularity::kTensor) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: delayed scaling keeps one amax, it needs granularity tensor, not {}", where,
                to_string(c.granularity));
  }
  return {};
}

Status validate_gemm(const std::string& where, const GemmSetting& g) {
  F8_TRY(validate_cast(where + " operand a", g.a));
  F8_TRY(validate_cast(where + " operand b", g.b));
  const bool a_disabled = g.a.scaling == Scaling::kDisabled;
  const bool b_disabled = g.b.scaling == Scaling::kDisabled;
  if (a_disabled != b_disabled) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: operand {} is fp8 and operand {} is not; cast both or disable both", where,
                a_disabled ? "b" : "a", a_disabled ? "a" : "b");
  }
  if (a_disabled) {
    if (g.a.dtype != g.b.dtype) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: operand a is {} and operand b is {}; disabled operands share one type",
                  where, f8::to_string(g.a.dtype), f8::to_string(g.b.dtype));
    }
    if (g.fast) {
      return fail(
          ErrorCode::kInvalidArgument,
          "{}: fast accumulation is a property of fp8; unset it where the casts are disabled",
          where);
    }
    return {};
  }
  if (g.a.dtype == Dtype::kE5m2 && g.b.dtype == Dtype::kE5m2) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: operands a and b are both e5m2; make at least one of them e4m3", where);
  }
  if (is_block(g.a.granularity) != is_block(g.b.granularity)) {
    const bool a_block = is_block(g.a.granularity);
    return fail(ErrorCode::kInvalidArgument,
                "{}: operand {} has granularity {} and operand {} {}; blocks go with blocks alone",
                where, a_block ? "a" : "b", to_string(a_block ? g.a.granularity : g.b.granularity),
                a_block ? "b" : "a", to_string(a_block ? g.b.granularity : g.a.granularity));
  }
  if (is_block(g.a.granularity)) {
    if (g.a.granularity == Granularity::kBlock128x128) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} operand a: blocks of 128x128 are for operand b; use 1x128", where);
    }
    if (g.fast) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: block scales change every 128 of K; unset fast accumulation", where);
    }
  }
  return {};
}

}  // namespace

std::string_view to_string(Granularity granularity) {
  switch (granularity) {
    case Granularity::kTensor:
      return "tensor";
    case Granularity::kAxis:
      return "axis";
    case Granularity::kBlock1x128:
      return "block1x128";
    case Granularity::kBlock128x128:
      return "block128x128";
  }
  return "unknown";
}

std::string_view to_string(Gemm g) {
  switch (g) {
    case Gemm::kOutput:
      return "output";
    case Gemm::kGradInput:
      return "grad_input";
    case Gemm::kGradWeight:
      return "grad_weight";
  }
  return "unknown";
}

Result<Gemm> parse_gemm(std::string_view text) {
  for (const Gemm g : kGemms) {
    if (text == to_string(g)) return g;
  }
  return fail(ErrorCode::kInvalidArgument,
              "unknown GEMM {}; one of output, grad_input, grad_weight", quote(text));
}

GemmScales gemm_scales(const GemmSetting& gemm) {
  const Granularity a = gemm.a.granularity;
  const Granularity b = gemm.b.granularity;
  if (!gemm.is_fp8()) return {};
  if (is_block(b)) return {.mode = b};
  if (a != Granularity::kAxis && b != Granularity::kAxis) return {};
  return {Granularity::kAxis, a == Granularity::kTensor, b == Granularity::kTensor};
}

bool Recipe::has_delayed_scales() const {
  return std::ranges::any_of(gemms, [](const GemmSetting& g) {
    return g.a.scaling == Scaling::kDelayed || g.b.scaling == Scaling::kDelayed;
  });
}

bool Recipe::has_block_scales() const {
  return std::ranges::any_of(gemms, [](const GemmSetting& g) {
    return g.is_fp8() && (is_block(g.a.granularity) || is_block(g.b.granularity));
  });
}

bool Recipe::is_fp8_throughout() const {
  return std::ranges::all_of(gemms, &GemmSetting::is_fp8);
}

Status Recipe::validate() const {
  if (!is_recipe_name(name)) {
    return fail(ErrorCode::kInvalidArgument,
                "recipe name {} is not of lower-case letters, digits and '_'", quote(name));
  }
  for (const Gemm g : kGemms) {
    F8_TRY(validate_gemm(f8::format("recipe {}, GEMM {}", name, to_string(g)), at(g)));
  }
  return {};
}

bool is_recipe_name(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  });
}

std::span<const Recipe> builtin_recipes() {
  static const std::vector<Recipe> recipes = make_builtin_recipes();
  return recipes;
}

const Recipe& bf16_recipe() {
  constexpr GemmSetting kGemm = {.a = kBf16Operand, .b = kBf16Operand, .fast = false};
  static const Recipe recipe = {"bf16", {kGemm, kGemm, kGemm}};
  return recipe;
}

bool same_settings(const Recipe& a, const Recipe& b) {
  return std::ranges::equal(a.gemms, b.gemms, [](const GemmSetting& x, const GemmSetting& y) {
    return settings_of(x.a) == settings_of(y.a) && settings_of(x.b) == settings_of(y.b) &&
           x.fast == y.fast;
  });
}

std::string settings_label(const Recipe& recipe) {
  for (const Recipe& named : builtin_recipes()) {
    if (same_settings(named, recipe)) return named.name;
  }
  if (same_settings(bf16_recipe(), recipe)) return bf16_recipe().name;
  std::string text;
  for (const GemmSetting& gemm : recipe.gemms) {
    for (const CastSetting& cast : {settings_of(gemm.a), settings_of(gemm.b)}) {
      text += f8::format("{} {} {} {:d} ", static_cast<int>(cast.scaling),
                         to_string(cast.granularity), to_string(cast.dtype), cast.pow2);
    }
    text += f8::format("{:d}\n", gemm.fast);
  }
  return "custom_" + hash_hex(text);
}

bool is_label_of(std::string_view label, const Recipe& recipe) {
  if (label == settings_label(recipe)) return true;
  return label == recipe.name && !find_recipe(label) && label != bf16_recipe().name;
}

std::string describe(const Recipe& recipe) {
  const std::string label = settings_label(recipe);
  if (label == recipe.name) return label;
  const bool is_named = find_recipe(label).has_value() || label == bf16_recipe().name;
  return f8::format("{} ({})", recipe.name,
                    is_named ? "with the settings of " + label : "with settings of its own");
}

Recipe recipe_of_label(std::string_view label) {
  const Result<Recipe> named = find_recipe(label);
  return named ? *named : Recipe{std::string(label), bf16_recipe().gemms};
}

Result<Recipe> find_recipe(std::string_view name) {
  std::string names;
  for (const Recipe& recipe : builtin_recipes()) {
    if (recipe.name == name) return recipe;
    names += (names.empty() ? "" : ", ") + recipe.name;
  }
  return fail(ErrorCode::kInvalidArgument, "unknown recipe {}; one of {}", quote(name), names);
}

}  // namespace f8
