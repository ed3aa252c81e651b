/*
 * float8: fp8 linear layers for Hopper GPUs. The C interface; C99, and the only binary interface.
 *
 * START HERE. A linear layer is y[M,N] = x[M,K] w[N,K]^T; M tokens, N out_features, K in_features.
 *
 *     float8_context* context;
 *     float8_context_create(0, NULL, &context);
 *     float8_linear_desc desc = {.struct_size = sizeof desc, .m_max = 16384, .n = 4096, .k = 4096,
 *                                .recipe = "rowwise"};
 *     float8_linear* linear;
 *     float8_linear_plan(context, &desc, &linear);            // may compile kernels; once
 *     // allocate float8_linear_workspace_bytes(linear) and float8_linear_saved_bytes(linear)
 *     float8_forward_args forward = {.struct_size = sizeof forward, .x = x, .w = w, .y = y,
 *                                    .saved = saved, .m = 16384};
 *     float8_linear_forward(linear, &forward, workspace, stream);
 *     float8_backward_args backward = {.struct_size = sizeof backward, .dy = dy, .saved = saved,
 *                                      .dx = dx, .dw = dw, .m = 16384};
 *     float8_linear_backward(linear, &backward, workspace, stream);
 *
 * CONVENTIONS
 * 1. Every function that can fail returns a float8_status; FLOAT8_OK is 0. float8_last_error() says
 *    in words what went wrong in the calling thread's latest failed call. Nothing throws.
 * 2. Handles are opaque. A linear keeps what it needs of its context: destroy them in any order.
 *    Destroying NULL does nothing. Do not destroy a linear while its work is on a stream.
 * 3. Every struct that a caller fills begins with struct_size, which the caller sets to sizeof. New
 *    fields go at the end and 0 is always their default, so programs built against an older header
 *    keep working.
 * 4. Device memory is the caller's: tensors, workspace, saved. All of it is dense, row-major,
 *    aligned to 16 bytes, and on the context's device. float8 allocates none but for its kernels.
 * 5. Work is enqueued on the stream given; no function synchronises. float8_linear_forward and
 *    float8_linear_backward do not allocate, lock or read files, and may be captured in a CUDA
 *    graph. Small tensors are cast by a cooperative launch, which starts when all of its blocks fit
 *    beside what runs on other streams.
 * 6. A context and a linear may be used by several threads at once. Calls that are in flight at the
 *    same time need workspaces of their own. Linears may share one workspace on one stream. What is
 *    in it before its first use does not matter; after that its first 512 KiB belong to float8,
 *    which counts launches there: nothing else may write to them while calls are still to come.
 * 7. M may differ from call to call, up to m_max. An M of 0 is legal: nothing is read, and a weight
 *    gradient is set to zero.
 * 8. Results are the same bits from run to run on one machine.
 */
#ifndef FLOAT8_FLOAT8_H_
#define FLOAT8_FLOAT8_H_

#include <stddef.h>
#include <stdint.h>

#define FLOAT8_VERSION_MAJOR 0
#define FLOAT8_VERSION_MINOR 1
#define FLOAT8_VERSION_PATCH 0

#if defined(__GNUC__)
#define FLOAT8_API __attribute__((visibility("default")))
#else
#define FLOAT8_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;
struct ncclComm;
/* A cudaStream_t or CUstream; NULL is the legacy default stream. */
typedef struct CUstream_st* float8_stream;
/* An ncclComm_t. */
typedef struct ncclComm* float8_nccl_comm;

typedef enum float8_status {
  FLOAT8_OK = 0,
  FLOAT8_INVALID_ARGUMENT = 1, /* the call; a different one may succeed */
  FLOAT8_NOT_FOUND = 2,        /* a file that should exist does not */
  FLOAT8_UNSUPPORTED = 3,      /* legal to ask, not possible on this GPU or in this version */
  FLOAT8_ENVIRONMENT = 4,      /* no GPU, no driver, a missing library, an unfit directory */
  FLOAT8_IO = 5,               /* the operating system refused a read or write */
  FLOAT8_CORRUPT = 6,          /* a file that does not say what it should */
  FLOAT8_COMPILE = 7,          /* NVRTC refused a kernel */
  FLOAT8_CUDA = 8,             /* a CUDA, cuBLASLt or NCCL call failed */
  FLOAT8_OUT_OF_MEMORY = 9,    /* of the host or the device */
  FLOAT8_INTERNAL = 10         /* a defect of float8 */
} float8_status;

/* Element types that a caller chooses between. */
typedef enum float8_dtype { FLOAT8_BF16 = 0, FLOAT8_F32 = 1 } float8_dtype;

typedef struct float8_context float8_context;
typedef struct float8_linear float8_linear;

/* The status's name in words ("invalid argument"); never NULL. */
FLOAT8_API const char* float8_status_string(float8_status status);
/* What the calling thread's latest failed call reported: one line, "" before the first. Valid until
 * that thread's next failed call. */
FLOAT8_API const char* float8_last_error(void);
/* The library's version, "0.1.0"; compare with FLOAT8_VERSION_*. */
FLOAT8_API const char* float8_version(void);

/* ---- context: a device and the kernels loaded on it ---- */

typedef struct float8_context_options {
  size_t struct_size;
  /* Where compiled kernels are kept: a directory that nobody else can write, created where it is
   * missing. NULL: $FLOAT8_CACHE_DIR, else $XDG_CACHE_HOME/float8, else ~/.cache/float8. */
  const char* cache_dir;
  /* Nonzero: a kernel starts only when its predecessor on the stream has ended. 0: it may start,
   * and wait, while the predecessor ends (programmatic dependent launch). */
  int32_t serial_launch;
} float8_context_options;

/* `device` is the CUDA ordinal; `options` may be NULL. FLOAT8_ENVIRONMENT where there is no driver
 * or one too old, FLOAT8_UNSUPPORTED where the device is no Hopper GPU. On failure *out is NULL. */
FLOAT8_API float8_status float8_context_create(int device, const float8_context_options* options,
                                               float8_context** out);
FLOAT8_API void float8_context_destroy(float8_context* context);
/* Linears planned from now on choose their kernels by this file (`float8-tune` exports it). `hash`
 * may be NULL; else it receives 64 bits of the table's hash, for ranks to check that all of them
 * loaded the same. On failure the table in use stays. */
FLOAT8_API float8_status float8_context_load_table(float8_context* context, const char* path,
                                                   uint64_t* hash);

/* ---- linear ---- */

typedef struct float8_linear_desc {
  size_t struct_size;
  int64_t m_max;      /* the largest M that a call will have; at least 1 */
  int64_t n;          /* out_features, a multiple of 16 */
  int64_t k;          /* in_features, a multiple of 16 */
  const char* recipe; /* "tensorwise", "rowwise" or "blockwise" in this version */
  /* A float8_dtype: of dw. FLOAT8_F32 for a trainer that accumulates gradients in fp32. */
  int32_t grad_weight_dtype;
} float8_linear_desc;

/* Chooses, compiles and loads the linear's kernels: seconds for the first of a kind on a machine,
 * milliseconds when the cache has them. On failure *out is NULL. */
FLOAT8_API float8_status float8_linear_plan(float8_context* context, const float8_linear_desc* desc,
                                            float8_linear** out);
FLOAT8_API void float8_linear_destroy(float8_linear* linear);

/* Bytes of scratch that a call needs at any M up to m_max: free again for other work on the stream
 * behind the call. 0 for NULL. */
FLOAT8_API size_t float8_linear_workspace_bytes(const float8_linear* linear);
/* Bytes that forward fills for backward: the fp8 copies of x and w that the gradients need. 0 for
 * NULL. */
FLOAT8_API size_t float8_linear_saved_bytes(const float8_linear* linear);

typedef struct float8_forward_args {
  size_t struct_size;
  const void* x; /* [m][k] bf16 */
  const void* w; /* [n][k] bf16 */
  void* y;       /* [m][n] bf16, written */
  void* saved;   /* float8_linear_saved_bytes(), written; NULL: there will be no backward */
  int64_t m;     /* 0 to m_max */
} float8_forward_args;

typedef struct float8_backward_args {
  size_t struct_size;
  const void* dy;    /* [m][n] bf16 */
  const void* saved; /* as the forward of the same m left it */
  void* dx;          /* [m][k] bf16, written; NULL: not wanted, and its work is skipped */
  void* dw;          /* [n][k] in grad_weight_dtype, overwritten; NULL likewise */
  int64_t m;         /* that of the forward */
} float8_backward_args;

/* `workspace` is float8_linear_workspace_bytes() of device memory. */
FLOAT8_API float8_status float8_linear_forward(const float8_linear* linear,
                                               const float8_forward_args* args, void* workspace,
                                               float8_stream stream);
FLOAT8_API float8_status float8_linear_backward(const float8_linear* linear,
                                                const float8_backward_args* args, void* workspace,
                                                float8_stream stream);

/* ---- several devices ---- */

/* Replaces `count` maxima in device memory, each the bits of |x| as fp32, by their maxima over the
 * ranks of `communicator`, in one all-reduce on `stream`; NaN wins. All ranks give the same count.
 */
FLOAT8_API float8_status float8_amax_sync(uint32_t* amax_bits, size_t count,
                                          float8_nccl_comm communicator, float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_FLOAT8_H_ */
