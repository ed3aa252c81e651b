#include "python/shim/staging.hpp"

#include <torch/csrc/stable/ops.h>

#include <stdexcept>

#include "python/shim/base/cuda.hpp"
#include "python/shim/scales/scales.hpp"

namespace float8_torch {
namespace {

// A new tensor there. The copy waits for the current stream, and its host for the copy.
Tensor copy_to(const Tensor& tensor, Device device) {
  const auto type = static_cast<torch::headeronly::DeviceType>(device.type);
  const auto index = static_cast<torch::stable::DeviceIndex>(device.index);
  return torch::stable::to(tensor, torch::stable::Device(type, index), false, true);
}

// `count` bytes of a byte tensor's storage, from so many bytes behind the tensor's first one.
Tensor bytes_from(const Tensor& tensor, int64_t behind, int64_t count) {
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(tensor.get(), 1, &count, &stride, behind, &handle));
  return Tensor(handle);
}

}  // namespace

Staging::Staging(Device where) : where_(where) {
  if (where.is_cuda() && is_capturing(current_stream(where.index))) {
    throw std::runtime_error(
        "float8: a CUDA graph is being captured, and a linear with emulate=True computes on the "
        "CPU, which no graph can do; convert the model without emulate, or run it without graphs");
  }
}

Staging::~Staging() {
  for (const Written& each : written_) {
    if (each.is_state) copy_first_steps(nullptr, each.copy.mutable_data_ptr());
  }
}

Tensor Staging::read(const Tensor& tensor) const {
  if (device_of(tensor) != where_) {
    throw std::invalid_argument(
        "float8: the tensors of a linear, or of a list of casts, are on different devices; move "
        "the model and its input to one");
  }
  check_memory(tensor, "a linear's tensor");
  return copy_to(tensor, {});
}

Tensor Staging::written(const Tensor& tensor) {
  return written_.emplace_back(Written{tensor, read(tensor)}).copy;
}

Tensor Staging::part_of_state(const Tensor& part) {
  check_form_of_state(part);
  int64_t offset = 0, bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(part.get(), &offset));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(part.get(), &bytes));
  const Tensor state = bytes_from(part, -offset, bytes);
  const void* const at = state.mutable_data_ptr();
  for (const Written& each : written_) {
    if (each.is_state && each.original.mutable_data_ptr() == at) {
      return bytes_from(each.copy, offset, part.numel());
    }
  }
  const Tensor copy = written_.emplace_back(Written{state, read(state), true}).copy;
  copy_first_steps(at, copy.mutable_data_ptr());
  return bytes_from(copy, offset, part.numel());
}

void Staging::finish() const {
  for (const Written& each : written_) {
    Tensor original = each.original;
    torch::stable::copy_(original, each.copy);
  }
}

Tensor Staging::result(const Tensor& tensor) const {
  return copy_to(tensor, where_);
}

}  // namespace float8_torch
