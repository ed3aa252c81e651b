// The front of a safetensors file.
#include "tools/tuner/model_files/safetensors.hpp"

#include <algorithm>

#include "base/text.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace f8 {
namespace {

void check(std::string_view bytes) {
  auto tensors = tuner::parse_safetensors(bytes, "model.safetensors");
  if (!tensors) return fuzz::check_readable(tensors.error().message);
  for (const tuner::TensorShape& tensor : *tensors) FUZZ_CHECK(!has_control(tensor.name));
  const auto layers = tuner::linears(std::move(*tensors), "model.safetensors");
  if (!layers) return fuzz::check_readable(layers.error().message);
  fuzz::count_accepted();
  for (const NamedLinear& layer : *layers) {
    FUZZ_CHECK(std::min(layer.in_features, layer.out_features) >= 1);
    FUZZ_CHECK(std::max(layer.in_features, layer.out_features) <= kMaxDim);
  }
}

}  // namespace
}  // namespace f8

// The bytes as they stand, and with a length that fits what follows it.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes = f8::fuzz::text_of(data, size);
  f8::check(bytes);
  if (size < 8) return 0;
  std::string fitting(bytes);
  for (size_t i = 0; i < 8; ++i) fitting[i] = static_cast<char>((size - 8) >> (8 * i) & 0xff);
  f8::check(fitting);
  return 0;
}
