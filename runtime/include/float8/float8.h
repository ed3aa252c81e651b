/*
 * float8: fp8 linear layers for Hopper GPUs. This is the C interface, in C99; it is the library's
 * only binary interface.
 *
 * START HERE. A linear layer computes y[M,N] = x[M,K] w[N,K]^T: M tokens, N out_features and K
 * in_features.
 *
 *     float8_context* context;
 *     if (float8_context_create(0, NULL, &context) != FLOAT8_OK) puts(float8_last_error());
 *     // Without a GPU: float8_context_options options = {.struct_size = sizeof options, .emulate = 1};
 *     // float8_context_create(0, &options, &context); memory is malloc's then, and stream NULL.
 *     float8_linear_desc desc = {.struct_size = sizeof desc, .m_max = 16384, .n = 4096, .k = 4096,
 *                                .recipe = "rowwise"};
 *     float8_linear* linear;
 *     float8_linear_plan(context, &desc, &linear);            // once; it may compile kernels
 *     // allocate float8_linear_workspace_bytes(linear) and float8_linear_saved_bytes(linear)
 *     float8_forward_args forward = {.struct_size = sizeof forward, .x = x, .w = w, .y = y,
 *                                    .saved = saved, .m = 16384};
 *     float8_linear_forward(linear, &forward, workspace, stream);
 *     float8_backward_args backward = {.struct_size = sizeof backward, .dy = dy, .saved = saved,
 *                                      .dx = dx, .dw = dw, .m = 16384};
 *     float8_linear_backward(linear, &backward, workspace, stream);
 *
 * AND THEN. For gradient accumulation, cast the weights once (float8_quantize of FLOAT8_WEIGHT, for
 * w_tensor) and set accumulate.
 * For delayed scaling, keep one scale state for all linears, synchronise it once a step and put it
 * into checkpoints. Casts of many tensors share launches (float8_quantizer_list_plan), also
 * those of shards that ranks hold. Where several linears read one x, such as Q, K and V, one list
 * casts x and the weights, for x_tensor and w_tensor of each, and another one all dy, for dy_tensor;
 * their gradients of x are added up in one dx (accumulate_dx). float8_recipe describes a recipe of your own,
 * float8_cast_counters tells what casts lose, float8_linear_info tells what a linear runs and why,
 * and float8_context_options.emulate runs everything without a GPU.
 *
 * CONVENTIONS
 *  1. Every function that can fail returns a float8_status; FLOAT8_OK is 0. float8_last_error()
 *     says in words what went wrong in the calling thread's latest failed call. Nothing throws.
 *  2. Handles are opaque. Each keeps what it needs of others alive, so they may be destroyed in any
 *     order. Destroying NULL does nothing. Do not destroy a handle while its work is on a stream.
 *  3. Every struct that a caller fills begins with struct_size, which the caller sets to sizeof.
 *     New fields go at the end and 0 is always their default, so programs built against an older
 *     header keep working. A struct_size that ends inside a field is refused.
 *  4. Device memory is the caller's: tensors, workspace, saved, copies in fp8, scale states. All of
 *     it is on the context's device and aligned to 16 bytes. Tensors are row-major; their rows are
 *     dense or a stride apart (ld_x and the like). float8 allocates none but for its kernels.
 *  5. Work is enqueued on the given stream. No function waits for it but those that save and load a
 *     scale state, and float8_comm_wait. Forward, backward, quantizers, float8_scales_sync and
 *     float8_gather_tensor do not allocate, lock or read files, and may be captured in a CUDA graph.
 *     Small tensors are cast by a cooperative launch, which starts when all of its blocks fit beside
 *     what runs on other streams.
 *  6. Handles may be used by several threads at once. A scale state belongs to one stream at a
 *     time. Calls that are in flight at the same time need workspaces of their own; linears and
 *     quantizers may share one workspace on one stream. Between calls a workspace is free for
 *     other work on the stream, except for its reserved bytes: the first
 *     float8_workspace_reserved_bytes() of it belong to float8, which counts launches there. What
 *     is in them before the first call does not matter. After it nobody else writes to them, unless
 *     to set all of them to 0 before the next call, which makes the workspace a new one. They may lie
 *     apart (launch_counts), in memory of which the same holds. An emulated device refuses a call
 *     that needs them after somebody else wrote to them.
 *  7. M may differ from call to call, up to m_max. An M of 0 is legal: nothing is read, and a
 *     weight gradient is set to zero.
 *  8. Results are the same bits from run to run on one machine.
 *  9. Memory that a call writes overlaps nothing else that the call reads or writes, else the call
 *     is refused. Columns of one buffer do not overlap. backward reads x only where its comment
 *     says so; where it does not, dx may take the place of x.
 * 10. A call that is refused (FLOAT8_INVALID_ARGUMENT) has enqueued nothing. After FLOAT8_CUDA the
 *     contents of what the call writes are undefined. Where float8_last_error() asks to restart the
 *     process, an earlier kernel, not always one of float8's, has broken the CUDA context for good.
 * 11. fork() waits up to 2 s until other threads have left their calls. Without a GPU float8 works in
 *     the child then. If one of them stays, every call of the child returns FLOAT8_ENVIRONMENT. CUDA
 *     itself works in no child.
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

/* The fields of args have default values in C++, so that float8.hpp uses the same structs. */
#ifdef __cplusplus
#define FLOAT8_DEFAULT(value) = value
#define FLOAT8_ZERO = {}
#else
#define FLOAT8_DEFAULT(value)
#define FLOAT8_ZERO
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;
struct ncclComm;
/* It is a cudaStream_t or CUstream; NULL is the legacy default stream. */
typedef struct CUstream_st* float8_stream;
/* It is an ncclComm_t. */
typedef struct ncclComm* float8_nccl_comm;

typedef enum float8_status {
  FLOAT8_OK = 0,
  FLOAT8_INVALID_ARGUMENT = 1, /* a different call may succeed */
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

/* The element types of high-precision tensors. */
typedef enum float8_dtype { FLOAT8_BF16 = 0, FLOAT8_F32 = 1, FLOAT8_F16 = 2 } float8_dtype;

typedef struct float8_context float8_context;
typedef struct float8_linear float8_linear;
typedef struct float8_scales float8_scales;
typedef struct float8_quantizer float8_quantizer;
typedef struct float8_quantizer_list float8_quantizer_list;
typedef struct float8_gemm_plan float8_gemm_plan;

/* Returns the status's name in words ("invalid argument"), never NULL. */
FLOAT8_API const char* float8_status_string(float8_status status);
/* Returns what the calling thread's latest failed call reported: one line, or "" before the first
 * failure. The text is valid until that thread's next failed call. */
FLOAT8_API const char* float8_last_error(void);
/* Returns the library's version, "0.1.0", to compare with FLOAT8_VERSION_*. */
FLOAT8_API const char* float8_version(void);

/* Begin and end what fork() takes for one call of this thread (convention 11), for a binding whose own
 * locks are held around calls. They nest. After a status that is not FLOAT8_OK nothing has begun. */
FLOAT8_API float8_status float8_calls_begin(void);
FLOAT8_API void float8_calls_end(void);

/* ---- context: a device and the kernels loaded on it ---- */

typedef struct float8_context_options {
  size_t struct_size;
  /* The directory that keeps compiled kernels; nobody else may be able to write to it. It is
   * created if it is missing. NULL means $FLOAT8_CACHE_DIR, else $XDG_CACHE_HOME/float8, else
   * ~/.cache/float8; without any of them kernels are kept in memory alone. */
  const char* cache_dir;
  /* Nonzero switches programmatic dependent launch (PDL) off: a kernel then starts only when its
   * predecessor on the stream has ended. With 0 it may start, and wait, while the predecessor ends.
   */
  int32_t serial_launch;
  /* Nonzero helps to find a mistake: every call that is given a stream, except float8_amax_sync,
   * asks the driver whether its tensors and buffers are memory of the context's device and large
   * enough, and whether its stream belongs to the device's primary CUDA context. The context also
   * remembers earlier calls by the addresses of their buffers, and refuses a backward whose m or
   * w_tensor is not that of the forward that filled `saved`, and a call without first_step on a
   * scale state that was only initialised. This costs some microseconds a call. */
  int32_t check_pointers;
  /* Nonzero replaces the GPU by a slow device in host memory, for tests of a program on a machine
   * without a GPU. Pointers to tensors are then host pointers, streams are NULL, and every call has
   * done its work when it returns; results are those of an H100 up to the order of sums. It needs
   * no driver, compiler or cache, and `device` is 0 to 7. Its communicators are float8_comms_create's,
   * whose ranks are threads; one of NCCL is refused, and NCCL is never called. It remembers earlier
   * calls as with check_pointers. It is never chosen unless asked for. */
  int32_t emulate;
  /* 0: the context begins with the built-in tuning table of this device, else with that of the
   * nearest class of device; float8_context_info says which. Nonzero: it has none until one is
   * loaded: the cost model chooses kernels, and no layer of a model has a known speedup. */
  int32_t no_table;
  /* Nonzero: the program may copy `saved` to other memory between forward and backward, as frameworks
   * do that offload activations. Then the context remembers no forward by its `saved`. */
  int32_t moves_saved;
  /* Not 0: a linear of a built-in recipe that is planned on a device where its shape was not measured
   * (its n and k, and an m within a factor of 2) is measured first, for at most so many milliseconds:
   * some 10,000 are worth while. float8-tune does it in a process of its own, which takes memory of
   * the device for a while, and the call that plans waits. The program lies in ../bin beside the
   * library, else in PATH; FLOAT8_TUNE names another. What fails is a warning in the log, and the
   * linear is planned as without. Ranks of a host take turns; give ranks of several hosts one table
   * instead (float8_context_load_table), for their kernels would differ. */
  int32_t tune_on_first_use;
  /* The user's database, which keeps what is measured; the first such linear takes what it has from
   * it. NULL means $FLOAT8_DB; FLOAT8_INVALID_ARGUMENT where that is not set and tune_on_first_use is. */
  const char* database;
} float8_context_options;

/* `device` is the CUDA ordinal; `options` may be NULL. The call returns FLOAT8_ENVIRONMENT if there
 * is no driver or it is too old, and FLOAT8_UNSUPPORTED if the device is no Hopper GPU. On failure
 * *out is NULL. */
FLOAT8_API float8_status float8_context_create(int device, const float8_context_options* options,
                                               float8_context** out);
FLOAT8_API void float8_context_destroy(float8_context* context);
/* Replaces the tuning table: linears that are planned from now on choose their kernels, and models
 * their layers, by this file. `float8-tune db export --format table` writes it, with the built-in
 * rows behind those of the database. `hash` may be NULL; else it receives 64 bits of the table's
 * hash, so that ranks can check that all of them loaded the same. A table that is damaged, or has a
 * kernel that cannot be compiled, is refused (FLOAT8_CORRUPT) by its line. On failure the table in
 * use stays. */
FLOAT8_API float8_status float8_context_load_table(float8_context* context, const char* path,
                                                   uint64_t* hash);
/* Gives the tuning table in use as the text of a table file, so that a rank can send it to ranks that
 * have no such file. `hash` may be NULL; else it receives 64 bits of the table's hash, 0 where there is
 * no table, whose text is empty. The other arguments are those of float8_linear_info (below): ask for
 * *needed first, as the text has some 100 KB. */
FLOAT8_API float8_status float8_context_table(const float8_context* context, char* text,
                                              size_t bytes, size_t* needed, uint64_t* hash);
/* Does what float8_context_load_table does with the text of a table, which ends in a NUL: by MPI, or
 * whatever a program has, all ranks get that of one rank, before they plan anything. An empty text
 * leaves the context without a table, as no_table does. */
FLOAT8_API float8_status float8_context_set_table(float8_context* context, const char* text,
                                                  uint64_t* hash);

/* Returns the reserved bytes at the front of every workspace of the context's linears and
 * quantizers (convention 6), 0 for NULL. */
FLOAT8_API size_t float8_workspace_reserved_bytes(const float8_context* context);

/* Describes the device, the options and the tuning table in use in a few lines of text for people.
 * The arguments are those of float8_linear_info (below). */
FLOAT8_API float8_status float8_context_info(const float8_context* context, char* text,
                                             size_t bytes, size_t* needed);

/* ---- recipes: how the operands of a linear's three GEMMs are cast ----
 *
 *     GEMM          a        b        sums over   gives
 *     output        x        w        K           y  [M,N]
 *     grad_input    dy       w        N           dx [M,K]
 *     grad_weight   dy       x        M           dw [N,K]
 */

typedef enum float8_scaling {
  FLOAT8_DYNAMIC = 0, /* the scale comes from the amax of the tensor at hand */
  FLOAT8_DELAYED = 1, /* it comes from the amaxes of earlier steps, in a scale state (below) */
  FLOAT8_HIGH_PRECISION = 2 /* the operand is not cast but multiplied in tensor_dtype: both operands
                               of a GEMM or neither; the rest of the setting is ignored */
} float8_scaling;

/* The elements that share one scale. */
typedef enum float8_granularity {
  FLOAT8_TENSOR = 0,       /* the whole tensor; FLOAT8_DELAYED needs this one */
  FLOAT8_AXIS = 1,         /* each row or column that the GEMM sums over: a row of x in output */
  FLOAT8_BLOCK_1X128 = 2,  /* 128 elements of such a row; the other operand has blocks too */
  FLOAT8_BLOCK_128X128 = 3 /* blocks of 128 by 128; operand b alone */
} float8_granularity;

typedef enum float8_format {
  FLOAT8_E4M3 = 0, /* its largest finite value is 448 */
  FLOAT8_E5M2 = 1  /* its largest finite value is 57344; at most one operand of a GEMM has it */
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
  /* Nonzero selects fast accumulation: sums stay in the tensor cores, which keep about 14 bits. 0
   * selects promoted fp32 accumulation: they are added up in fp32 every 128 of K. Operands with
   * blocks or in high precision do not have fast accumulation. */
  int32_t fast;
} float8_gemm_setting;

/* The caller's own settings. With all fields 0, every operand is e4m3 with one dynamic scale, and
 * accumulation is promoted. */
typedef struct float8_recipe {
  size_t struct_size;
  const char* name; /* has a-z, 0-9 and _, for messages and the tuning table; NULL: "custom" */
  float8_gemm_setting output;
  float8_gemm_setting grad_input;
  float8_gemm_setting grad_weight;
  int32_t reserved; /* 0 */
} float8_recipe;

/* Gives the settings of a named recipe, to start from: "tensorwise", "rowwise",
 * "rowwise_with_gw_hp", "delayed", "blockwise", or "bf16", in which no GEMM is fp8 (the baseline of
 * the others). The caller sets *recipe's struct_size before the call. recipe->name is valid for
 * ever. */
FLOAT8_API float8_status float8_recipe_named(const char* name, float8_recipe* recipe);

/* The effect on its scale of an amax that is not finite. */
typedef enum float8_non_finite {
  /* The scale is NaN or 0 and the results are NaN, so that a trainer's check sees them. A cast with
   * a delayed scale makes infinities NaN. The step does not count in delayed scaling: the scales
   * and histories of all operands stay as they are. */
  FLOAT8_PROPAGATE = 0,
  /* Dynamic scales saturate: the scale is 1 and infinities become the format's largest value, which
   * they do with a delayed scale too. Delayed scales freeze: the scale and the history of the
   * operand stay as they are. */
  FLOAT8_HOLD = 1
} float8_non_finite;

/* Counts what casts did to the elements of one fp8 copy of a tensor. A linear has
 * FLOAT8_LINEAR_COUNTERS of them, in the caller's device memory, aligned to 8 bytes: [0], [2] and
 * [4] are for x, w and dy as they lie, [1], [3] and [5] for their transposed copies. The counters
 * of a copy that the recipe never makes stay zero. */
typedef struct float8_cast_counters {
  float amax;          /* the largest |x| since the counters were cleared */
  float scale;         /* the latest cast's, where the tensor has one scale; else 0 */
  uint64_t elements;   /* how many were cast */
  uint64_t saturated;  /* finite ones that rounding would have taken beyond the largest value */
  uint64_t flushed;    /* finite ones, not zero, that became zero */
  uint64_t non_finite; /* infinite ones and NaN */
} float8_cast_counters;
#define FLOAT8_LINEAR_COUNTERS 6

/* ---- tensors in fp8 ---- */

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
typedef struct float8_tensor {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_tensor));
  int64_t rows FLOAT8_ZERO;
  int64_t cols FLOAT8_ZERO;
  const void* q FLOAT8_ZERO;  /* [rows][cols], rows ld_q bytes apart */
  const void* qt FLOAT8_ZERO; /* [cols][rows], rows ld_qt bytes apart */
  const float* q_inverse_scale FLOAT8_ZERO;
  const float* qt_inverse_scale FLOAT8_ZERO;
  int64_t ld_q FLOAT8_ZERO;  /* cols in whole 128s */
  int64_t ld_qt FLOAT8_ZERO; /* rows in whole 128s */
  float8_cast_setting q_setting FLOAT8_ZERO;
  float8_cast_setting qt_setting FLOAT8_ZERO;
  /* More than 1: qt lies as ranks gather it, in [qt_shards][cols][rows / qt_shards] without gaps: each
   * rank's rows, in whole 128s. ld_qt is then rows / qt_shards. The inverse scales are those of the
   * whole. See float8_linear_desc.weight_shards. 0 and 1: one piece. */
  int64_t qt_shards FLOAT8_ZERO;
  /* Not 0: the tensor is a shard of one with so many rows, and cuts its blocks of 128x128. The inverse
   * scales of these are those of the whole. float8_gather_tensor takes such a shard; GEMMs do not. */
  int64_t whole_rows FLOAT8_ZERO;
} float8_tensor;

/* An operand of a linear. With the recipe it decides which copies are made of a tensor. */
typedef enum float8_operand {
  FLOAT8_INPUT = 0,      /* x [m][k] */
  FLOAT8_WEIGHT = 1,     /* w [n][k] */
  FLOAT8_GRAD_OUTPUT = 2 /* dy [m][n] */
} float8_operand;

/* Which copies a quantizer makes, of those that the recipe has. */
typedef enum float8_copies {
  FLOAT8_BOTH_COPIES = 0,
  FLOAT8_Q_ALONE = 1, /* there is no backward */
  FLOAT8_QT_ALONE =
      2, /* what backward alone reads, of a tensor whose q is made elsewhere or not at all */
  /* q of an input, for linears with recompute. Their backward casts the input again, and needs the
   * tensor's scale for that, if it has one: it lies apart, in the place of qt. */
  FLOAT8_Q_FOR_RECOMPUTE = 3
} float8_copies;

/* What a quantizer casts. */
typedef enum float8_source {
  FLOAT8_PLAIN = 0, /* x */
  /* silu(x) * up, where x is a gate: computed in fp32, rounded once to dtype, and never in memory. The
   * recipe's scales are delayed, or those of blocks, since it is computed once. */
  FLOAT8_SWIGLU = 1
} float8_source;

typedef struct float8_quantizer_desc {
  size_t struct_size;
  int64_t rows_max;   /* the most rows that a call will have; at least 1 */
  int64_t cols;       /* a multiple of 16 */
  int32_t operand;    /* a float8_operand; a weight has rows_max rows, in whole 16s */
  int32_t dtype;      /* a float8_dtype, the tensor's type; see f32_source */
  const char* recipe; /* as in float8_linear_desc */
  const float8_recipe* custom_recipe; /* as in float8_linear_desc */
  int32_t non_finite;                 /* a float8_non_finite, for the casts */
  int32_t count;                      /* nonzero: casts add to the counters of a call */
  int32_t copies;                     /* a float8_copies */
  /* Nonzero: ranks hold the tensor by rows, and each casts its shard to the bits of the whole
   * tensor's cast, in two calls: see float8_quantize_amax. A shard has 0 to rows_max rows, also of a
   * weight. If blocks of 128 rows have a scale, all shards but the last have rows_max rows, and that
   * is a multiple of 128; see whole_rows for others. Not for delayed scaling, whose amaxes
   * float8_scales_sync reduces. Ranks may hold the tensor by columns too: see float8_quantize_amax. */
  int32_t over_ranks;
  /* With over_ranks: the rows of the whole tensor, or 0. Where it is more than rows_max, that is no
   * multiple of 128, and a copy has FLOAT8_BLOCK_128X128, a shard may begin and end inside blocks: the
   * maxima of all blocks of the whole are then among the words that span ranks, calls have a first_row,
   * and each shard's cast leaves the inverse scales of the whole. Elsewhere it changes nothing.
   * FLOAT8_UNSUPPORTED where such shards cut blocks of qt with FLOAT8_BLOCK_1X128, or where the other
   * copy has another granularity. */
  int64_t whole_rows;
  /* Nonzero: casts look at float8_quantize_args.valid. It is for a weight, without over_ranks. */
  int32_t weight_flag;
  /* Nonzero: x is in fp32 in memory, such as a master weight, and calls round each element to dtype,
   * to nearest even, as they read it: maxima, scales and copies have the bits of an x that was stored
   * in dtype before. dtype is FLOAT8_BF16 or FLOAT8_F16 then. A row stride ld_x counts fp32 elements. */
  int32_t f32_source;
  int32_t source;   /* a float8_source; FLOAT8_SWIGLU is for FLOAT8_INPUT, not in lists */
  int32_t reserved; /* 0 */
} float8_quantizer_desc;

/* Plans the casts of tensors for linears: what a linear's forward and backward do to their operands
 * themselves, to the same bits. It compiles and loads kernels, as float8_linear_plan does. On failure
 * *out is NULL. FLOAT8_UNSUPPORTED: the recipe makes no copy of the operand. */
FLOAT8_API float8_status float8_quantizer_plan(float8_context* context,
                                               const float8_quantizer_desc* desc,
                                               float8_quantizer** out);
FLOAT8_API void float8_quantizer_destroy(float8_quantizer* quantizer);
/* Returns the bytes that hold a tensor's copies and scales at any number of rows, 0 for NULL. */
FLOAT8_API size_t float8_quantizer_tensor_bytes(const float8_quantizer* quantizer);
/* Returns qt's part of them, which may lie apart: what is needed in backward alone. 0 for NULL, and
 * where qt is not made; see FLOAT8_Q_FOR_RECOMPUTE. */
FLOAT8_API size_t float8_quantizer_transposed_bytes(const float8_quantizer* quantizer);
/* Returns the bytes of scratch that a call needs, 0 for NULL (convention 6). */
FLOAT8_API size_t float8_quantizer_workspace_bytes(const float8_quantizer* quantizer);
/* With over_ranks, return how many words a call takes in float8_quantize_args.amax, the maxima that
 * span ranks, and in row_amax, the maxima of the shard's own rows. Either may be 0, and without
 * over_ranks both are. */
FLOAT8_API size_t float8_quantizer_amax_words(const float8_quantizer* quantizer);
FLOAT8_API size_t float8_quantizer_row_amax_words(const float8_quantizer* quantizer);
/* Fills *out with the view of the tensor that a call with `rows` rows leaves in `tensor` and
 * `transposed`. If `transposed` is NULL, qt follows q in `tensor`; if `tensor` is, the view has no q.
 * The caller sets out->struct_size. It enqueues nothing. */
FLOAT8_API float8_status float8_quantizer_view(const float8_quantizer* quantizer,
                                               const void* tensor, const void* transposed,
                                               int64_t rows, float8_tensor* out);

/* ---- linear ---- */

typedef struct float8_linear_desc {
  size_t struct_size;
  int64_t m_max;      /* the largest M that a call will have; at least 1 */
  int64_t n;          /* out_features, a multiple of 16 */
  int64_t k;          /* in_features, a multiple of 16 */
  const char* recipe; /* a name of float8_recipe_named's; NULL where custom_recipe is set */
  /* A float8_dtype, the type of dw: FLOAT8_F32 for a trainer that accumulates gradients in fp32. If
   * grad_weight is in high precision, it is tensor_dtype or FLOAT8_F32. */
  int32_t grad_weight_dtype;
  int32_t bias;                       /* nonzero: y = x w^T + bias */
  int32_t accumulate_grad_weight;     /* nonzero: a backward may add to the dw that is there */
  int32_t no_grad_input;              /* nonzero: a first layer; no backward will ask for dx */
  const float8_recipe* custom_recipe; /* replaces `recipe`; it is read during the call alone */
  int32_t tensor_dtype;               /* a float8_dtype, the type of x, w, bias, y, dy and dx */
  /* Nonzero: forward saves no copy. backward reads x, and w if it has no w_tensor, and casts
   * them again to the same bits. Where a dynamic scale is that of a whole tensor, forward saves it,
   * a few bytes. Delayed scales must still be those that forward had. */
  int32_t recompute;
  int32_t bias_grad;       /* nonzero: a backward may be asked for db */
  int32_t bias_grad_dtype; /* a float8_dtype, the type of db */
  int32_t non_finite; /* a float8_non_finite for dynamic scales; float8_scales_desc has its own */
  int32_t count;      /* nonzero: casts add to the counters of a call, which takes some time */
  int32_t accumulate_grad_input; /* nonzero: a backward may add to the dx that is there */
  /* The most SMs that a GEMM takes, for work that runs beside it, such as communication; 0: all.
   * Where it is set, the cost model chooses the GEMMs' kernels. */
  int32_t sm_limit;
  /* Nonzero: qt of a w_tensor may lie in shards, which grad_input reads in place. FLOAT8_UNSUPPORTED
   * where cuBLASLt is the choice for grad_input, since it reads one piece. */
  int32_t weight_shards;
  int32_t reserved; /* 0 */
} float8_linear_desc;

/* Chooses, compiles and loads the linear's kernels. That takes seconds for the first linear of a
 * kind on a machine, and milliseconds once the cache has the kernels. On failure *out is NULL. */
FLOAT8_API float8_status float8_linear_plan(float8_context* context, const float8_linear_desc* desc,
                                            float8_linear** out);
FLOAT8_API void float8_linear_destroy(float8_linear* linear);

/* Returns the bytes of scratch that a call needs at any M up to m_max, 0 for NULL. Between calls
 * they are free for other work on the stream, except for the reserved bytes (convention 6). */
FLOAT8_API size_t float8_linear_workspace_bytes(const float8_linear* linear);
/* Returns the bytes that forward fills for backward: the fp8 copies of x and w that the gradients
 * need. The result is 0 for NULL, and where backward needs none: then `saved` may be NULL in both.
 */
FLOAT8_API size_t float8_linear_saved_bytes(const float8_linear* linear);
/* Returns the same for calls with x_tensor (`x_tensor` nonzero), and with w_tensor (`w_tensor`
 * nonzero), which hold their parts. */
FLOAT8_API size_t float8_linear_saved_bytes_with_tensors(const float8_linear* linear,
                                                         int32_t x_tensor, int32_t w_tensor);

/* A linear's part of a scale state: float8_scales_slots fills it and calls read it. It is zero if
 * no operand of the linear has delayed scaling. */
typedef struct float8_scale_slots {
  void* opaque[4];
} float8_scale_slots;

/* Describes what was planned in a few lines of text: for each GEMM its operands, the kernel that
 * computes it and why that one (the tuning table's row, the cost model, ...), the launches of a
 * call at m_max, and the bytes of each buffer. The call copies up to `bytes` of the text to `text`,
 * cut short if they are too few; the copy always ends in a NUL if bytes > 0. *needed, if it is not
 * NULL, receives the bytes of the whole text with its NUL. The text is for people: its wording may
 * change. */
FLOAT8_API float8_status float8_linear_info(const float8_linear* linear, char* text, size_t bytes,
                                            size_t* needed);

/* In the args below ld_x and the like are row strides in elements: 0 if rows follow each other,
 * else at least a row and a multiple of 16 bytes. Tensors without a type are in tensor_dtype. */
typedef struct float8_forward_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_forward_args));
  const void* x FLOAT8_ZERO; /* [m][k] */
  const void* w FLOAT8_ZERO; /* [n][k]; not read if w_tensor is given and `output` is fp8 */
  void* y FLOAT8_ZERO;       /* [m][n], written */
  /* float8_linear_saved_bytes(), written; NULL: no backward, or none are needed */
  void* saved FLOAT8_ZERO;
  int64_t m FLOAT8_DEFAULT(-1); /* 0 to m_max; float8.hpp: -1 is m_max */
  int64_t ld_x FLOAT8_ZERO;
  int64_t ld_w FLOAT8_ZERO;
  int64_t ld_y FLOAT8_ZERO;
  const void* bias FLOAT8_ZERO;          /* [n], if the linear has one; else NULL */
  float8_scale_slots scales FLOAT8_ZERO; /* needed if the recipe has delayed scaling */
  int32_t first_step FLOAT8_ZERO;        /* nonzero: delayed operands are scaled as if dynamic */
  int32_t reserved FLOAT8_ZERO;          /* 0 */
  /* The sizes of workspace and saved are checked where they are given; 0: not checked. */
  size_t workspace_bytes FLOAT8_ZERO;
  size_t saved_bytes FLOAT8_ZERO;
  /* FLOAT8_LINEAR_COUNTERS of them, which the casts add to, if desc.count is set; or NULL. */
  float8_cast_counters* counters FLOAT8_ZERO;
  /* The ranks that hold the other parts of the tensors. With first_step, delayed operands are
   * scaled as if dynamic over all of them. All ranks make the same calls in the same order, since
   * each call reduces its amaxes (one small all-reduce on `stream`). NULL: there is one rank. */
  float8_nccl_comm ranks FLOAT8_ZERO;
  /* Nonzero: the call leaves the scale state as it is, with or without `saved`: no amax is
   * recorded, and with first_step delayed operands are scaled by this call's own tensors, whatever
   * `ranks` is. Set it in validation; 0 in training. */
  int32_t evaluate FLOAT8_ZERO;
  int32_t reserved_2 FLOAT8_ZERO; /* 0 */
  /* x in fp8 with m rows, as float8_quantize made it under the same recipe; it may serve several
   * linears. `x` is then read only if `output` is in high precision, and `saved` holds nothing of it.
   * NULL: x is cast here. */
  const float8_tensor* x_tensor FLOAT8_ZERO;
  /* w in fp8, as a float8_quantizer of FLOAT8_WEIGHT makes it under the same recipe, for all calls
   * until the weight changes. `saved` then holds nothing of it. NULL: w is cast here. */
  const float8_tensor* w_tensor FLOAT8_ZERO;
  /* float8_workspace_reserved_bytes() of device memory, aligned to 16 bytes, in place of the
   * workspace's own reserved bytes (convention 6), for a workspace that others use between calls, such
   * as one in a CUDA graph's pool. NULL: they are at the front of the workspace. */
  void* launch_counts FLOAT8_ZERO;
} float8_forward_args;

typedef struct float8_backward_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_backward_args));
  const void* dy FLOAT8_ZERO;    /* [m][n] */
  const void* saved FLOAT8_ZERO; /* as the forward of the same m left it */
  void* dx FLOAT8_ZERO;          /* [m][k], written; NULL: not wanted, and its work is skipped */
  void* dw FLOAT8_ZERO;          /* [n][k] in grad_weight_dtype, overwritten; NULL likewise */
  int64_t m FLOAT8_DEFAULT(-1);  /* the forward's */
  int64_t ld_dy FLOAT8_ZERO;
  int64_t ld_dx FLOAT8_ZERO;
  int64_t ld_dw FLOAT8_ZERO;
  int64_t ld_x FLOAT8_ZERO;
  int64_t ld_w FLOAT8_ZERO;
  /* the forward's; read if grad_weight is in high precision, or with recompute */
  const void* x FLOAT8_ZERO;
  /* The forward's; read if grad_input is in high precision, or with recompute and no w_tensor. */
  const void* w FLOAT8_ZERO;
  float8_scale_slots scales FLOAT8_ZERO; /* as in the forward */
  int32_t first_step FLOAT8_ZERO;        /* as in the forward */
  /* nonzero: dw += instead of dw =; see accumulate_grad_weight */
  int32_t accumulate FLOAT8_ZERO;
  size_t workspace_bytes FLOAT8_ZERO; /* as in the forward */
  size_t saved_bytes FLOAT8_ZERO;
  float8_cast_counters* counters FLOAT8_ZERO; /* as in the forward */
  /* [n] in bias_grad_dtype, written: the sum of dy over its rows, added up in fp32 in one order and
   * rounded once. NULL: not wanted. It needs desc.bias_grad. */
  void* db FLOAT8_ZERO;
  int32_t accumulate_bias FLOAT8_ZERO; /* nonzero: db += instead of db = */
  int32_t reserved FLOAT8_ZERO;        /* 0 */
  float8_nccl_comm ranks FLOAT8_ZERO;  /* as in the forward */
  /* The forward's: each is given in both or in neither. With recompute, an x_tensor without qt is cast
   * again, with the scale in front of its q_inverse_scale if the tensor has one: q may be gone. */
  const float8_tensor* x_tensor FLOAT8_ZERO;
  const float8_tensor* w_tensor FLOAT8_ZERO;
  /* nonzero: dx += instead of dx =, as linears that share x need; see accumulate_grad_input */
  int32_t accumulate_dx FLOAT8_ZERO;
  int32_t reserved_2 FLOAT8_ZERO;  /* 0 */
  void* launch_counts FLOAT8_ZERO; /* as in the forward */
  /* dy in fp8, as a float8_quantizer of FLOAT8_GRAD_OUTPUT casts it: q is read for dx, qt for dw. No
   * cast is made, and dy is read by db and by gradients in high precision alone; else it may be NULL.
   * With recompute, x and the weight are given in fp8 too. */
  const float8_tensor* dy_tensor FLOAT8_ZERO;
} float8_backward_args;

/* `workspace` is float8_linear_workspace_bytes() of device memory. */
FLOAT8_API float8_status float8_linear_forward(const float8_linear* linear,
                                               const float8_forward_args* args, void* workspace,
                                               float8_stream stream);
FLOAT8_API float8_status float8_linear_backward(const float8_linear* linear,
                                                const float8_backward_args* args, void* workspace,
                                                float8_stream stream);

/* Fills views with what a forward with `m` rows left in `saved` (x: qt alone, w: qt alone).
 * `w_tensor`: nonzero if that forward had a w_tensor; then *w has no copies. The caller sets
 * struct_size of each view; a view that is NULL is not filled. FLOAT8_INVALID_ARGUMENT: the linear
 * saves nothing. It enqueues nothing. */
FLOAT8_API float8_status float8_linear_saved_tensors(const float8_linear* linear, const void* saved,
                                                     int64_t m, int32_t w_tensor, float8_tensor* x,
                                                     float8_tensor* w);

/* ---- casts and GEMMs apart from a linear ---- */

typedef struct float8_quantize_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_quantize_args));
  const void* x FLOAT8_ZERO; /* [rows][cols], in dtype; with f32_source in fp32 */
  void* tensor
      FLOAT8_ZERO; /* float8_quantizer_tensor_bytes(), written; see float8_quantizer_view */
  /* 0 to rows_max, of a weight 0 or rows_max; 0: nothing is cast. float8.hpp: -1 is rows_max */
  int64_t rows FLOAT8_DEFAULT(-1);
  int64_t ld_x FLOAT8_ZERO;
  /* Needed if the operand has delayed scaling: those of a linear with this recipe, whose scale is
   * taken and whose amax is recorded. */
  float8_scale_slots scales FLOAT8_ZERO;
  int32_t first_step FLOAT8_ZERO; /* these are as in float8_forward_args */
  int32_t evaluate FLOAT8_ZERO;
  size_t workspace_bytes FLOAT8_ZERO;
  size_t tensor_bytes FLOAT8_ZERO;
  float8_cast_counters* counters FLOAT8_ZERO;
  float8_nccl_comm ranks FLOAT8_ZERO;
  /* float8_quantizer_transposed_bytes(), written: qt and its scales, if they are not to follow q in
   * `tensor`, which then has the other bytes of float8_quantizer_tensor_bytes(). NULL: they follow. */
  void* transposed FLOAT8_ZERO;
  /* With over_ranks: float8_quantizer_amax_words() and float8_quantizer_row_amax_words() words of
   * device memory, which float8_quantize_amax writes and float8_quantize reads. NULL: there are none. */
  uint32_t* amax FLOAT8_ZERO;
  uint32_t* row_amax FLOAT8_ZERO;
  void* launch_counts FLOAT8_ZERO; /* as in float8_forward_args; not in lists */
  /* The row of the whole tensor that a shard begins with, where the quantizer's whole_rows needs it;
   * elsewhere it is not looked at. */
  int64_t first_row FLOAT8_ZERO;
  /* A flag in device memory (the noop_flag of other libraries), which needs
   * float8_quantizer_desc.weight_flag. If it is 1, the copies are as they should be and nothing is
   * written; else the weight is cast and the flag becomes 1. So a graph of micro-batches may cast in
   * each of them: set the flag to 0 (cudaMemsetAsync) before the first cast and behind the optimizer's
   * step, or let float8_weights_compare do so. NULL: the weight is always cast. A cast that is left
   * out records no amax of delayed scaling. */
  uint32_t* valid FLOAT8_ZERO;
  /* [rows][cols] like x, with FLOAT8_SWIGLU, whose first_step is 0: a first scale is that of the product,
   * which a quantizer of FLOAT8_PLAIN finds. */
  const void* up FLOAT8_ZERO;
  int64_t ld_up FLOAT8_ZERO;
} float8_quantize_args;

/* Casts a tensor: one launch if it is small, else two. */
FLOAT8_API float8_status float8_quantize(const float8_quantizer* quantizer,
                                         const float8_quantize_args* args, void* workspace,
                                         float8_stream stream);
/* Finds the maxima of a shard, each the bits of |x| as fp32, of a quantizer over ranks:
 *
 *     float8_quantize_amax(quantizer, &args, stream);         // x, rows and first_row, amax and row_amax
 *     float8_amax_sync(args.amax, words, communicator, stream);
 *     float8_quantize(quantizer, &args, NULL, stream);
 *
 * The shards' q under each other and their qt side by side are the copies of the whole tensor, bit
 * for bit. Words of several tensors that follow each other are reduced in one float8_amax_sync. A
 * shard of 0 rows has words too, all 0. Nothing here waits for the device, and all of it may be
 * captured in a CUDA graph.
 *
 * Where ranks hold the tensor by columns, other words span ranks: row_amax, if q has FLOAT8_AXIS, and
 * the tensor's word, which is the last one of amax if a copy has FLOAT8_TENSOR. The words of columns
 * stay as they are. q lie side by side then, and qt under each other. */
FLOAT8_API float8_status float8_quantize_amax(const float8_quantizer* quantizer,
                                              const float8_quantize_args* args,
                                              float8_stream stream);

/* Plans the same casts for many tensors in few launches, to the same bits: tensors that are cast
 * alike (operand, dtype, setting) share launches, whatever their shapes. The quantizers belong to
 * `context` and are kept alive; one may be listed several times. On failure *out is NULL. */
FLOAT8_API float8_status float8_quantizer_list_plan(float8_context* context,
                                                    const float8_quantizer* const* quantizers,
                                                    size_t count, float8_quantizer_list** out);
FLOAT8_API void float8_quantizer_list_destroy(float8_quantizer_list* list);
FLOAT8_API size_t float8_quantizer_list_workspace_bytes(const float8_quantizer_list* list);
/* `args` is an array of `count` structs, one for each quantizer of the plan in order, each with
 * rows of its own; a tensor of 0 rows is left out. first_step and evaluate are the same in all of
 * them, and so are `ranks` (one all-reduce for all) and `valid` (one flag for all, which leaves none
 * out). What one tensor's cast writes overlaps nothing
 * of another's; the scale slots and the counters of two tensors are the same ones or apart. In a
 * first step over ranks two tensors of one operand need scale slots of their own. */
FLOAT8_API float8_status float8_quantize_list(const float8_quantizer_list* list,
                                              const float8_quantize_args* args, size_t count,
                                              void* workspace, float8_stream stream);
/* Finds the maxima of the shards of all quantizers over ranks, and passes over the others. Where
 * the words of `amax`, and those of `row_amax`, follow each other in the order of the list, one
 * memset clears them, and one float8_amax_sync reduces all of `amax`. */
FLOAT8_API float8_status float8_quantize_list_amax(const float8_quantizer_list* list,
                                                   const float8_quantize_args* args, size_t count,
                                                   float8_stream stream);

/* One of the three GEMMs of a linear. */
typedef enum float8_gemm_kind {
  FLOAT8_OUTPUT = 0,     /* y[m][n] = x[m][k] w[n][k]^T: reads q of x and q of w */
  FLOAT8_GRAD_INPUT = 1, /* dx[m][k] = dy[m][n] w[n][k]: reads q of dy and qt of w */
  FLOAT8_GRAD_WEIGHT = 2 /* dw[n][k] = dy[m][n]^T x[m][k]: reads qt of dy and qt of x */
} float8_gemm_kind;

typedef struct float8_gemm_desc {
  size_t struct_size;
  int64_t m_max; /* the linear's shape, as in float8_linear_desc */
  int64_t n;
  int64_t k;
  int32_t gemm;                       /* a float8_gemm_kind */
  int32_t d_dtype;                    /* a float8_dtype, the result's */
  const char* recipe;                 /* as in float8_linear_desc; the GEMM is in fp8 */
  const float8_recipe* custom_recipe; /* as in float8_linear_desc */
  int32_t bias;                       /* nonzero: a bias of d's type is added; of FLOAT8_OUTPUT */
  int32_t accumulate;                 /* nonzero: d += instead of d = */
  int32_t sm_limit;                   /* as in float8_linear_desc */
  int32_t reserved;                   /* 0 */
} float8_gemm_desc;

FLOAT8_API float8_status float8_gemm_plan_create(float8_context* context,
                                                 const float8_gemm_desc* desc,
                                                 float8_gemm_plan** out);
FLOAT8_API void float8_gemm_plan_destroy(float8_gemm_plan* plan);
FLOAT8_API size_t float8_gemm_workspace_bytes(const float8_gemm_plan* plan);

typedef struct float8_gemm_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_gemm_args));
  const float8_tensor* a FLOAT8_ZERO; /* the operand that float8_gemm_kind names first */
  const float8_tensor* b FLOAT8_ZERO;
  void* d FLOAT8_ZERO; /* written */
  int64_t ld_d FLOAT8_ZERO;
  const void* bias FLOAT8_ZERO; /* [n], if the plan has one; else NULL */
  size_t workspace_bytes FLOAT8_ZERO;
} float8_gemm_args;

/* Multiplies two tensors in fp8, whose shapes and settings must be those of the plan. */
FLOAT8_API float8_status float8_gemm(const float8_gemm_plan* plan, const float8_gemm_args* args,
                                     void* workspace, float8_stream stream);

/* Finds on the device whether weights changed since the call before, whoever wrote them: it computes
 * a fingerprint of a weight's bytes, compares it with the one that the call before left, keeps it, and
 * sets the weight's flag to 0 where they differ; elsewhere the flag stays as it is. A guarded cast that
 * follows on the stream then casts what changed and nothing else, also in a CUDA graph. A change is
 * missed with a probability of about 2^-128, and one inside 16 bytes never. It reads each byte once. */
#define FLOAT8_FINGERPRINT_BYTES 48
typedef struct float8_fingerprint_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_fingerprint_args));
  const void* w FLOAT8_ZERO; /* [n][k] of any sizes, aligned to its elements */
  int64_t n FLOAT8_ZERO;
  int64_t k FLOAT8_ZERO;
  int64_t ld_w FLOAT8_ZERO;     /* a row stride in elements, any one that holds a row; 0: dense */
  int32_t dtype FLOAT8_ZERO;    /* a float8_dtype, w's type */
  int32_t reserved FLOAT8_ZERO; /* 0 */
  /* What else the copies depend on, such as the type that w is converted to: another seed gives
   * another fingerprint. */
  uint64_t seed FLOAT8_ZERO;
  /* FLOAT8_FINGERPRINT_BYTES of device memory of this weight alone, aligned to 16 bytes: zeros before
   * the first call, and written by these calls alone. */
  void* fingerprint FLOAT8_ZERO;
  uint32_t* valid FLOAT8_ZERO; /* as in float8_quantize_args; several weights may have one */
} float8_fingerprint_args;

/* `args` is an array of `count` structs. The first call of a context loads the kernel; call it with a
 * count of 0 ahead of a capture. Streams may compare one weight side by side: the worst of it is a
 * cast too many. */
FLOAT8_API float8_status float8_weights_compare(float8_context* context,
                                                const float8_fingerprint_args* args, size_t count,
                                                float8_stream stream);

/* ---- counters: what casts lose, read without waiting for a step ---- */

/* Sets `count` counters on the device to zero. */
FLOAT8_API float8_status float8_counters_clear(float8_context* context,
                                               float8_cast_counters* counters, size_t count,
                                               float8_stream stream);
/* Copies `count` counters to host memory at `to`, in stream order: they are there once the stream
 * has come so far. If `to` is pinned memory the call waits for nothing; in a CUDA graph it must be.
 */
FLOAT8_API float8_status float8_counters_snapshot(float8_context* context,
                                                  const float8_cast_counters* counters,
                                                  size_t count, float8_cast_counters* to,
                                                  float8_stream stream);
/* Writes a linear's FLOAT8_LINEAR_COUNTERS counters, which are in host memory, as lines for people:
 * one for each copy that was cast, each beginning with `name`. The other arguments are those of
 * float8_linear_info. */
FLOAT8_API float8_status float8_counters_text(const char* name,
                                              const float8_cast_counters* counters, char* text,
                                              size_t bytes, size_t* needed);

/* ---- delayed scaling: the scale state of a model's linears ----
 *
 * An operand with delayed scaling is cast with the scale that earlier steps left, and its amax is
 * recorded for later ones. A step is: forward and backward of all linears (any number of times: the
 * largest amax counts), then float8_scales_sync, then the optimizer. The state is one buffer of the
 * caller's device memory; a float8_scales says how it is laid out, and is immutable.
 *
 *     float8_scales* scales;
 *     float8_scales_plan(context, &desc, &scales);     // desc.linears has all of the model's
 *     // allocate float8_scales_bytes(scales) as state
 *     float8_scales_init(scales, state, stream);
 *     float8_scales_slots(scales, state, 7, &args.scales);     // for the linear desc.linears[7]
 *     args.first_step = step == 0;
 *     args.ranks = communicator;       // if ranks share the work; the first step alone uses it
 *
 * An amax of 0 is not recorded. So behind the first step an operand may have no scale yet: a weight
 * that begins with zeros, the gradient that comes through it, a linear that was not called, or all
 * operands if the step was dropped. float8_scales_first_steps tells which linears have such an operand,
 * and what they compute needs first_step again; without it they are cast with a scale of 1.
 */

typedef enum float8_scale_from {
  FLOAT8_SCALE_FROM_MAX = 0,        /* the largest amax of the history */
  FLOAT8_SCALE_FROM_MOST_RECENT = 1 /* the latest amax */
} float8_scale_from;

typedef struct float8_scales_desc {
  size_t struct_size;
  /* The model's linears, of one context; those without delayed scaling have no slots. The array is
   * not kept. */
  const float8_linear* const* linears;
  size_t count;
  int32_t history;    /* amaxes kept of each operand, 1 to 1024; 0: 16 */
  int32_t scale_from; /* a float8_scale_from */
  int32_t margin;     /* scales are divided by 2^margin, 0 to 16 */
  int32_t non_finite; /* a float8_non_finite, for the histories; give the linears the same */
} float8_scales_desc;

/* On failure *out is NULL. */
FLOAT8_API float8_status float8_scales_plan(float8_context* context, const float8_scales_desc* desc,
                                            float8_scales** out);
FLOAT8_API void float8_scales_destroy(float8_scales* scales);
/* Returns the bytes of a state. The result is 0 for NULL, and where no linear has delayed scaling:
 * then `state` may be NULL and the calls below do nothing. */
FLOAT8_API size_t float8_scales_bytes(const float8_scales* scales);
/* Sets all scales to 1 and empties the histories: the calls of the first step then have first_step
 * set. The call copies from the host, so it does not belong into a graph. */
FLOAT8_API float8_status float8_scales_init(const float8_scales* scales, void* state,
                                            float8_stream stream);
/* Gives the slots of linear `index` of the desc: pointers into `state`. It launches nothing. */
FLOAT8_API float8_status float8_scales_slots(const float8_scales* scales, void* state, size_t index,
                                             float8_scale_slots* slots);
/* Ends a step: ONE all-reduce of all amaxes over the ranks of `communicator` (NULL: there is one
 * rank), then one launch that moves all histories on, computes the scales of the next step and
 * zeroes the amaxes. All ranks call it with states of one plan. It may be captured in a CUDA graph.
 */
FLOAT8_API float8_status float8_scales_sync(const float8_scales* scales, void* state,
                                            float8_nccl_comm communicator, float8_stream stream);

/* Sets first_step[i], for the linear desc.linears[i], to 1 if an operand of it has no scale yet, or
 * has seen less than others and is growing from zero, else to 0. Until the next sync the calls of such
 * linears have first_step set. `count` is that of the desc. The call copies to the host and waits for
 * `stream`, so it does not belong into a graph: a trainer makes it behind the syncs of the first steps,
 * until all are 0. */
FLOAT8_API float8_status float8_scales_first_steps(const float8_scales* scales, const void* state,
                                                   int32_t* first_step, size_t count,
                                                   float8_stream stream);

/* ---- delayed scaling: a step that meets an infinity or NaN ----
 *
 * Such a step costs itself alone, whatever the trainer does: with FLOAT8_PROPAGATE its results are
 * NaN, and float8_scales_sync leaves all scales and histories as they were. A trainer that leaves
 * the weights alone in such a step need not look at results:
 *
 *     cudaMemsetAsync(found_inf, 0, sizeof(float), stream);     // found_inf is in device memory
 *     // forward and backward of all linears
 *     float8_scales_found_inf(scales, state, communicator, found_inf, stream);
 *     // the optimizer leaves the weights alone if *found_inf is not 0
 *     float8_scales_sync_unless(scales, state, found_inf, NULL, stream);
 *
 * found_inf has the meaning that it has for PyTorch's GradScaler, whose own checks may set it too.
 * Nothing here waits for the device, and all of it may be captured in a CUDA graph. If the first
 * step is skipped, the next one is the first step (float8_scales_first_steps).
 */

/* Reduces the amaxes of the step so far over the ranks of `communicator` (NULL: there is one rank),
 * then sets *found_inf, in device memory, to 1.0f if one of them (x, w or dy) is infinite or NaN,
 * and leaves it alone otherwise. All ranks see the same. The sync of the step then needs no
 * communicator: NULL. */
FLOAT8_API float8_status float8_scales_found_inf(const float8_scales* scales, void* state,
                                                 float8_nccl_comm communicator, float* found_inf,
                                                 float8_stream stream);
/* Does what float8_scales_sync does, but if *found_inf, in device memory, is not 0 when the stream
 * comes to it, the step is discarded. A NULL found_inf counts as 0. */
FLOAT8_API float8_status float8_scales_sync_unless(const float8_scales* scales, void* state,
                                                   const float* found_inf,
                                                   float8_nccl_comm communicator,
                                                   float8_stream stream);
/* Discards the step: its amaxes become 0, and the histories, the counts of non-finite amaxes and the
 * scales stay as they were. It takes the place of float8_scales_sync in a step that is skipped.
 */
FLOAT8_API float8_status float8_scales_discard(const float8_scales* scales, void* state,
                                               float8_stream stream);

/* ---- a scale state in a checkpoint ---- */

/* The calls below keep a state between two runs of a program: a trainer puts the bytes into its
 * checkpoint. A run resumes bitwise, at any time; docs/state.md has the grammar of the bytes
 * ("float8-scales 1", counts, the state's words, a hash), which is the same on every machine. They
 * do not tell whether the next step is the first one (first_step): the trainer knows. These calls
 * copy between device and host and wait for `stream`, so they do not belong into a graph. */

/* Returns the bytes of every saved state of these scales, also without any slots; 0 for NULL. */
FLOAT8_API size_t float8_scales_saved_bytes(const float8_scales* scales);
/* Writes float8_scales_saved_bytes() to host memory at `buffer`, which has `bytes`. */
FLOAT8_API float8_status float8_scales_save(const float8_scales* scales, const void* state,
                                            void* buffer, size_t bytes, float8_stream stream);
/* Replaces the state by the `bytes` saved at `buffer`, in host memory. Scales of the same linears
 * in the same order, with the same length of history, must have saved them; margin, scale_from and
 * non_finite may differ and apply from now on. FLOAT8_CORRUPT, FLOAT8_UNSUPPORTED (another version)
 * and FLOAT8_INVALID_ARGUMENT (other linears) leave the state as it was. */
FLOAT8_API float8_status float8_scales_load(const float8_scales* scales, void* state,
                                            const void* buffer, size_t bytes, float8_stream stream);
/* These do the same with a file, which appears complete or not at all and replaces what was at
 * `path`. */
FLOAT8_API float8_status float8_scales_save_file(const float8_scales* scales, const void* state,
                                                 const char* path, float8_stream stream);
FLOAT8_API float8_status float8_scales_load_file(const float8_scales* scales, void* state,
                                                 const char* path, float8_stream stream);

/* ---- a whole model: which linears to convert, and the plans of those ----
 *
 * These tests are applied to a layer in this order, and the first one that fails keeps the layer in
 * high precision:
 *   names      no entry of filter_fqns is part of its name (case matters)
 *   sizes      n and k are multiples of 16
 *   ranks      if they share it, each has multiples of 16 too, and each rank of tensor
 *              parallelism whole blocks if the recipe has blocks
 *   callback   returns nonzero
 *   verdicts   a filter file, which `float8-tune filter --verdicts` writes, converts it
 *   rule       the automatic rule converts it, if "auto_filter_small_kn" is among filter_fqns
 *              (which is no name then); a filter file holds what the rule said, so beside one the
 *              rule is not asked again
 * A layer that passes all tests is converted. The verdicts, their words and their intervals are
 * those of `float8-tune filter` with the same table, recipe, tokens and names; the policy
 * `measured` of that command has the rule on without the flag.
 */

typedef enum float8_filter_policy {
  /* The rule compares the speedup that the tuning table implies for the recipe at this shape and
   * token count: measured, interpolated between measured shapes, or modelled beyond them. If the
   * table has too few rows to say anything, or there is none, the layer is kept. */
  FLOAT8_FILTER_MEASURED = 0,
  /* The rule is torchao's: fixed limits on n and k, which exist for tensorwise and rowwise alone.
   */
  FLOAT8_FILTER_TORCHAO = 1
} float8_filter_policy;

/* Returns zero to keep the layer in high precision. `user` is float8_model_desc.callback_user. */
typedef int32_t (*float8_filter_callback)(void* user, const char* name, int64_t n, int64_t k);

typedef struct float8_model_layer {
  size_t struct_size;
  const char* name; /* unique in the model */
  /* It has n, k and what else a plan asks for. Its m_max is 0, for the model's tokens, or the layer's
   * own M: an expert of a mixture sees fewer. Its recipe and custom_recipe must be NULL: the model
   * has them. */
  const float8_linear_desc* desc;
} float8_model_layer;

/* It need not outlive the call. */
typedef struct float8_model_desc {
  size_t struct_size;
  const float8_model_layer* layers;
  size_t count;
  int64_t tokens;     /* the M of the rule, and the largest M of a call */
  const char* recipe; /* as in float8_linear_desc */
  const float8_recipe* custom_recipe;
  const char* const* filter_fqns; /* may be NULL if there are none */
  size_t filter_fqn_count;
  float8_filter_callback callback; /* may be NULL */
  void* callback_user;
  /* A path, or NULL. The file is for this recipe and token count and has every layer that passes
   * names and sizes. */
  const char* verdicts;
  /* A layer is converted if the lower end of its measured speedup exceeds 1 + margin; 0: 0.02. */
  double margin;
  int32_t policy;          /* a float8_filter_policy */
  int32_t compile_threads; /* how many compile kernels; 0: one for each core */
  /* The ranks that share the model: speedups then have in them what these send
   * (docs/communication-model.md). 0 is 1 rank. With tp over 1 the layers are given whole, and the last part
   * of a name (wq, o_proj, ...) says how ranks share it; sizes, callback, filter file and plans are
   * of one rank's part. */
  int64_t fsdp;
  int64_t tp;
  int64_t hosts;       /* of all fsdp * tp ranks; 0: as few as have at most 8 each */
  double network_gbit; /* Gbit/s of each device's network card; 0: 400 */
} float8_model_desc;

typedef struct float8_model float8_model;

/* Decides, then compiles the kernels of all converted layers side by side, each once, and plans the
 * layers; layers that are alike share a plan. The message of a FLOAT8_INVALID_ARGUMENT names the
 * layer or the field. On failure *out is NULL. */
FLOAT8_API float8_status float8_model_plan(float8_context* context, const float8_model_desc* desc,
                                           float8_model** out);
FLOAT8_API void float8_model_destroy(float8_model* model);

/* The source of a verdict. */
typedef enum float8_evidence {
  FLOAT8_EVIDENCE_MEASURED = 0,     /* the tuning table has this shape at this token count */
  FLOAT8_EVIDENCE_INTERPOLATED = 1, /* the shape lies between measured ones */
  FLOAT8_EVIDENCE_MODELLED = 2,     /* a model fitted to the measured shapes, beyond them */
  FLOAT8_EVIDENCE_RULE = 3          /* a name, a size, the callback, torchao's rule, or nothing */
} float8_evidence;

/* The decision for a layer. Its texts and the linear belong to the model and live as long as it. */
typedef struct float8_model_verdict {
  size_t struct_size;
  const char* name;
  const char* reason; /* one line */
  /* The layer's plan, to run and not to destroy; NULL: the layer is kept in high precision. */
  const float8_linear* linear;
  /* The speedup of forward and backward, by the tuning table or the filter file; 1 if nothing is
   * known. */
  double speedup;
  double speedup_low;
  double speedup_high;
  int32_t evidence; /* a float8_evidence */
  int32_t reserved; /* 0 */
  /* What ranks send for the layer in a step, in bf16 and in fp8, and how much of it GEMMs do not
   * hide; 0 where no ranks share the model, or nothing is known. */
  double wire_bf16_us;
  double wire_fp8_us;
  double exposed_bf16_us;
  double exposed_fp8_us;
  int32_t wire_is_prediction; /* 1: the model was not measured on so many ranks, hosts */
  int32_t reserved_2;         /* 0 */
} float8_model_verdict;

/* Gives the verdict of layers[index]. The caller sets *verdict's struct_size before the call. */
FLOAT8_API float8_status float8_model_layer_verdict(const float8_model* model, size_t index,
                                                    float8_model_verdict* verdict);
/* Return the number of layers, and of those that are converted; 0 for NULL. */
FLOAT8_API size_t float8_model_layer_count(const float8_model* model);
FLOAT8_API size_t float8_model_converted_count(const float8_model* model);
/* Returns the largest workspace of its linears, which may share one on a stream; 0 for NULL. */
FLOAT8_API size_t float8_model_workspace_bytes(const float8_model* model);

/* ---- several devices ----
 *
 * Ranks hold the parts of a model or of its inputs, one device each. The calls below enqueue on a
 * stream, wait for nothing and may be captured in a CUDA graph, except where they say so. All ranks
 * of a communicator make the same calls in the same order. Which calls make a sharded layer:
 *
 *   weight, sharded by rows (FSDP)       float8_quantize_list_amax, float8_amax_sync and
 *                                        float8_quantize_list of all weights once a step;
 *                                        float8_gather_tensor of q before a forward and of qt before a
 *                                        backward, for w_tensor; float8_reduce_scatter of dw
 *   column-wise (tensor parallel)        w is sharded by rows of N, and x is gathered where the
 *                                        sequence is sharded (float8_gather_tensor, for x_tensor); dy is
 *                                        cast by columns, for float8_gemm; the ranks' dx are summed:
 *                                        float8_reduce_scatter or float8_all_reduce
 *   row-wise (tensor parallel)           w and x are sharded by columns of K, and cast so; the ranks' y
 *                                        are summed, and dy is gathered where the sequence is sharded
 *
 * docs/c-distributed.md says which results are those of one device bit for bit. */

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
  const float8_tensor* shard FLOAT8_ZERO;
  /* The whole tensor, whose memory is written: a float8_quantizer_view of a quantizer of all rows. A
   * copy that is NULL in this view is not gathered. Where its qt_shards is the number of ranks, qt stays
   * as it arrives, which takes no workspace and no copy; then the shards have equal rows in whole
   * 128s. */
  const float8_tensor* whole FLOAT8_ZERO;
  /* The rows of each shard. The last shards may have less, down to 0: rank r has the rows from
   * r * shard_rows on. Where FLOAT8_BLOCK_128X128 has a scale and it is no multiple of 128, the
   * shards' quantizers have whole_rows. Where FLOAT8_BLOCK_1X128 of qt has one it is a multiple. */
  int64_t shard_rows FLOAT8_ZERO;
  float8_nccl_comm communicator FLOAT8_ZERO;
  size_t workspace_bytes FLOAT8_ZERO; /* checked if given; 0: not checked */
} float8_gather_args;

/* Gathers a tensor in fp8 from its shards, one byte an element, with its inverse scales: q under each
 * other, qt side by side or in shards. The copies are those of the whole tensor's cast, bit for bit. q and scales
 * of shards of equal rows arrive in place; other parts take the workspace and one copy on the device. */
FLOAT8_API float8_status float8_gather_tensor(float8_context* context,
                                              const float8_gather_args* args, void* workspace,
                                              float8_stream stream);
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

#endif /* FLOAT8_FLOAT8_H_ */
