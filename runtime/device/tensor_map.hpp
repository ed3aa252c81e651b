// The tensor maps of the generated GEMM: how TMA sees its operands and result in memory. The device
// side of this agreement is codegen/kernels/gemm/gemm_mainloop.cuh. Encoding is host arithmetic.
//
//   a   uint8, {k, m}, box {128, tile_m / cluster_n}: a CTA copies its share of the a tile and
//   multicasts it
//   b   uint8, {k, n}, box {128, tile_n / cluster_m}; in shards {k / shards, shards n}; of an
//       M-grouped GEMM {k, n, groups}
//   d   box {32 or 64, 64}: codegen::out_row_bytes() wide; of a K-grouped GEMM {n, m, groups}
// Operands of 16 bits are of their own type, and boxes have 64 of their columns: an M-grouped GEMM has those
// of fp8 otherwise. MN-major ones are {m, k} and {n, k}, b of an M-grouped GEMM {n, k, groups}, in boxes
// {64, 64}. The swizzle of each is as wide as its box: 128 bytes, or 64 for d. Reads outside of a tensor
// give zero, writes outside are dropped.
#pragma once

#include "codegen/kernel_spec.hpp"
#include "recipes/problem.hpp"
#include "runtime/device/driver.hpp"

namespace f8::runtime {

struct GemmMaps {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap d;
};

// `shape` is the GEMM's own; b lies in `shards`; rows of d are `ld_d` elements apart.
[[nodiscard]] Status encode_gemm_maps(const Driver& driver, const codegen::GemmSpec& spec,
                                      Shape shape, int64_t shards, int64_t ld_d, const void* a,
                                      const void* b, void* d, GemmMaps& out);
// Those of an M-grouped GEMM, whose b is [groups][n][row_pitch(k)].
[[nodiscard]] Status encode_grouped_maps(const Driver& driver, const codegen::GemmSpec& spec,
                                         Shape shape, int64_t groups, int64_t ld_d, const void* a,
                                         const void* b, void* d, GemmMaps& out);
// Operands of 16 bits have these maps; their rows are ld_a and ld_b elements apart, and an MN-major b is
// [groups][k][ld_b].
[[nodiscard]] Status encode_m_grouped_16_bit_maps(const Driver& driver,
                                                  const codegen::GemmSpec& spec, Shape shape,
                                                  int64_t groups, int64_t ld_a, int64_t ld_b,
                                                  int64_t ld_d, const void* a, const void* b,
                                                  void* d, GemmMaps& out);
// Those of a K-grouped GEMM, whose d is [groups][m][ld_d]; shape.k are the columns of all groups, or of
// operands of 16 bits the rows, ld_a and ld_b elements apart.
[[nodiscard]] Status encode_k_grouped_maps(const Driver& driver, const codegen::GemmSpec& spec,
                                           Shape shape, int64_t groups, int64_t ld_d, const void* a,
                                           const void* b, void* d, GemmMaps& out);
[[nodiscard]] Status encode_mn_major_maps(const Driver& driver, const codegen::GemmSpec& spec,
                                          Shape shape, int64_t groups, int64_t ld_a, int64_t ld_b,
                                          int64_t ld_d, const void* a, const void* b, void* d,
                                          GemmMaps& out);

// That of dense rows of uint8, in boxes of 64 or 128 columns. `name` says in an error what they are.
[[nodiscard]] Status encode_bytes_map(const Driver& driver, const char* name, const void* base,
                                      int64_t rows, int64_t cols, int64_t box_rows,
                                      int64_t box_cols, CUtensorMap& out);

}  // namespace f8::runtime
