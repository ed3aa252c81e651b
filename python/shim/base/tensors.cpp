// Reading and making tensors through the stable ABI's C functions.
#include "python/shim/base/tensors.hpp"

#include <torch/csrc/stable/ops.h>

#include <array>
#include <stdexcept>
#include <string>

namespace float8_torch {

std::span<const int64_t> sizes_of(const Tensor& tensor) {
  int64_t* sizes = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
  return {sizes, static_cast<size_t>(tensor.dim())};
}

namespace {

std::span<const int64_t> strides_of(const Tensor& tensor) {
  int64_t* strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
  return {strides, static_cast<size_t>(tensor.dim())};
}

// The elements between two rows, 0 where the rows do not lie a fixed stride apart.
int64_t row_stride(std::span<const int64_t> sizes, std::span<const int64_t> strides) {
  const size_t last = sizes.size() - 1;
  const int64_t cols = sizes[last];
  if (strides[last] != 1 && cols > 1) return 0;
  int64_t stride = 0;  // of the rows so far
  int64_t rows = 1;
  for (size_t i = last; i-- > 0;) {
    if (sizes[i] == 1) continue;
    if (rows == 1) {
      stride = strides[i];
    } else if (strides[i] != rows * stride) {
      return 0;
    }
    rows *= sizes[i];
  }
  return rows == 1 ? cols : stride;
}

void check_extent(const Tensor& tensor, std::span<const int64_t> sizes,
                  std::span<const int64_t> strides, size_t element_bytes, const char* name) {
  int64_t end = 1;  // in elements from the start of the storage
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return;
    end += (sizes[i] - 1) * strides[i];
  }
  int64_t offset = 0, bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &offset));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  const int64_t needed = (offset + end) * static_cast<int64_t>(element_bytes);
  if (needed <= bytes) [[likely]] {
    return;
  }
  throw std::invalid_argument(std::string("float8: ") + name + " needs " + std::to_string(needed) +
                              " bytes of memory, and its storage has " + std::to_string(bytes) +
                              "; it was freed or resized while a tensor of it was kept");
}

}  // namespace

void check_memory(const Tensor& tensor, const char* name) {
  check_extent(tensor, sizes_of(tensor), strides_of(tensor),
               aoti_torch_dtype_element_size(dtype_of(tensor)), name);
}

void check_dense(const Tensor& tensor, size_t element_bytes, const Device& device,
                 const char* name) {
  if (device_of(tensor) != device) {
    throw std::invalid_argument(std::string("float8: ") + name +
                                " is on another device than the tensors that it meets");
  }
  const size_t own_bytes = aoti_torch_dtype_element_size(dtype_of(tensor));
  if (!tensor.is_contiguous() || own_bytes != element_bytes) {
    throw std::invalid_argument(
        std::string("float8: ") + name + " is not contiguous, or has elements of " +
        std::to_string(own_bytes) + " bytes; it is a contiguous tensor with elements of " +
        std::to_string(element_bytes) + ", as float8 makes it");
  }
  check_memory(tensor, name);
}

Device device_of(const Tensor& tensor) {
  Device device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device.index));
  return device;
}

int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

float8_dtype element_type(int32_t dtype, const char* name) {
  static const int32_t bf16 = aoti_torch_dtype_bfloat16();
  static const int32_t f32 = aoti_torch_dtype_float32();
  static const int32_t f16 = aoti_torch_dtype_float16();
  if (dtype == bf16) return FLOAT8_BF16;
  if (dtype == f32) return FLOAT8_F32;
  if (dtype == f16) return FLOAT8_F16;
  throw std::invalid_argument(std::string("float8: ") + name +
                              " is neither bfloat16, float16 nor float32; cast it first");
}

int32_t code_of(float8_dtype dtype) {
  switch (dtype) {
    case FLOAT8_F32:
      return aoti_torch_dtype_float32();
    case FLOAT8_F16:
      return aoti_torch_dtype_float16();
    default:
      return aoti_torch_dtype_bfloat16();
  }
}

Matrix as_matrix(const Tensor& tensor) {
  const std::span<const int64_t> sizes = sizes_of(tensor);
  if (sizes.empty()) throw std::invalid_argument("float8: a linear's x has at least one dimension");
  Matrix matrix{.keep = tensor};
  matrix.cols = sizes.back();
  matrix.rows = 1;
  for (const int64_t size : sizes.first(sizes.size() - 1)) matrix.rows *= size;
  if (matrix.rows == 0 || matrix.cols == 0) {
    matrix.stride = matrix.cols;
    return matrix;
  }
  const auto bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype_of(tensor)));
  const std::span<const int64_t> strides = strides_of(tensor);
  check_extent(tensor, sizes, strides, static_cast<size_t>(bytes), "a linear's tensor");
  matrix.stride = row_stride(sizes, strides);
  matrix.data = tensor.mutable_data_ptr();
  const auto aligned = [&] { return reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0; };
  if (matrix.stride < matrix.cols || matrix.stride * bytes % 16 != 0 || !aligned()) {
    matrix.keep = torch::stable::contiguous(tensor);
    matrix.data = matrix.keep.mutable_data_ptr();
    if (!aligned()) {  // dense already, in the middle of a buffer
      matrix.keep = torch::stable::clone(tensor);
      matrix.data = matrix.keep.mutable_data_ptr();
    }
    matrix.stride = matrix.cols;
  }
  return matrix;
}

Tensor empty(std::span<const int64_t> sizes, int32_t dtype, Device device) {
  constexpr size_t kMostDims = 64;
  std::array<int64_t, kMostDims> strides;
  if (sizes.size() > kMostDims)
    throw std::invalid_argument("float8: a tensor of over 64 dimensions");
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return empty_strided(sizes, strides, dtype, device);
}

Tensor empty_strided(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                     int32_t dtype, Device device) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), dtype, device.type, device.index,
                                                  &handle));
  return Tensor(handle);
}

Tensor empty_bytes(int64_t bytes, Device device) {
  return empty(std::span(&bytes, 1), aoti_torch_dtype_uint8(), device);
}

Tensor to_dtype(const Tensor& tensor, int32_t dtype) {
  if (dtype_of(tensor) == dtype) return tensor;
  check_memory(tensor, "a linear's tensor");
  const auto wanted =
      torch::stable::detail::to<torch::headeronly::ScalarType>(torch::stable::detail::from(dtype));
  return torch::stable::to(tensor, wanted);
}

}  // namespace float8_torch
