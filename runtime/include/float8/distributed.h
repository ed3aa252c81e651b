/* Several devices.
 *
 * Ranks hold the parts of a model or of its inputs, one device each. The calls below enqueue on a
 * stream, wait for nothing and may be captured in a CUDA graph, except where they say so. All ranks
 * of a communicator make the same calls in the same order. Which calls make a sharded layer:
 *
 *   weight, sharded by rows (FSDP)       float8_quantize_list_amax, float8_amax_sync and
 *                                        float8_quantize_list of all weights once a step;
 *                                        float8_gather_tensor of q before a forward and of qt before a
 *                                        backward, for w.fp8; float8_reduce_scatter of dw
 *   column-wise (tensor parallel)        w is sharded by rows of N, and x is gathered where the
 *                                        sequence is sharded (float8_gather_tensor, for x.fp8); dy is
 *                                        cast by columns, for float8_gemm; the ranks' dx are summed:
 *                                        float8_reduce_scatter or float8_all_reduce
 *   row-wise (tensor parallel)           w and x are sharded by columns of K, and cast so; the ranks' y
 *                                        are summed, and dy is gathered where the sequence is sharded
 *
 * docs/c-distributed.md says which results are those of one device bit for bit. */
#ifndef FLOAT8_DISTRIBUTED_H_
#define FLOAT8_DISTRIBUTED_H_

#include "float8/call.h"
#include "float8/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes a communicator for each of `count` contexts of this process, for a program that drives all
 * its devices itself, with a thread for each rank: out[r] is rank r's, on the device of contexts[r].
 * An ncclComm_t of the caller's own serves every call as well. On failure all of `out` are NULL.
 *
 * Contexts of emulated devices, of which several may have one ordinal, get communicators in host
 * memory. A call on one of them returns when all ranks have made it, and reductions add in the order
 * of ranks. Calls that do not fit each other, a rank that does not come within `timeout_ms` (0: 60 s)
 * and a rank that has left are an error of the others, which names the operation and the rank. */
FLOAT8_API float8_status float8_comms_create(float8_context* const* contexts, size_t count,
                                             int32_t timeout_ms, float8_nccl_comm* out);
/* Destroys one of them, when its work is done and graphs that captured calls with it are destroyed:
 * NCCL waits for those. */
FLOAT8_API void float8_comm_destroy(float8_nccl_comm communicator);
/* Destroys it and ends what other ranks wait for, after a failure. They get an error; with NCCL,
 * float8_comm_wait tells them, and names this rank if float8_comms_create made the communicator.
 * Destroy graphs that captured calls with it first, also those that still run: NCCL waits for those. */
FLOAT8_API void float8_comm_abort(float8_nccl_comm communicator);
/* Waits until `stream` has done its work, and fails (FLOAT8_CUDA) where an operation of `communicator`
 * failed, or where it is not done within `timeout_ms` (0: 60 s), as when a rank has died or makes
 * other calls. The message has `operation`, such as "step 12", and this rank. Of a communicator of
 * float8_comms_create it also names the rank that did not come and the operation that it did not come
 * to, as far as the process has seen float8's calls on it: of graphs that are replayed it has seen
 * their capture alone, and then names a rank that did not come to this wait. The ranks of the caller's own
 * communicators may be other processes, of which nothing is known. After a failure the communicator is
 * to be aborted. */
FLOAT8_API float8_status float8_comm_wait(float8_context* context, float8_nccl_comm communicator,
                                          const char* operation, int32_t timeout_ms,
                                          float8_stream stream);

/* Replaces `count` amaxes in device memory, each the bits of |x| as fp32, by their maxima over the
 * ranks of `communicator`, in one all-reduce on `stream`; NaN wins. All ranks give the same count. */
FLOAT8_API float8_status float8_amax_sync(uint32_t* amax_bits, size_t count,
                                          float8_nccl_comm communicator, float8_stream stream);

typedef struct float8_gather_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_gather_args));
  /* This rank's rows, as float8_quantize of a quantizer with over_ranks left them. */
  const float8_tensor* shard FLOAT8_DEFAULT(NULL);
  /* The whole tensor, whose memory is written: a float8_quantizer_view of a quantizer of all rows. A
   * copy that is NULL in this view is not gathered. Where its qt_shards is the number of ranks, qt stays
   * as it arrives, which takes no workspace and no copy; then the shards have equal rows in whole
   * 128s. */
  const float8_tensor* whole FLOAT8_DEFAULT(NULL);
  /* The rows of each shard. The last shards may have less, down to 0: rank r has the rows from
   * r * shard_rows on. Where FLOAT8_BLOCK_128X128 has a scale and it is no multiple of 128, the
   * shards' quantizers have whole_rows. Where FLOAT8_BLOCK_1X128 of qt has one it is a multiple. */
  int64_t shard_rows FLOAT8_DEFAULT(0);
  float8_nccl_comm communicator FLOAT8_DEFAULT(NULL);
  float8_buffer workspace FLOAT8_DEFAULT({}); /* float8_gather_workspace_bytes() */
} float8_gather_args;

/* Gathers a tensor in fp8 from its shards, one byte an element, with its inverse scales: q under each
 * other, qt side by side or in shards. The copies are those of the whole tensor's cast, bit for bit. q and scales
 * of shards of equal rows arrive in place; other parts take the workspace and one copy on the device. */
FLOAT8_API float8_status float8_gather_tensor(float8_context* context,
                                              const float8_gather_args* args, float8_stream stream);
/* Returns the bytes of workspace of float8_gather_tensor with this view of the whole tensor, 0 for
 * what is none. */
FLOAT8_API size_t float8_gather_workspace_bytes(const float8_tensor* whole, int64_t shard_rows,
                                                int32_t ranks);

/* Collectives of high-precision tensors; `dtype` is a float8_dtype. They are NCCL's, and those of
 * emulated devices. Reductions are sums. `count` is that of `to` in a scatter and that of `from` else.
 * float8_all_reduce may work in place, float8_all_gather with `from` at the rank's part of `to`, and
 * float8_reduce_scatter with `to` at the rank's part of `from`. */
FLOAT8_API float8_status float8_all_gather(const void* from, void* to, size_t count, int32_t dtype,
                                           float8_nccl_comm communicator, float8_stream stream);
FLOAT8_API float8_status float8_reduce_scatter(const void* from, void* to, size_t count,
                                               int32_t dtype, float8_nccl_comm communicator,
                                               float8_stream stream);
FLOAT8_API float8_status float8_all_reduce(const void* from, void* to, size_t count, int32_t dtype,
                                           float8_nccl_comm communicator, float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_DISTRIBUTED_H_ */
