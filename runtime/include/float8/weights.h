/* Changes of weights, found on the device. */
#ifndef FLOAT8_WEIGHTS_H_
#define FLOAT8_WEIGHTS_H_

#include "float8/call.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Finds on the device whether weights changed since the call before, whoever wrote them: it computes
 * a fingerprint of a weight's bytes, compares it with the one that the call before left, keeps it, and
 * sets the weight's noop_flag to 0 where they differ; elsewhere the flag stays as it is. A guarded cast that
 * follows on the stream then casts what changed and nothing else, also in a CUDA graph. A change is
 * missed with a probability of about 2^-128, and one inside 16 bytes never. It reads each byte once. */
#define FLOAT8_FINGERPRINT_BYTES 48
typedef struct float8_fingerprint_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_fingerprint_args));
  /* [n][k] of any sizes, aligned to its elements, with any row stride that holds a row; without fp8 */
  float8_matrix w FLOAT8_DEFAULT({});
  int64_t n FLOAT8_DEFAULT(0);
  int64_t k FLOAT8_DEFAULT(0);
  int32_t dtype FLOAT8_DEFAULT(0);    /* a float8_dtype, w's type */
  int32_t reserved FLOAT8_DEFAULT(0); /* 0 */
  /* What else the copies depend on, such as the type that w is converted to: another seed gives
   * another fingerprint. */
  uint64_t seed FLOAT8_DEFAULT(0);
  /* FLOAT8_FINGERPRINT_BYTES of device memory of this weight alone, aligned to 16 bytes: zeros before
   * the first call, and written by these calls alone. */
  void* fingerprint FLOAT8_DEFAULT(NULL);
  /* as in float8_quantize_args; several weights may have one */
  uint32_t* noop_flag FLOAT8_DEFAULT(NULL);
} float8_fingerprint_args;

/* `args` is an array of `count` structs. The first call of a context loads the kernel; call it with a
 * count of 0 ahead of a capture. Streams may compare one weight side by side: the worst of it is a
 * cast too many. */
FLOAT8_API float8_status float8_weights_compare(float8_context* context,
                                                const float8_fingerprint_args* args, size_t count,
                                                float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_WEIGHTS_H_ */
