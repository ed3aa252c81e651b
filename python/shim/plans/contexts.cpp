// The contexts of devices, each made once. Nothing here is ever destroyed: a process that ends may have
// lost its CUDA context before static objects go.
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "python/shim/base/cuda.hpp"
#include "python/shim/base/errors.hpp"
#include "python/shim/plans/registry.hpp"

namespace float8_torch {
namespace {

// The contexts of devices, and how those of GPUs tune.
struct Contexts {
  std::mutex mutex;
  std::map<int32_t, float8_context*> all;
  int32_t tune_ms = 0;
  std::string database;
};

Contexts& contexts() {
  static auto* const contexts = new Contexts;
  return *contexts;
}

}  // namespace

void tune_on_first_use(int64_t milliseconds, std::string database) {
  Contexts& known = contexts();
  const std::lock_guard lock(known.mutex);
  for (const auto& [device, context] : known.all) {
    if (device == kEmulated || context == nullptr) continue;
    throw std::runtime_error(
        "float8: tune_on_first_use comes too late, a linear was planned on a GPU; call it before "
        "the first one");
  }
  known.tune_ms = static_cast<int32_t>(milliseconds);
  known.database = std::move(database);
}

float8_context* context_of(int32_t device) {
  Contexts& known = contexts();
  const std::lock_guard lock(known.mutex);
  float8_context*& context = known.all[device];
  if (context == nullptr) {
    float8_context_options options = {};
    options.struct_size = sizeof options;
    options.emulate = device == kEmulated;
    options.moves_saved = 1;  // saved_tensors_hooks may
    if (device != kEmulated) {
      load_cuda_libraries();
      options.tune_on_first_use = known.tune_ms;
      options.database = known.database.empty() ? nullptr : known.database.c_str();
    }
    check(float8_context_create(device == kEmulated ? 0 : device, &options, &context));
  }
  return context;
}

Place place_of(const Tensor& tensor, Config config) {
  Place place{.device = device_of(tensor), .emulated = config.emulate()};
  if (place.device.is_cuda()) {
    if (place.emulated) throw std::logic_error("float8: tensors of a GPU were not staged");
    place.stream = current_stream(place.device.index);
    place.capturing = is_capturing(place.stream);
  } else if (!place.emulated || place.device.type != aoti_torch_device_type_cpu()) {
    throw std::invalid_argument(
        "float8: the tensors are not on a CUDA device; move the model and its input to a Hopper "
        "GPU, or set emulate=True (of LinearConfig, or of the function) to compute on the CPU "
        "(slow, for tests)");
  }
  return place;
}

}  // namespace float8_torch
