// Tensors as the shim sees them: the C functions of PyTorch's stable ABI, without its dispatcher.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <span>

#include "float8/float8.h"

namespace float8_torch {

using torch::stable::Tensor;

struct Device {
  int32_t type = 0;
  int32_t index = 0;
  bool operator==(const Device&) const = default;
  [[nodiscard]] bool is_cuda() const { return type == aoti_torch_device_type_cuda(); }
};

[[nodiscard]] Device device_of(const Tensor& tensor);
[[nodiscard]] int32_t dtype_of(const Tensor& tensor);                   // a code of PyTorch's
[[nodiscard]] std::span<const int64_t> sizes_of(const Tensor& tensor);  // while the tensor lives

// The float8_dtype of a code of PyTorch's. Throws where there is none; `name` is the tensor's.
[[nodiscard]] float8_dtype element_type(int32_t dtype, const char* name);
[[nodiscard]] int32_t code_of(float8_dtype dtype);  // and back

// Throws where elements of the tensor lie outside of its storage, which somebody freed or resized.
void check_memory(const Tensor& tensor, const char* name);

// Throws unless the tensor is contiguous, on the device and in its own memory, and has elements of so
// many bytes. Who hands its address to the library as `numel` such elements calls this first.
void check_dense(const Tensor& tensor, size_t element_bytes, const Device& device,
                 const char* name);

// A tensor of any rank whose last dimension is a row, as a matrix. `keep` owns the data.
struct Matrix {
  Tensor keep;
  void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // between rows, in elements
};

// Copies only where the rows do not lie a fixed stride apart, or are not aligned to 16 bytes.
[[nodiscard]] Matrix as_matrix(const Tensor& tensor);

// A dense tensor without values.
[[nodiscard]] Tensor empty(std::span<const int64_t> sizes, int32_t dtype, Device device);
[[nodiscard]] Tensor empty_strided(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                                   int32_t dtype, Device device);
[[nodiscard]] Tensor empty_bytes(int64_t bytes, Device device);

// The tensor itself where it has the type, else a copy.
[[nodiscard]] Tensor to_dtype(const Tensor& tensor, int32_t dtype);

}  // namespace float8_torch
