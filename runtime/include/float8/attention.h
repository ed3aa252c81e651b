/* Attention, O = softmax(scale Q K^T) V, and its gradients, in fp8 or in bf16. In fp8 q, k and v are cast to e4m3 with a
 * scale for each 128 tokens of a head, a power of two; k is cast without its mean over the tokens of its head, which
 * changes no softmax and no gradient. Both products are fp8 MMAs; S, its softmax, and sums beyond 128 keys are fp32, and O
 * is rounded once.
 *
 * What is in bf16 runs by cuDNN 9, which is opened when it is first needed and may be absent: libcudnn.so.9, of version
 * 9.5.1 or newer. A call of it with sizes or strides that its plan has not seen builds a graph, within some 50 ms, or a
 * second where cuDNN compiles a kernel: call it once before a capture. It takes a lock and allocates on the host, and its
 * backward adds with atomics, so that gradients may differ in their last bits from run to run.
 * The conventions of all calls are in float8.h. */
#ifndef FLOAT8_ATTENTION_H_
#define FLOAT8_ATTENTION_H_

#include "float8/call.h"
#include "float8/context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum float8_attention_recipe {
  FLOAT8_ATTENTION_FP8_FORWARD = 0, /* the forward in fp8, the backward in bf16 */
  FLOAT8_ATTENTION_FP8 = 1,         /* both in fp8 */
  FLOAT8_ATTENTION_BF16 = 2         /* both in bf16 */
} float8_attention_recipe;

typedef struct float8_attention_desc {
  size_t struct_size;
  int64_t
      heads_q; /* a multiple of heads_kv: so many heads of queries share one of keys and values */
  int64_t heads_kv; /* at least 1 */
  int64_t head_dim; /* 64, 128 or 256 */
  float scale;      /* of the scores; 0: 1 / sqrt(head_dim) */
  int32_t causal;   /* nonzero: query i has the keys up to the i-th one */
  int32_t dtype;    /* of q, k, v and o: FLOAT8_BF16 */
  int32_t
      packed; /* nonzero: a call's sequences lie one behind the other (float8_attention_sizes). In bf16 it needs cuDNN
                 9.6, and 9.19 for heads of 256 */
  int64_t
      window; /* with causal, the keys of query i are the last `window` ones of those up to the i-th: its own
                       and window - 1 before it; 0: all of them. A call's tokens_q - tokens_kv is below it, so that
                       each query has a key */
  int32_t recipe;   /* a float8_attention_recipe */
  int32_t reserved; /* 0 */
} float8_attention_desc;

/* It compiles and loads kernels, as float8_linear_plan does, or opens cuDNN for FLOAT8_ATTENTION_BF16 (FLOAT8_ENVIRONMENT
 * where that cannot be). On failure *out is NULL. */
FLOAT8_API float8_status float8_attention_plan(float8_context* context,
                                               const float8_attention_desc* desc,
                                               float8_attention** out);
FLOAT8_API void float8_attention_destroy(float8_attention* attention);

/* The sizes of a call, which may be others from call to call. Packed sequences have tokens_q and tokens_kv all together;
 * which sequence has which of them is read on the device. */
typedef struct float8_attention_sizes {
  int64_t batch FLOAT8_DEFAULT(1);     /* sequences; 0: the call does nothing */
  int64_t tokens_q FLOAT8_DEFAULT(0);  /* of each sequence; 0: the call does nothing */
  int64_t tokens_kv FLOAT8_DEFAULT(0); /* of each sequence, at least 1 */
  /* Of packed sequences: the tokens that one has at most, 0: any. A longer one is kept as an error, and what is in bf16
   * of it is wrong: its gradients, and under FLOAT8_ATTENTION_BF16 o and lse. */
  int64_t longest_q FLOAT8_DEFAULT(0);
  int64_t longest_kv FLOAT8_DEFAULT(0);
} float8_attention_sizes;

/* The version of the cuDNN that is opened, as 91900 for 9.19.0; FLOAT8_ENVIRONMENT where there is none, and *out is 0. */
FLOAT8_API float8_status float8_cudnn_version(int32_t* out);

/* Returns the bytes that forward keeps for a backward: e4m3 copies and their scales, about half of what q, k and
 * v have, and 4 more of each query of a head under FLOAT8_ATTENTION_FP8; 8 (batch + 1) of packed sequences of
 * FLOAT8_ATTENTION_BF16, and 0 of others; 0 for NULL, and for sizes that a call refuses. */
FLOAT8_API size_t float8_attention_saved_bytes(const float8_attention* attention,
                                               const float8_attention_sizes* sizes);
/* Returns the bytes of scratch that forward needs, which are free between calls; 0 likewise. */
FLOAT8_API size_t float8_attention_workspace_bytes(const float8_attention* attention,
                                                   const float8_attention_sizes* sizes);

/* Returns the bytes of scratch of float8_attention_backward; 0 likewise, and where cuDNN is needed and cannot do it, which
 * the call tells. In bf16 it may build a graph, as the call, and on an emulated device there is no scratch. */
FLOAT8_API size_t float8_attention_backward_workspace_bytes(const float8_attention* attention,
                                                            const float8_attention_sizes* sizes);

/* A tensor [batch][heads][tokens][head_dim] whose heads are dense: an element's index is the sum of its
 * coordinates times the strides, in elements. data is aligned to 16 bytes, and strides are multiples of 8; those of
 * a tensor that is written give each element a place of its own. A stride of 0 repeats what lies there: it does not
 * stand for a dense tensor. Packed sequences are a batch of 1 in all tensors. */
typedef struct float8_heads {
  void* data FLOAT8_DEFAULT(NULL);
  int64_t batch_stride FLOAT8_DEFAULT(0);
  int64_t head_stride FLOAT8_DEFAULT(0);
  int64_t token_stride FLOAT8_DEFAULT(0);
} float8_heads;

/* The first error of packed sequences, in memory of the device that the caller sets to 0 once: calls keep what
 * is there. */
typedef enum float8_sequence_error_code {
  FLOAT8_NO_SEQUENCE_ERROR = 0,
  FLOAT8_BAD_CU_SEQLENS_Q = 1,
  FLOAT8_BAD_CU_SEQLENS_KV = 2,
  FLOAT8_LONG_SEQUENCE_Q = 3, /* a sequence has more than longest_q tokens */
  FLOAT8_LONG_SEQUENCE_KV = 4
} float8_sequence_error_code;

typedef struct float8_sequence_error {
  int32_t code FLOAT8_DEFAULT(0);  /* a float8_sequence_error_code */
  int32_t index FLOAT8_DEFAULT(0); /* of the offset, or of the sequence */
} float8_sequence_error;

typedef struct float8_attention_forward_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_attention_forward_args));
  float8_attention_sizes sizes FLOAT8_DEFAULT({});
  float8_heads q FLOAT8_DEFAULT({}); /* read, as k and v */
  float8_heads k FLOAT8_DEFAULT({});
  float8_heads v FLOAT8_DEFAULT({});
  void* o FLOAT8_DEFAULT(NULL); /* [batch][tokens_q][heads_q][head_dim], written */
  float* lse FLOAT8_DEFAULT(
      NULL); /* [batch][heads_q][tokens_q], written: ln of each softmax's sum, of scores with k
                             less its mean, which is not to be merged with that of other keys. In bf16
                             k is whole */
  float8_buffer saved FLOAT8_DEFAULT({});     /* float8_attention_saved_bytes(), written */
  float8_buffer workspace FLOAT8_DEFAULT({}); /* float8_attention_workspace_bytes() */
  /* Of packed sequences: [batch + 1] on the device. Sequence i has the tokens from the i-th offset on, up to the one
   * behind it; the first is 0, and the last tokens_q or tokens_kv. */
  const int32_t* cu_seqlens_q FLOAT8_DEFAULT(NULL);
  const int32_t* cu_seqlens_kv FLOAT8_DEFAULT(NULL);
  float8_sequence_error* sequence_error FLOAT8_DEFAULT(NULL); /* on the device, or NULL */
} float8_attention_forward_args;

/* In fp8 it enqueues three launches: the sums of k, the casts, and the attention, and of packed sequences their layout
 * before these. In bf16 packed sequences have that layout too, and a launch right before and behind cuDNN's. A NaN or an
 * infinity shows in o of its head, in fp8 in every query that has a key of its 128 tokens, and with a window in others of
 * the same 128 queries.
 *
 * Packed sequences are read from the device in each call, also where a CUDA graph replays it. In fp8 each has the bits of o
 * and lse that a batch of it alone gives it, wherever it lies; it has nothing of the others, and may be empty. A query without a
 * key has an o of 0 and an lse of -inf. An offset that falls, is negative, or lies beyond the tokens is replaced by the
 * largest one before it, or by the tokens, so that no call leaves its memory, and sequence_error has its index.
 * float8_attention_dequantize and a backward know the sequences from `saved`, whose last 8 (batch + 1) bytes are the offsets
 * so replaced, of queries and of keys.
 *
 * What reads `saved` looks for its parts by its own sizes, which the caller guarantees to be the forward's: a device does not
 * tell. The bytes of `saved`, where they are given, are compared with those that a forward of these sizes leaves
 * (FLOAT8_INVALID_ARGUMENT), and an emulated device refuses offsets that are not those of the sizes (FLOAT8_CUDA). */
FLOAT8_API float8_status float8_attention_forward(const float8_attention* attention,
                                                  const float8_attention_forward_args* args,
                                                  float8_stream stream);

typedef struct float8_attention_dequantize_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_attention_dequantize_args));
  float8_attention_sizes sizes FLOAT8_DEFAULT({}); /* the forward's */
  float8_buffer saved FLOAT8_DEFAULT({});          /* what it filled, of just its bytes */
  float8_heads q FLOAT8_DEFAULT({});               /* written, as k and v; memory of their own */
  float8_heads k FLOAT8_DEFAULT({});
  float8_heads v FLOAT8_DEFAULT({});
} float8_attention_dequantize_args;

/* Enqueues one launch that writes q, k and v as the forward's products in fp8 had them: exact in bf16, and k without its
 * mean. A backward of your own takes these, with the forward's o and lse; beside an lse of other values the gradients of the
 * caller's q, k and v are wrong where data has outliers. */
FLOAT8_API float8_status float8_attention_dequantize(const float8_attention* attention,
                                                     const float8_attention_dequantize_args* args,
                                                     float8_stream stream);

typedef struct float8_attention_backward_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_attention_backward_args));
  float8_attention_sizes sizes FLOAT8_DEFAULT({}); /* the forward's, as o, lse and saved */
  float8_heads dout FLOAT8_DEFAULT({});            /* the gradient of o, read */
  const void* o FLOAT8_DEFAULT(NULL);
  const float* lse FLOAT8_DEFAULT(NULL);
  float8_buffer saved FLOAT8_DEFAULT({});     /* what it filled, of just its bytes */
  float8_buffer workspace FLOAT8_DEFAULT({}); /* float8_attention_backward_workspace_bytes() */
  float8_heads dq FLOAT8_DEFAULT({});         /* written, as dk and dv */
  float8_heads dk FLOAT8_DEFAULT({});
  float8_heads dv FLOAT8_DEFAULT({});
  float8_heads q
      FLOAT8_DEFAULT({}); /* the forward's, as k and v, of FLOAT8_ATTENTION_BF16 alone: read */
  float8_heads k FLOAT8_DEFAULT({});
  float8_heads v FLOAT8_DEFAULT({});
} float8_attention_backward_args;

/* Under FLOAT8_ATTENTION_FP8 it enqueues three launches: the casts of dout, of which the transposed copies of q and k are
 * part, dq, and dk with dv. All products are fp8 MMAs with fp32 sums; dout has a scale for each 128 tokens of a head, P and
 * dS have scales that are found beside their products, and the gradients have the same bits from run to run. Under
 * FLOAT8_ATTENTION_FP8_FORWARD it enqueues float8_attention_dequantize into its workspace, and cuDNN's backward of these. In
 * bf16 dout, dq, dk and dv of packed sequences are dense [tokens][heads][head_dim], and so is q, and before cuDNN 9.19 k and v
 * (FLOAT8_UNSUPPORTED where cuDNN would need more scratch, or a gradient's strides are not these), and a batch of one query
 * has no backward on a GPU (FLOAT8_UNSUPPORTED).
 * In fp8 the gradients are those of the values that the forward multiplied: the gradient of k's mean is 0. A dout that is
 * not finite shows in the gradients of its head. A call without queries writes nothing, where dk and dv would be 0. */
FLOAT8_API float8_status float8_attention_backward(const float8_attention* attention,
                                                   const float8_attention_backward_args* args,
                                                   float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_ATTENTION_H_ */
