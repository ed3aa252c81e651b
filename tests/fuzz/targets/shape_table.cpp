// Tables of shapes in CSV.
#include "tests/fuzz/fuzz.hpp"
#include "tools/tuner/search/bench/shape_sweep.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace f8;
  const auto shapes = tuner::parse_shape_table(fuzz::text_of(data, size));
  if (!shapes) {
    fuzz::check_readable(shapes.error().message);
    return 0;
  }
  fuzz::count_accepted();
  for (const Shape& shape : *shapes) FUZZ_CHECK(validate_shape(shape).has_value());
  return 0;
}
