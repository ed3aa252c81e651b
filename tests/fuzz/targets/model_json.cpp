// Lists of layers, Hugging Face's config.json, and indexes of shards (which are not there).
#include <algorithm>

#include "tests/fuzz/fuzz.hpp"
#include "tools/tuner/model_files/model.hpp"

namespace f8 {
namespace {

void check(std::string_view text, tuner::ExpertsAs experts) {
  const auto layers = tuner::parse_model_json(text, "/nonexistent/model.json", experts);
  if (!layers) return fuzz::check_readable(layers.error().message);
  fuzz::count_accepted();
  FUZZ_CHECK(!layers->empty());
  FUZZ_CHECK(layers->size() <= 200'000 + text.size());  // a short text has no endless model
  for (const NamedLinear& layer : *layers) {
    FUZZ_CHECK(std::min({layer.in_features, layer.out_features, layer.count}) >= 1);
    FUZZ_CHECK(std::max({layer.in_features, layer.out_features, layer.count}) <= kMaxDim);
    FUZZ_CHECK(layer.tokens_share > 0);
    FUZZ_CHECK(layer.groups.experts >= 0 && layer.groups.experts <= 1 << 20);
    FUZZ_CHECK(layer.tokens_share <=
               std::max<double>(1, static_cast<double>(layer.groups.experts)));
  }
}

}  // namespace
}  // namespace f8

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace f8;
  for (const auto experts : {tuner::ExpertsAs::kLinears, tuner::ExpertsAs::kModule}) {
    check(fuzz::text_of(data, size), experts);
  }
  return 0;
}
