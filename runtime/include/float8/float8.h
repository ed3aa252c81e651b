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
 * AND THEN. Gradient accumulation: cast the weights once (the weight cache), set accumulate.
 * Delayed scaling: a scale state for all linears, synchronised once a step, kept in checkpoints.
 * Recipes of your own: float8_recipe. What casts lose: float8_cast_counters. Why a linear runs what
 * it runs: float8_linear_info. Without a GPU: float8_context_options.emulate.
 *
 * CONVENTIONS
 * 1. Every function that can fail returns a float8_status; FLOAT8_OK is 0. float8_last_error() says
 *    in words what went wrong in the calling thread's latest failed call. Nothing throws.
 * 2. Handles are opaque. Each keeps what it needs of others alive: destroy them in any order.
 *    Destroying NULL does nothing. Do not destroy a handle while its work is on a stream.
 * 3. Every struct that a caller fills begins with struct_size, which the caller sets to sizeof. New
 *    fields go at the end and 0 is always their default, so programs built against an older header
 *    keep working.
 * 4. Device memory is the caller's: tensors, workspace, saved, weight caches, scale states. All of
 *    it is on the context's device and aligned to 16 bytes. Tensors are row-major, their rows dense
 *    or a stride apart (ld_x and the like). float8 allocates none but for its kernels.
 * 5. Work is enqueued on the stream given; no function waits for it but those that save and load a
 *    scale state. Forward, backward, casts of weights and float8_scales_sync do not allocate, lock
 * or read files, and may be captured in a CUDA graph. Small tensors are cast by a cooperative
 * launch, which starts when all of its blocks fit beside what runs on other streams.
 * 6. Handles may be used by several threads at once. A scale state belongs to one stream at a time.
 *    Calls that are in flight at the
 *    same time need workspaces of their own. Linears may share one workspace on one stream. What is
 *    in it before its first use does not matter; after that its first 2 MiB belong to float8,
 *    which counts launches there: nothing else may write to them while calls are still to come.
 * 7. M may differ from call to call, up to m_max. An M of 0 is legal: nothing is read, and a weight
 *    gradient is set to zero.
 * 8. Results are the same bits from run to run on one machine.
 * 9. What a call writes overlaps nothing else that it reads or writes, else it is refused. Columns
 *    of one buffer do not overlap. backward reads x where its comment says so; where it does not,
 * dx may take the place of x.
 * 10. A call that is refused (FLOAT8_INVALID_ARGUMENT) has enqueued nothing. After FLOAT8_CUDA what
 *    the call writes is undefined; where float8_last_error() asks to restart the process, an
 *    earlier kernel, not always one of float8's, has broken the CUDA context for good.
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
typedef enum float8_dtype { FLOAT8_BF16 = 0, FLOAT8_F32 = 1, FLOAT8_F16 = 2 } float8_dtype;

typedef struct float8_context float8_context;
typedef struct float8_linear float8_linear;
typedef struct float8_scales float8_scales;
typedef struct float8_weight_casts float8_weight_casts;

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
  /* Nonzero, while looking for a mistake: every call that is given a stream, but for
   * float8_amax_sync, asks the driver whether its tensors and buffers are memory of the context's
   * device and large enough, and whether its stream belongs to the device's primary CUDA context.
   * Costs some microseconds a call. */
  int32_t check_pointers;
  /* Nonzero: no GPU but a device in the host's memory, for tests of a program on a machine without
   * one. Pointers to tensors are then host pointers, streams are NULL, and every call has done its
   * work when it returns; results are those of an H100 up to the order of sums. It needs no driver,
   * compiler or cache, `device` is 0 to 7, and it is slow. Never chosen unless asked for. */
  int32_t emulate;
  int32_t reserved; /* 0 */
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

/* The device, the options and the tuning table in use, in a few lines of text for people; the
 * arguments are those of float8_linear_info (below). */
FLOAT8_API float8_status float8_context_info(const float8_context* context, char* text,
                                             size_t bytes, size_t* needed);

/* ---- recipes: how the operands of a linear's three GEMMs are cast ----
 *
 *     GEMM          a        b        contracts   gives
 *     output        x        w        K           y  [M,N]
 *     grad_input    dy       w        N           dx [M,K]
 *     grad_weight   dy       x        M           dw [N,K]
 */

typedef enum float8_scaling {
  FLOAT8_DYNAMIC = 0,       /* by the amax of the tensor at hand */
  FLOAT8_DELAYED = 1,       /* by that of earlier steps, from a scale state (below) */
  FLOAT8_HIGH_PRECISION = 2 /* not cast, multiplied in tensor_dtype: both operands of a GEMM or
                               neither; the rest of the setting is ignored */
} float8_scaling;

/* What shares one scale. */
typedef enum float8_granularity {
  FLOAT8_TENSOR = 0,       /* all of it; the only one for FLOAT8_DELAYED */
  FLOAT8_AXIS = 1,         /* each line along what the GEMM contracts: a row of x in output */
  FLOAT8_BLOCK_1X128 = 2,  /* 128 elements of such a line; with blocks as the other operand */
  FLOAT8_BLOCK_128X128 = 3 /* 128 by 128; operand b alone */
} float8_granularity;

typedef enum float8_format {
  FLOAT8_E4M3 = 0, /* largest finite value 448 */
  FLOAT8_E5M2 = 1  /* 57344; at most one operand of a GEMM */
} float8_format;

typedef struct float8_cast_setting {
  int32_t scaling;     /* a float8_scaling */
  int32_t granularity; /* a float8_granularity */
  int32_t format;      /* a float8_format */
  int32_t pow2;        /* nonzero: scales are rounded down to powers of two */
} float8_cast_setting;

typedef struct float8_gemm_setting {
  float8_cast_setting a;
  float8_cast_setting b;
  /* Nonzero: sums stay in the tensor cores, which keep about 14 bits; 0: they are promoted to fp32
   * every 128 of the contraction. Only without blocks and high precision. */
  int32_t fast;
} float8_gemm_setting;

/* A set of settings of the caller's. All 0 is every operand e4m3 by one dynamic scale, precise. */
typedef struct float8_recipe {
  size_t struct_size;
  const char* name; /* of a-z, 0-9 and _, for messages and the tuning table; NULL: "custom" */
  float8_gemm_setting output;
  float8_gemm_setting grad_input;
  float8_gemm_setting grad_weight;
  int32_t reserved; /* 0 */
} float8_recipe;

/* The settings of a named recipe, to start from; *recipe's struct_size is the caller's to set
 * before. "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", or "bf16", in
 * which no GEMM is fp8 (what the others are compared with). recipe->name is valid for ever. */
FLOAT8_API float8_status float8_recipe_named(const char* name, float8_recipe* recipe);

/* What an amax that is not finite does to its scale. */
typedef enum float8_non_finite {
  /* The scale is NaN or 0 and the results are NaN, so that a trainer's check sees them. In a
   * history (delayed scaling) it stays until it leaves the history. */
  FLOAT8_PROPAGATE = 0,
  /* A dynamic scale is 1 and casts saturate; a delayed one and its history stay as they are. */
  FLOAT8_HOLD = 1
} float8_non_finite;

/* What casts did to the elements of one fp8 copy of a tensor. A linear has FLOAT8_LINEAR_COUNTERS
 * of them, in device memory of the caller's, aligned to 8 bytes: those of x, w and dy as they lie
 * ([0], [2], [4]) and transposed ([1], [3], [5]). What a recipe never casts stays zero. */
typedef struct float8_cast_counters {
  float amax;          /* the largest |x| since the counters were cleared */
  float scale;         /* of the latest cast, where the tensor has one; else 0 */
  uint64_t elements;   /* that were cast */
  uint64_t saturated;  /* finite, and rounding would have gone beyond the format's largest value */
  uint64_t flushed;    /* finite and not zero, and became zero */
  uint64_t non_finite; /* infinite or NaN */
} float8_cast_counters;
#define FLOAT8_LINEAR_COUNTERS 6

/* ---- linear ---- */

typedef struct float8_linear_desc {
  size_t struct_size;
  int64_t m_max;      /* the largest M that a call will have; at least 1 */
  int64_t n;          /* out_features, a multiple of 16 */
  int64_t k;          /* in_features, a multiple of 16 */
  const char* recipe; /* a name as float8_recipe_named has them; NULL where custom_recipe is set */
  /* A float8_dtype: of dw. FLOAT8_F32 for a trainer that accumulates gradients in fp32. Where
   * grad_weight is in high precision: tensor_dtype or FLOAT8_F32. */
  int32_t grad_weight_dtype;
  int32_t bias;                       /* nonzero: y = x w^T + bias */
  int32_t accumulate_grad_weight;     /* nonzero: a backward may add to the dw that is there */
  int32_t no_grad_input;              /* nonzero: a first layer; no backward will ask for dx */
  const float8_recipe* custom_recipe; /* in place of `recipe`; read during the call alone */
  int32_t tensor_dtype;               /* a float8_dtype: of x, w, bias, y, dy and dx */
  /* Nonzero: forward saves nothing; backward reads x, and w where it has no weight cache, and casts
   * them again to the same bits. Delayed scales must still be those that forward had. */
  int32_t recompute;
  /* Nonzero: casts of the weight into a weight cache read it in fp32, an optimizer's master weight.
   * Calls with the cache need no w then, but for a GEMM in high precision. */
  int32_t f32_master_weight;
  int32_t bias_grad;       /* nonzero: a backward may be asked for db */
  int32_t bias_grad_dtype; /* a float8_dtype: of db */
  int32_t non_finite;  /* a float8_non_finite: of dynamic scales; float8_scales_desc has its own */
  int32_t count;       /* nonzero: casts add to the counters of a call; takes some time */
  int32_t weight_flag; /* nonzero: casts of the weight heed float8_weight_args.valid */
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
 * NULL, and where backward needs none: then `saved` may be NULL in both. */
FLOAT8_API size_t float8_linear_saved_bytes(const float8_linear* linear);
/* The same for calls with a weight cache, which holds the weight's part. */
FLOAT8_API size_t float8_linear_saved_bytes_with_cache(const float8_linear* linear);
/* Bytes of a weight cache: the weight's fp8 copies and scales. 0 for NULL, and where the recipe
 * never casts the weight: then calls need no cache. */
FLOAT8_API size_t float8_linear_weight_cache_bytes(const float8_linear* linear);

/* A linear's part of a scale state: float8_scales_slots fills it, calls read it. Zeroed where no
 * operand of the linear has delayed scaling. */
typedef struct float8_scale_slots {
  void* opaque[4];
} float8_scale_slots;

/* What was planned, in a few lines of text: for each GEMM its operands, the kernel that computes it
 * and why that one (the tuning table's row, the cost model, ...), the launches of a call at m_max,
 * and the bytes of each buffer. Copies up to `bytes` of it, cut short where they are too few, to
 * `text`, which always ends in a NUL where bytes > 0; *needed, where it is not NULL, receives the
 * bytes of all of it with its NUL. For people: its wording may change. */
FLOAT8_API float8_status float8_linear_info(const float8_linear* linear, char* text, size_t bytes,
                                            size_t* needed);

/* In the args below ld_x and the like are row strides in elements: 0 where rows follow each other,
 * else at least a row and a multiple of 16 bytes. Tensors without a type are in tensor_dtype. */
typedef struct float8_forward_args {
  size_t struct_size;
  const void* x; /* [m][k] */
  const void* w; /* [n][k]; not read where weight_cache is given and `output` is fp8 */
  void* y;       /* [m][n], written */
  void* saved;   /* float8_linear_saved_bytes(), written; NULL: no backward, or recompute */
  int64_t m;     /* 0 to m_max */
  int64_t ld_x;
  int64_t ld_w;
  int64_t ld_y;
  const void* bias;          /* [n], where the linear has one; else NULL */
  const void* weight_cache;  /* as a cast of the weight left it; NULL: w is cast here */
  float8_scale_slots scales; /* where the recipe has delayed scaling */
  int32_t first_step;        /* nonzero: delayed operands are scaled as if dynamic */
  int32_t reserved;          /* 0 */
  size_t workspace_bytes;    /* what there is of workspace, saved and weight_cache, for a check; */
  size_t saved_bytes;        /* 0: not checked */
  size_t weight_cache_bytes;
  float8_cast_counters* counters; /* FLOAT8_LINEAR_COUNTERS, added to, where desc.count; or NULL */
  /* With first_step: the ranks that hold the other parts of the tensors, so that delayed operands
   * are scaled as if dynamic over all of them. All ranks make the same calls in the same order, for
   * each reduces its maxima (one small all-reduce on `stream`). NULL: there is one rank. */
  float8_nccl_comm ranks;
} float8_forward_args;

typedef struct float8_backward_args {
  size_t struct_size;
  const void* dy;    /* [m][n] */
  const void* saved; /* as the forward of the same m left it */
  void* dx;          /* [m][k], written; NULL: not wanted, and its work is skipped */
  void* dw;          /* [n][k] in grad_weight_dtype, overwritten; NULL likewise */
  int64_t m;         /* that of the forward */
  int64_t ld_dy;
  int64_t ld_dx;
  int64_t ld_dw;
  int64_t ld_x;
  int64_t ld_w;
  const void* x; /* the forward's; read where grad_weight is in high precision, or recompute */
  const void* w; /* the same, of grad_input; with recompute only where there is no weight cache */
  const void* weight_cache;  /* the forward's: given in both or in neither */
  float8_scale_slots scales; /* as in the forward */
  int32_t first_step;        /* as in the forward */
  int32_t accumulate;        /* nonzero: dw += instead of dw =; see accumulate_grad_weight */
  size_t workspace_bytes;    /* as in the forward */
  size_t saved_bytes;
  size_t weight_cache_bytes;
  float8_cast_counters* counters; /* as in the forward */
  /* [n] in bias_grad_dtype, written: the sum of dy over its rows, in fp32 and in one order, rounded
   * once; NULL: not wanted. Where desc.bias_grad is set. */
  void* db;
  int32_t accumulate_bias; /* nonzero: db += instead of db = */
  int32_t reserved;        /* 0 */
  float8_nccl_comm ranks;  /* as in the forward */
} float8_backward_args;

/* `workspace` is float8_linear_workspace_bytes() of device memory. */
FLOAT8_API float8_status float8_linear_forward(const float8_linear* linear,
                                               const float8_forward_args* args, void* workspace,
                                               float8_stream stream);
FLOAT8_API float8_status float8_linear_backward(const float8_linear* linear,
                                                const float8_backward_args* args, void* workspace,
                                                float8_stream stream);

/* ---- the weight cache: a weight that stays the same for several calls is cast once ---- */

typedef struct float8_weight_args {
  size_t struct_size;
  const void* w; /* [n][k]; fp32 where the linear has f32_master_weight */
  int64_t ld_w;
  void* cache;               /* float8_linear_weight_cache_bytes(), written */
  float8_scale_slots scales; /* as in float8_forward_args */
  int32_t first_step;
  int32_t reserved;       /* 0 */
  size_t workspace_bytes; /* for a check; 0: not checked */
  size_t cache_bytes;
  float8_cast_counters* counters; /* as in float8_forward_args */
  /* A word of device memory, where desc.weight_flag is set: where it is 1 the cache is as it should
   * be and nothing is written, else the weight is cast and the word becomes 1. So a graph of
   * micro-batches may cast in each of them. NULL: always cast. A cast that is left out records no
   * amax of delayed scaling. */
  uint32_t* valid;
  float8_nccl_comm ranks; /* as in float8_forward_args */
} float8_weight_args;

/* Casts the weight for the calls until it changes. `workspace` is the linear's. */
FLOAT8_API float8_status float8_linear_cast_weight(const float8_linear* linear,
                                                   const float8_weight_args* args, void* workspace,
                                                   float8_stream stream);

/* The same for the weights of many linears in few launches, to the same bits. The linears are of
 * `context` and are kept alive. On failure *out is NULL. */
FLOAT8_API float8_status float8_weight_casts_plan(float8_context* context,
                                                  const float8_linear* const* linears, size_t count,
                                                  float8_weight_casts** out);
FLOAT8_API void float8_weight_casts_destroy(float8_weight_casts* casts);
FLOAT8_API size_t float8_weight_casts_workspace_bytes(const float8_weight_casts* casts);
/* `args` is an array of `count` structs, one for each linear of the plan in order; first_step is
 * the same in all of them, and so are `valid` (one word for all weights) and `ranks` (one
 * all-reduce for all). Linears that never cast their weight are passed over. */
FLOAT8_API float8_status float8_weight_casts_run(const float8_weight_casts* casts,
                                                 const float8_weight_args* args, size_t count,
                                                 void* workspace, float8_stream stream);

/* Sets `count` words of float8_weight_args.valid to 0: behind the optimizer's step, and before the
 * first cast. */
FLOAT8_API float8_status float8_weights_invalidate(float8_context* context, uint32_t* valid,
                                                   size_t count, float8_stream stream);

/* ---- counters: how casts fare, read without waiting for a step ---- */

/* Sets `count` counters on the device to zero. */
FLOAT8_API float8_status float8_counters_clear(float8_context* context,
                                               float8_cast_counters* counters, size_t count,
                                               float8_stream stream);
/* Copies `count` counters to host memory at `to`, in stream order: they are there once the stream
 * has come so far. Into pinned memory the call waits for nothing; in a CUDA graph it must be. */
FLOAT8_API float8_status float8_counters_snapshot(float8_context* context,
                                                  const float8_cast_counters* counters,
                                                  size_t count, float8_cast_counters* to,
                                                  float8_stream stream);
/* A linear's FLOAT8_LINEAR_COUNTERS counters, in host memory, as lines for people, one for each
 * copy that was cast, each beginning with `name`. The other arguments are those of
 * float8_linear_info. */
FLOAT8_API float8_status float8_counters_text(const char* name,
                                              const float8_cast_counters* counters, char* text,
                                              size_t bytes, size_t* needed);

/* ---- delayed scaling: the scale state of a model's linears ----
 *
 * An operand with delayed scaling is cast with the scale that earlier steps left, and its amax is
 * recorded for later ones. A step is: forward and backward of all linears (any number of times: the
 * largest amax counts), then float8_scales_sync, then the optimizer. The state is one buffer of
 * device memory of the caller's; a float8_scales says how it is laid out, and is immutable.
 *
 *     float8_scales* scales;
 *     float8_scales_plan(context, &desc, &scales);     // desc.linears: all of the model's
 *     // allocate float8_scales_bytes(scales) as state
 *     float8_scales_init(scales, state, stream);
 *     float8_scales_slots(scales, state, 7, &args.scales);     // of the linear desc.linears[7]
 *     args.first_step = step == 0;
 *     args.ranks = communicator;       // where ranks share the work; the first step alone uses it
 */

typedef enum float8_scale_from {
  FLOAT8_SCALE_FROM_MAX = 0,        /* of the history */
  FLOAT8_SCALE_FROM_MOST_RECENT = 1 /* the latest amax */
} float8_scale_from;

typedef struct float8_scales_desc {
  size_t struct_size;
  /* The model's linears, of one context; those without delayed scaling have no slots. Not kept. */
  const float8_linear* const* linears;
  size_t count;
  int32_t history;    /* amaxes kept of each operand, 1 to 1024; 0: 16 */
  int32_t scale_from; /* a float8_scale_from */
  int32_t margin;     /* scales are divided by 2^margin, 0 to 16 */
  int32_t non_finite; /* a float8_non_finite */
} float8_scales_desc;

/* On failure *out is NULL. */
FLOAT8_API float8_status float8_scales_plan(float8_context* context, const float8_scales_desc* desc,
                                            float8_scales** out);
FLOAT8_API void float8_scales_destroy(float8_scales* scales);
/* Bytes of a state. 0 for NULL, and where no linear has delayed scaling: then `state` may be NULL
 * and the calls below do nothing. */
FLOAT8_API size_t float8_scales_bytes(const float8_scales* scales);
/* Scales 1 and no history: the calls of the first step then have first_step set. Copies from the
 * host, so it does not belong into a graph. */
FLOAT8_API float8_status float8_scales_init(const float8_scales* scales, void* state,
                                            float8_stream stream);
/* The slots of linear `index` of the desc: pointers into `state`. Launches nothing. */
FLOAT8_API float8_status float8_scales_slots(const float8_scales* scales, void* state, size_t index,
                                             float8_scale_slots* slots);
/* The end of a step: ONE all-reduce of all amaxes over the ranks of `communicator` (NULL: there is
 * one rank), then one launch that moves all histories on, computes the scales of the next step and
 * zeroes the amaxes. All ranks call it with states of one plan. May be captured in a CUDA graph. */
FLOAT8_API float8_status float8_scales_sync(const float8_scales* scales, void* state,
                                            float8_nccl_comm communicator, float8_stream stream);

/* A state between two runs of a program: a trainer puts the bytes into its checkpoint. They resume
 * bitwise, at any time; docs/state.md has their grammar ("float8-scales 1", counts, the state's
 * words, a hash), which is the same on every machine. Whether the next step is the first
 * (first_step) is the trainer's to know. These calls copy between device and host and wait for
 * `stream`: they do not belong into a graph. */

/* Bytes of every saved state of these scales, also without any slots; 0 for NULL. */
FLOAT8_API size_t float8_scales_saved_bytes(const float8_scales* scales);
/* Writes float8_scales_saved_bytes() to host memory at `buffer`, of which there are `bytes`. */
FLOAT8_API float8_status float8_scales_save(const float8_scales* scales, const void* state,
                                            void* buffer, size_t bytes, float8_stream stream);
/* Replaces the state by the `bytes` saved at `buffer`, in host memory. Scales of the same linears
 * in the same order, with the same length of history, must have saved them; margin, scale_from and
 * non_finite may differ and count from now on. FLOAT8_CORRUPT, FLOAT8_UNSUPPORTED (of another
 * version) and FLOAT8_INVALID_ARGUMENT (of other linears) leave the state as it was. */
FLOAT8_API float8_status float8_scales_load(const float8_scales* scales, void* state,
                                            const void* buffer, size_t bytes, float8_stream stream);
/* The same with a file, which appears complete or not at all, replacing what was at `path`. */
FLOAT8_API float8_status float8_scales_save_file(const float8_scales* scales, const void* state,
                                                 const char* path, float8_stream stream);
FLOAT8_API float8_status float8_scales_load_file(const float8_scales* scales, void* state,
                                                 const char* path, float8_stream stream);

/* ---- a whole model: which linears to convert, and the plans of those ----
 *
 * A layer is asked, in this order, and the first refusal keeps it in high precision:
 *   names      one of filter_fqns is part of its name, case and all
 *   sizes      n and k are multiples of 16
 *   callback   returns 0
 *   verdicts   of a filter file, which `float8-tune filter --verdicts` writes
 *   rule       where "auto_filter_small_kn" is among filter_fqns (it is no name then)
 * Without the rule, what nothing refused is converted.
 */

typedef enum float8_filter_policy {
  /* The tuning table's speedup of the recipe at this shape and token count, or near it. Where the
   * table (or there is none) has no such row: as FLOAT8_FILTER_TORCHAO, but for a recipe that has
   * no such rule the layer is kept. */
  FLOAT8_FILTER_MEASURED = 0,
  /* The fixed limits of torchao on n and k; there are some for tensorwise and rowwise alone. */
  FLOAT8_FILTER_TORCHAO = 1
} float8_filter_policy;

/* Zero: keep the layer. `user` is float8_model_desc.callback_user. */
typedef int32_t (*float8_filter_callback)(void* user, const char* name, int64_t n, int64_t k);

typedef struct float8_model_layer {
  size_t struct_size;
  const char* name; /* once in a model */
  /* n, k and what else a plan asks for; its m_max, recipe and custom_recipe are the model's to say
   * and must be 0 or NULL. */
  const float8_linear_desc* desc;
} float8_model_layer;

/* Nothing of it is kept behind the call. */
typedef struct float8_model_desc {
  size_t struct_size;
  const float8_model_layer* layers;
  size_t count;
  int64_t tokens;     /* M: what the rule asks for, and the largest M of a call */
  const char* recipe; /* as float8_linear_desc has them */
  const float8_recipe* custom_recipe;
  const char* const* filter_fqns; /* may be NULL where there are none */
  size_t filter_fqn_count;
  float8_filter_callback callback; /* may be NULL */
  void* callback_user;
  /* A path, or NULL. The file is for this recipe and token count and has every layer that names and
   * sizes leave; not beside "auto_filter_small_kn". */
  const char* verdicts;
  /* Convert where the lower end of the measured speedup exceeds 1 + margin; 0: 0.02. */
  double margin;
  int32_t policy;          /* a float8_filter_policy */
  int32_t compile_threads; /* that compile kernels; 0: one for each core */
} float8_model_desc;

typedef struct float8_model float8_model;

/* Decides, then compiles the kernels of all converted layers side by side, each once, and plans
 * them; layers that are alike share a plan. FLOAT8_INVALID_ARGUMENT names the layer or the field.
 * On failure *out is NULL. */
FLOAT8_API float8_status float8_model_plan(float8_context* context, const float8_model_desc* desc,
                                           float8_model** out);
FLOAT8_API void float8_model_destroy(float8_model* model);

/* What was decided of a layer. Its texts and the linear are the model's and live as long as it. */
typedef struct float8_model_verdict {
  size_t struct_size;
  const char* name;
  const char* reason; /* one line */
  /* Its plan, to run and not to destroy; NULL: it is kept in high precision. */
  const float8_linear* linear;
  double speedup; /* of forward and backward, by the tuning table; 1 where nothing is known */
  double speedup_low;
  double speedup_high;
} float8_model_verdict;

/* Of layers[index]; *verdict's struct_size is the caller's to set before. */
FLOAT8_API float8_status float8_model_layer_verdict(const float8_model* model, size_t index,
                                                    float8_model_verdict* verdict);
/* Of layers, and of those that are converted; 0 for NULL. */
FLOAT8_API size_t float8_model_layer_count(const float8_model* model);
FLOAT8_API size_t float8_model_converted_count(const float8_model* model);
/* The largest workspace of its linears, which may share one on a stream. */
FLOAT8_API size_t float8_model_workspace_bytes(const float8_model* model);

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
