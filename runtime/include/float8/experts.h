/* Expert linears: y_e = x_e w_e^T for each expert e of a mixture, where x has the rows of all experts,
 * one group after the other, and the device alone knows where each group ends. Groups are of any size,
 * also empty, and are not padded. */
#ifndef FLOAT8_EXPERTS_H_
#define FLOAT8_EXPERTS_H_

#include "float8/call.h"
#include "float8/context.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FLOAT8_MAX_EXPERTS 1024

/* The layout of a routing: what the calls of expert linears read in place of the offsets. One layout
 * serves all expert linears with as many experts and the same m_max, in forward and backward. */
typedef struct float8_group_layout_desc {
  size_t struct_size;
  int64_t m_max;    /* the largest m that a call will have; 1 to 2^30 */
  int32_t experts;  /* 1 to FLOAT8_MAX_EXPERTS */
  int32_t reserved; /* 0 */
} float8_group_layout_desc;

FLOAT8_API float8_status float8_group_layout_plan_create(float8_context* context,
                                                         const float8_group_layout_desc* desc,
                                                         float8_group_layout_plan** out);
FLOAT8_API void float8_group_layout_plan_destroy(float8_group_layout_plan* plan);
/* Returns the bytes of a layout, which follow from m_max and experts alone; 0 for NULL. */
FLOAT8_API size_t float8_group_layout_bytes(const float8_group_layout_plan* plan);

typedef struct float8_group_layout_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_group_layout_args));
  /* int32[experts] on the device, aligned to 4 bytes: the rows of expert e are offsets[e - 1] (0 for
   * the first) to offsets[e], without it. Rows from the last offset to m belong to no expert. */
  const int32_t* offsets FLOAT8_DEFAULT(NULL);
  int64_t m FLOAT8_DEFAULT(0); /* the rows of x, 0 to m_max */
  /* float8_group_layout_bytes(), written: zeros before the first call, and written by these calls
   * alone. */
  float8_buffer layout FLOAT8_DEFAULT({});
} float8_group_layout_args;

/* Makes the layout of these offsets, in one launch: call it once for each routing. Offsets that fall,
 * are negative or lie beyond m are replaced by the largest up to them, and that by m: no call leaves a
 * buffer, whatever they are. The first of them is kept in the layout. */
FLOAT8_API float8_status float8_group_layout(const float8_group_layout_plan* plan,
                                             const float8_group_layout_args* args,
                                             float8_stream stream);

typedef enum float8_group_error_code {
  FLOAT8_NO_GROUP_ERROR = 0,
  FLOAT8_NEGATIVE_END = 1, /* an offset is negative */
  FLOAT8_FALLING_END = 2,  /* an offset is below the one before */
  FLOAT8_END_BEYOND_M = 3  /* an offset is above m */
} float8_group_error_code;

typedef struct float8_group_error {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_group_error));
  int32_t code FLOAT8_DEFAULT(0);    /* a float8_group_error_code */
  int32_t expert FLOAT8_DEFAULT(-1); /* whose offset it is; -1 without an error */
} float8_group_error;

/* Waits for the stream, and fills *error with the first error of a layout since it was asked for the
 * last time; the caller sets error->struct_size. It is not for a captured stream. */
FLOAT8_API float8_status float8_group_layout_error(const float8_group_layout_plan* plan,
                                                   void* layout, float8_stream stream,
                                                   float8_group_error* error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_EXPERTS_H_ */
