// Reading the recipe out of a config's bits.
#include "python/shim/base/config.hpp"

#include <stdexcept>
#include <string>

#include "python/shim/base/errors.hpp"

namespace float8_torch {

const char* Config::recipe_name() const {
  const auto index = static_cast<size_t>(field(0, 4));
  if (index < kRecipeNames.size()) return kRecipeNames[index];
  throw std::invalid_argument("float8: config " + std::to_string(bits_) +
                              " names no recipe; make it with float8.Recipe");
}

float8_recipe Config::custom_recipe() const {
  float8_recipe custom = {};
  custom.struct_size = sizeof custom;
  float8_gemm_setting* const gemms[] = {&custom.output, &custom.grad_input, &custom.grad_weight};
  for (int gemm = 0; gemm < 3; ++gemm) {
    float8_cast_setting* const operands[] = {&gemms[gemm]->a, &gemms[gemm]->b};
    for (int operand = 0; operand < 2; ++operand) {
      const int first = 16 + 6 * (2 * gemm + operand);
      *operands[operand] = {field(first, 2), field(first + 2, 2), field(first + 4, 1),
                            field(first + 5, 1)};
    }
    gemms[gemm]->fast = field(52 + gemm, 1);
  }
  return custom;
}

float8_recipe Config::recipe() const {
  const char* const name = recipe_name();
  if (name == nullptr) return custom_recipe();
  float8_recipe recipe = {};
  recipe.struct_size = sizeof recipe;
  check(float8_recipe_named(name, &recipe));
  return recipe;
}

}  // namespace float8_torch
