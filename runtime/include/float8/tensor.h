/* Tensors in fp8. */
#ifndef FLOAT8_TENSOR_H_
#define FLOAT8_TENSOR_H_

#include "float8/recipe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A view of a tensor [rows][cols] in fp8: the copy q as it lies and the transposed copy qt, each
 * with its inverse scales, by which its elements are multiplied. A copy that was not made is NULL.
 * The device memory is the caller's; a view owns nothing and may be copied. The elements of a row
 * are followed by zeros up to a multiple of 16. The inverse scales are fp32 values:
 *
 *   FLOAT8_TENSOR          one
 *   FLOAT8_AXIS            one for each row of the copy
 *   FLOAT8_BLOCK_1X128     one for block b of row r at [b * S + r], S: rows, in whole 4s
 *   FLOAT8_BLOCK_128X128   one for block b of rows i * 128 and on at [i * S + b], S: blocks of a
 *                          row, in whole 4s
 *
 * Block scales are aligned to 16 bytes. */
struct float8_tensor {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_tensor));
  int64_t rows FLOAT8_DEFAULT(0);
  int64_t cols FLOAT8_DEFAULT(0);
  const void* q FLOAT8_DEFAULT(NULL);  /* [rows][cols], rows ld_q bytes apart */
  const void* qt FLOAT8_DEFAULT(NULL); /* [cols][rows], rows ld_qt bytes apart */
  const float* q_inverse_scale FLOAT8_DEFAULT(NULL);
  const float* qt_inverse_scale FLOAT8_DEFAULT(NULL);
  int64_t ld_q FLOAT8_DEFAULT(0);  /* cols in whole 128s */
  int64_t ld_qt FLOAT8_DEFAULT(0); /* rows in whole 128s */
  float8_cast_setting q_setting FLOAT8_DEFAULT({});
  float8_cast_setting qt_setting FLOAT8_DEFAULT({});
  /* More than 1: qt lies as ranks gather it, in [qt_shards][cols][rows / qt_shards] without gaps: each
   * rank's rows, in whole 128s. ld_qt is then rows / qt_shards. The inverse scales are those of the
   * whole. See float8_linear_desc.weight_shards. 0 and 1: one piece. */
  int64_t qt_shards FLOAT8_DEFAULT(0);
  /* Not 0: the tensor is a shard of one with so many rows, and cuts its blocks of 128x128. The inverse
   * scales of these are those of the whole. float8_gather_tensor takes such a shard; GEMMs do not. */
  int64_t whole_rows FLOAT8_DEFAULT(0);
};

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_TENSOR_H_ */
