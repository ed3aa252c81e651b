// Recipes, there and back. Enumerators of granularity and format have the library's order.
#include "runtime/c_abi/recipe.hpp"

#include "runtime/c_abi/common.hpp"
#include "runtime/linear/tensors/fp8_tensor.hpp"

namespace f8::c_abi {
namespace {

static_assert(static_cast<int>(Granularity::kTensor) == FLOAT8_TENSOR &&
              static_cast<int>(Granularity::kAxis) == FLOAT8_AXIS &&
              static_cast<int>(Granularity::kBlock1x128) == FLOAT8_BLOCK_1X128 &&
              static_cast<int>(Granularity::kBlock128x128) == FLOAT8_BLOCK_128X128);

Result<CastSetting> cast_setting(const float8_cast_setting& from) {
  F8_TRY(check_enum("scaling", from.scaling, FLOAT8_HIGH_PRECISION));
  F8_TRY(check_enum("granularity", from.granularity, FLOAT8_BLOCK_128X128));
  F8_TRY(check_enum("format", from.format, FLOAT8_E5M2));
  if (from.scaling == FLOAT8_HIGH_PRECISION) return bf16_recipe().gemms[0].a;
  return CastSetting{
      .scaling = from.scaling == FLOAT8_DELAYED ? Scaling::kDelayed : Scaling::kDynamic,
      .granularity = static_cast<Granularity>(from.granularity),
      .dtype = from.format == FLOAT8_E5M2 ? Dtype::kE5m2 : Dtype::kE4m3,
      .pow2 = from.pow2 != 0};
}

Result<GemmSetting> gemm_setting(const float8_gemm_setting& from, Gemm gemm) {
  const auto at = [&](const char* operand, Error error) {
    error.message = f8::format("float8_recipe.{}.{}.{}", to_string(gemm), operand, error.message);
    return std::unexpected(std::move(error));
  };
  const Result<CastSetting> a = cast_setting(from.a);
  if (!a) return at("a", a.error());
  const Result<CastSetting> b = cast_setting(from.b);
  if (!b) return at("b", b.error());
  return GemmSetting{.a = *a, .b = *b, .fast = from.fast != 0};
}

float8_gemm_setting gemm_setting(const GemmSetting& from) {
  return {runtime::cast_setting(from.a), runtime::cast_setting(from.b), from.fast ? 1 : 0};
}

const Recipe* find_named(std::string_view name) {
  if (name == bf16_recipe().name) return &bf16_recipe();
  const auto all = builtin_recipes();
  const auto found = std::ranges::find(all, name, &Recipe::name);
  return found == all.end() ? nullptr : &*found;
}

}  // namespace

Result<Recipe> named_recipe(const char* name) {
  const Recipe* found = find_named(name);
  if (found != nullptr) return *found;
  Result<Recipe> none = find_recipe(name);
  none.error().message += ", bf16";
  return none;
}

Result<Recipe> custom_recipe(const float8_recipe* recipe) {
  float8_recipe known;
  F8_TRY(read_struct(recipe, "float8_recipe", known));
  F8_TRY(need_zero("float8_recipe.reserved", known.reserved));
  Recipe to;
  to.name = known.name == nullptr ? "custom" : known.name;
  to.gemms[0] = F8_TRY(gemm_setting(known.output, Gemm::kOutput));
  to.gemms[1] = F8_TRY(gemm_setting(known.grad_input, Gemm::kGradInput));
  to.gemms[2] = F8_TRY(gemm_setting(known.grad_weight, Gemm::kGradWeight));
  return to;
}

Result<Recipe> one_recipe(const char* in, const char* name, const float8_recipe* custom) {
  if ((name == nullptr) == (custom == nullptr)) {
    return fail(ErrorCode::kInvalidArgument, "{}: {}; set one of recipe and custom_recipe", in,
                name == nullptr ? "recipe is NULL" : "there are two recipes");
  }
  return name != nullptr ? named_recipe(name) : custom_recipe(custom);
}

}  // namespace f8::c_abi

using namespace f8::c_abi;

float8_status float8_recipe_check(const float8_recipe* recipe) {
  return guarded([&]() -> f8::Status { return F8_TRY(custom_recipe(recipe)).validate(); });
}

float8_status float8_recipe_named(const char* name, float8_recipe* recipe) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(name, "name"));
    float8_recipe known;
    F8_TRY(read_struct(recipe, "float8_recipe", known));
    F8_TRY(named_recipe(name));
    const f8::Recipe& found = *find_named(name);
    known.name = found.name.c_str();
    known.output = gemm_setting(found.gemms[0]);
    known.grad_input = gemm_setting(found.gemms[1]);
    known.grad_weight = gemm_setting(found.gemms[2]);
    known.reserved = 0;
    std::memcpy(recipe, &known, std::min(recipe->struct_size, sizeof known));
    return {};
  });
}
