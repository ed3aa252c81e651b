/* Rotary positions of queries and keys (RoPE), in one launch for both, and their gradient. */
#ifndef FLOAT8_ROTARY_H_
#define FLOAT8_ROTARY_H_

#include "float8/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct float8_rotary_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_rotary_args));
  /* [batch][heads][tokens][head_dim] each, of dtype, read. k.data is NULL where heads_k is 0. */
  float8_heads q FLOAT8_DEFAULT({});
  float8_heads k FLOAT8_DEFAULT({});
  /* Of the same sizes, of out_dtype, written: they overlap nothing. */
  float8_heads q_out FLOAT8_DEFAULT({});
  float8_heads k_out FLOAT8_DEFAULT({});
  /* [tokens][head_dim] of cos_dtype for each sequence, whose elements lie side by side; aligned to 16 bytes.
   * Strides are of both, in elements, multiples of 8; a batch stride of 0: all sequences have the same. */
  const void* cos FLOAT8_DEFAULT(NULL);
  const void* sin FLOAT8_DEFAULT(NULL);
  int64_t cos_batch_stride FLOAT8_DEFAULT(0);
  int64_t cos_token_stride FLOAT8_DEFAULT(0);
  int64_t batch FLOAT8_DEFAULT(0); /* 0 is legal, as it is of tokens: nothing is read */
  int64_t tokens FLOAT8_DEFAULT(0);
  int32_t heads_q FLOAT8_DEFAULT(0);
  int32_t heads_k FLOAT8_DEFAULT(0);
  int32_t head_dim FLOAT8_DEFAULT(0); /* a multiple of 16, up to 1024 */
  int32_t dtype FLOAT8_DEFAULT(0);    /* a float8_dtype, as the next two */
  int32_t cos_dtype FLOAT8_DEFAULT(0);
  int32_t out_dtype FLOAT8_DEFAULT(0);
  int32_t inverse FLOAT8_DEFAULT(0);  /* nonzero: q and k are gradients of what the forward left */
  int32_t reserved FLOAT8_DEFAULT(0); /* 0 */
} float8_rotary_args;

/* x cos + rotate_half(x) sin of each head, where rotate_half has the second half of a head, negated, and then its
 * first half. Both products and their sum are rounded to out_dtype, to nearest even: the bits are those of so many
 * operations of PyTorch, and with `inverse` those of its gradient. The first call of a context with these types
 * loads the kernel; make one ahead of a capture. It is enqueued on the stream, allocates nothing, and may be called
 * from any thread. FLOAT8_INVALID_ARGUMENT names the field that cannot be. */
FLOAT8_API float8_status float8_rotary(float8_context* context, const float8_rotary_args* args,
                                       float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_ROTARY_H_ */
