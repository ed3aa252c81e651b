// Lists of layers, Hugging Face's config.json, and indexes of shards (which are not there).
#include <algorithm>

#include "tests/fuzz/fuzz.hpp"
#include "tools/tuner/model_files/model.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace f8;
  const auto layers = tuner::parse_model_json(fuzz::text_of(data, size), "/nonexistent/model.json");
  if (!layers) {
    fuzz::check_readable(layers.error().message);
    return 0;
  }
  fuzz::count_accepted();
  FUZZ_CHECK(!layers->empty());
  FUZZ_CHECK(layers->size() <= 200'000 + size);  // a short text has no endless model
  for (const NamedLinear& layer : *layers) {
    FUZZ_CHECK(std::min({layer.in_features, layer.out_features, layer.count}) >= 1);
    FUZZ_CHECK(std::max({layer.in_features, layer.out_features, layer.count}) <= kMaxDim);
  }
  return 0;
}
