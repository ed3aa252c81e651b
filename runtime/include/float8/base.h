/* What every header of float8 needs: the version, statuses and errors, element types, and the
 * names of handles. */
#ifndef FLOAT8_BASE_H_
#define FLOAT8_BASE_H_

#include <stddef.h>
#include <stdint.h>

#define FLOAT8_VERSION_MAJOR 0
#define FLOAT8_VERSION_MINOR 2
#define FLOAT8_VERSION_PATCH 0

#if defined(__GNUC__)
#define FLOAT8_API __attribute__((visibility("default")))
#else
#define FLOAT8_API
#endif

/* The default value of a field in C++, where the same structs serve: GCC's -Wextra warns of a
 * designated initialiser that leaves out a field without one, and an m that is left out is not 0. */
#ifdef __cplusplus
#define FLOAT8_DEFAULT(value) = value
#else
#define FLOAT8_DEFAULT(value)
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
typedef struct float8_group_layout_plan float8_group_layout_plan;
typedef struct float8_experts float8_experts;
typedef struct float8_expert_quantizer float8_expert_quantizer;
typedef struct float8_moe float8_moe;
typedef struct float8_moe_route_plan float8_moe_route_plan;
typedef struct float8_moe_combine_plan float8_moe_combine_plan;
typedef struct float8_attention float8_attention;
typedef struct float8_model float8_model;

typedef struct float8_recipe float8_recipe;
typedef struct float8_tensor float8_tensor;
typedef struct float8_cast_counters float8_cast_counters;

/* Returns the status's name in words ("invalid argument"), never NULL. */
FLOAT8_API const char* float8_status_string(float8_status status);
/* Returns what the calling thread's latest failed call reported: one line, or "" before the first
 * failure. The text is valid until that thread's next failed call. */
FLOAT8_API const char* float8_last_error(void);
/* Returns the library's version, "0.2.0", to compare with FLOAT8_VERSION_*. */
FLOAT8_API const char* float8_version(void);

/* Begin and end what fork() takes for one call of this thread (convention 11), for a binding whose own
 * locks are held around calls. They nest. After a status that is not FLOAT8_OK nothing has begun. */
FLOAT8_API float8_status float8_calls_begin(void);
FLOAT8_API void float8_calls_end(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_BASE_H_ */
