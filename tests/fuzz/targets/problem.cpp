// Problem keys, lists of shapes, and the names of recipes, GEMMs, types and operations.
#include "recipes/problem.hpp"

#include <algorithm>
#include <set>

#include "tests/fuzz/fuzz.hpp"

namespace f8 {
namespace {

template <class T>
void check_refusal(const Result<T>& parsed) {
  FUZZ_CHECK(parsed.error().code == ErrorCode::kInvalidArgument);
  fuzz::check_readable(parsed.error().message);
}

void check_key(std::string_view text) {
  const auto problem = Problem::parse(text);
  if (!problem) return check_refusal(problem);
  fuzz::count_accepted();
  // Keys of version 0.1 have six fields, and one problem each as well.
  const std::string key = problem->key();
  FUZZ_CHECK(key == text || std::ranges::count(text, '/') == 5);
  FUZZ_CHECK(Problem::parse(key) == *problem);
  FUZZ_CHECK(is_attention(problem->op) || validate_shape(problem->shape()).has_value());
  FUZZ_CHECK(problem->flops() > 0 && problem->bytes() > 0);
}

void check_shapes(std::string_view text) {
  const auto shapes = parse_shapes(text);
  if (!shapes) return check_refusal(shapes);
  fuzz::count_accepted();
  FUZZ_CHECK(!shapes->empty() && shapes->size() <= kMaxShapes);
  FUZZ_CHECK(std::set<Shape>(shapes->begin(), shapes->end()).size() == shapes->size());
  for (const Shape& shape : *shapes) FUZZ_CHECK(validate_shape(shape).has_value());
}

template <class T, class Name>
void check_name(const Result<T>& parsed, std::string_view text, const Name& name_of) {
  if (!parsed) return check_refusal(parsed);
  fuzz::count_accepted();
  FUZZ_CHECK(name_of(*parsed) == text);
}

}  // namespace
}  // namespace f8

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace f8;
  const std::string_view text = fuzz::text_of(data, size);
  const auto as_text = [](const auto& value) { return std::string(to_string(value)); };
  check_key(text);
  check_shapes(text);
  check_name(find_recipe(text), text, [](const Recipe& recipe) { return recipe.name; });
  check_name(parse_gemm(text), text, as_text);
  check_name(parse_dtype(text), text, as_text);
  check_name(parse_dims(text), text, as_text);
  const bool is_other_name = text == "fprop" || text == "dgrad" || text == "wgrad";
  if (!is_other_name) check_name(parse_op(text), text, as_text);
  return 0;
}
