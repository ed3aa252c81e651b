#include "runtime/device/tensor_map.hpp"

#include "codegen/kernels/gemm/gemm_layout.cuh"
#include "recipes/fp8_layout.hpp"

namespace f8::runtime {
namespace {

struct Plane {
  CUtensorMapDataType type;
  uint32_t element_bytes;
  void* base;
  int64_t cols;
  int64_t rows;
  int64_t ld_bytes;
  uint32_t box_rows;
  uint32_t box_bytes = kernels::kStageK;  // a row of a box, which is what its swizzle spans
  int64_t matrices = 0;                   // one behind the other; 0: the map has two dimensions
};

CUtensorMapDataType result_type(Dtype type) {
  return type == Dtype::kF32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : type == Dtype::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

Status encode(const Driver& driver, const Plane& plane, const char* name, CUtensorMap& out) {
  const cuuint64_t extents[3] = {static_cast<cuuint64_t>(plane.cols),
                                 static_cast<cuuint64_t>(plane.rows),
                                 static_cast<cuuint64_t>(plane.matrices)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(plane.ld_bytes),
                                 static_cast<cuuint64_t>(plane.rows * plane.ld_bytes)};
  const cuuint32_t box[3] = {plane.box_bytes / plane.element_bytes, plane.box_rows, 1};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const CUresult result = driver.tensor_map_encode_tiled(
      &out, plane.type, plane.matrices > 0 ? 3 : 2, plane.base, extents, strides, box,
      element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      plane.box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) [[likely]] {
    return {};
  }
  Error error = driver.failure(result, "cuTensorMapEncodeTiled").error();
  error.message += f8::format(", operand {}: {} x {}, rows {} bytes apart, box {} x {}", name,
                              plane.rows, plane.cols, plane.ld_bytes, box[1], box[0]);
  return std::unexpected(std::move(error));
}

Status encode_result(const Driver& driver, const codegen::GemmSpec& spec, Shape shape, int64_t ld_d,
                     void* d, GemmMaps& out, int64_t matrices) {
  const auto d_bytes = static_cast<uint32_t>(size_bytes(spec.d));
  return encode(driver,
                {result_type(spec.d), d_bytes, d, shape.n, shape.m, ld_d * d_bytes,
                 kernels::kOutRows, static_cast<uint32_t>(codegen::out_row_bytes(spec)), matrices},
                "d", out.d);
}

// The maps of a and d, which do not depend on what b is. `matrices`: of d, as a Plane has them.
Status encode_rows(const Driver& driver, const codegen::GemmSpec& spec, Shape shape, int64_t ld_d,
                   const void* a, void* d, GemmMaps& out, int64_t matrices = 0) {
  F8_TRY(encode(
      driver,
      {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, const_cast<void*>(a), shape.k, shape.m, row_pitch(shape.k),
       static_cast<uint32_t>(spec.config.tile_m / spec.config.cluster_n)},
      "a", out.a));
  return encode_result(driver, spec, shape, ld_d, d, out, matrices);
}

}  // namespace

Status encode_gemm_maps(const Driver& driver, const codegen::GemmSpec& spec, Shape shape,
                        int64_t shards, int64_t ld_d, const void* a, const void* b, void* d,
                        GemmMaps& out) {
  const int64_t shard_k = shape.k / shards;
  F8_TRY(encode_rows(driver, spec, shape, ld_d, a, d, out));
  return encode(
      driver,
      {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, const_cast<void*>(b), shard_k, shape.n * shards,
       row_pitch(shard_k), static_cast<uint32_t>(spec.config.tile_n / spec.config.cluster_m)},
      "b", out.b);
}

Status encode_grouped_maps(const Driver& driver, const codegen::GemmSpec& spec, Shape shape,
                           int64_t groups, int64_t ld_d, const void* a, const void* b, void* d,
                           GemmMaps& out) {
  F8_TRY(encode_rows(driver, spec, shape, ld_d, a, d, out));
  return encode(driver,
                {.type = CU_TENSOR_MAP_DATA_TYPE_UINT8,
                 .element_bytes = 1,
                 .base = const_cast<void*>(b),
                 .cols = shape.k,
                 .rows = shape.n,
                 .ld_bytes = row_pitch(shape.k),
                 .box_rows = static_cast<uint32_t>(spec.config.tile_n),
                 .matrices = groups},
                "b", out.b);
}

Status encode_m_grouped_16_bit_maps(const Driver& driver, const codegen::GemmSpec& spec,
                                    Shape shape, int64_t groups, int64_t ld_a, int64_t ld_b,
                                    int64_t ld_d, const void* a, const void* b, void* d,
                                    GemmMaps& out) {
  const auto operand = [&](const void* base, int64_t cols, int64_t rows, int64_t ld, int box_rows,
                           int64_t matrices) {
    return Plane{.type = result_type(spec.a),
                 .element_bytes = 2,
                 .base = const_cast<void*>(base),
                 .cols = cols,
                 .rows = rows,
                 .ld_bytes = ld * 2,
                 .box_rows = static_cast<uint32_t>(box_rows),
                 .matrices = matrices};
  };
  const int rows_a = spec.config.tile_m / spec.config.cluster_n;
  F8_TRY(encode(driver, operand(a, shape.k, shape.m, ld_a, rows_a, 0), "a", out.a));
  F8_TRY(encode(driver,
                spec.mn_b ? operand(b, shape.n, shape.k, ld_b, kernels::kMnBox, groups)
                          : operand(b, shape.k, shape.n, ld_b, spec.config.tile_n, groups),
                "b", out.b));
  return encode_result(driver, spec, shape, ld_d, d, out, 0);
}

Status encode_mn_major_maps(const Driver& driver, const codegen::GemmSpec& spec, Shape shape,
                            int64_t groups, int64_t ld_a, int64_t ld_b, int64_t ld_d, const void* a,
                            const void* b, void* d, GemmMaps& out) {
  const auto operand = [&](const void* base, int64_t cols, int64_t ld, const char* name,
                           CUtensorMap& map) {
    return encode(
        driver,
        {result_type(spec.a), 2, const_cast<void*>(base), cols, shape.k, ld * 2, kernels::kMnBox},
        name, map);
  };
  F8_TRY(operand(a, shape.m, ld_a, "a", out.a));
  F8_TRY(operand(b, shape.n, ld_b, "b", out.b));
  return encode_result(driver, spec, shape, ld_d, d, out, groups);
}

Status encode_k_grouped_maps(const Driver& driver, const codegen::GemmSpec& spec, Shape shape,
                             int64_t groups, int64_t ld_d, const void* a, const void* b, void* d,
                             GemmMaps& out) {
  F8_TRY(encode_rows(driver, spec, shape, ld_d, a, d, out, groups));
  return encode(
      driver,
      {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, const_cast<void*>(b), shape.k, shape.n, row_pitch(shape.k),
       static_cast<uint32_t>(spec.config.tile_n / spec.config.cluster_m)},
      "b", out.b);
}

Status encode_bytes_map(const Driver& driver, const char* name, const void* base, int64_t rows,
                        int64_t cols, int64_t box_rows, int64_t box_cols, CUtensorMap& out) {
  return encode(driver,
                {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, const_cast<void*>(base), cols, rows, cols,
                 static_cast<uint32_t>(box_rows), static_cast<uint32_t>(box_cols)},
                name, out);
}

}  // namespace f8::runtime
