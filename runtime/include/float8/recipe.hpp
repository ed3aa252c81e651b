// Recipes: how operands are cast.
#pragma once

#include <string>
#include <utility>

#include "float8/base.hpp"
#include "float8/recipe.h"

namespace float8 {

// How operands are cast: a named recipe, or settings of the caller's.
using CastSetting = float8_cast_setting;
using GemmSetting = float8_gemm_setting;

class Recipe {
 public:
  static Recipe tensorwise() { return Recipe("tensorwise"); }
  static Recipe rowwise() { return Recipe("rowwise"); }
  static Recipe rowwise_with_gw_hp() { return Recipe("rowwise_with_gw_hp"); }
  static Recipe delayed() { return Recipe("delayed"); }
  static Recipe blockwise() { return Recipe("blockwise"); }
  static Recipe bf16() { return Recipe("bf16"); }  // no GEMM is fp8
  static Recipe named(std::string name) { return Recipe(std::move(name)); }
  // `name` goes into messages: a-z, 0-9 and _.
  static Recipe custom(std::string name, const GemmSetting& output, const GemmSetting& grad_input,
                       const GemmSetting& grad_weight) {
    Recipe recipe(std::move(name));
    recipe.custom_ = true;
    recipe.output_ = output;
    recipe.grad_input_ = grad_input;
    recipe.grad_weight_ = grad_weight;
    return recipe;
  }
  [[nodiscard]] const std::string& name() const { return name_; }

  // Its settings, to start a custom one from; a name that is not known is an error.
  [[nodiscard]] Result<float8_recipe> settings() const {
    float8_recipe c{};
    c.struct_size = sizeof c;
    if (custom_) {
      c.name = name_.c_str();  // as long as this recipe
      c.output = output_;
      c.grad_input = grad_input_;
      c.grad_weight = grad_weight_;
      return c;
    }
    const float8_status status = float8_recipe_named(name_.c_str(), &c);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return c;
  }

 private:
  explicit Recipe(std::string name) : name_(std::move(name)) {}
  std::string name_;
  bool custom_ = false;
  GemmSetting output_{}, grad_input_{}, grad_weight_{};
};

}  // namespace float8
