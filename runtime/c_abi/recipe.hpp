// Recipes of the C interface as the library's.
#pragma once

#include "float8/float8.h"
#include "recipes/recipe.hpp"

namespace f8::c_abi {

// One of the built-in recipes, or bf16.
[[nodiscard]] Result<Recipe> named_recipe(const char* name);
// The numbers are checked, whether they make a legal recipe is not: Recipe::validate().
[[nodiscard]] Result<Recipe> custom_recipe(const float8_recipe* recipe);

// A struct's one recipe of the two that it may have; `in` names the struct.
[[nodiscard]] Result<Recipe> one_recipe(const char* in, const char* name,
                                        const float8_recipe* custom);

}  // namespace f8::c_abi
