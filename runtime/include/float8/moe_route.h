/* The routing of a mixture of experts, and the sums over each token's rows: moe.h has the layer. */
#ifndef FLOAT8_MOE_ROUTE_H_
#define FLOAT8_MOE_ROUTE_H_

#include "float8/call.h"
#include "float8/context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct float8_moe_route_desc {
  size_t struct_size;
  int64_t tokens_max; /* the most tokens of a call; with top_k, 1 to 2^30 pairs */
  int32_t top_k;      /* the experts of a token, at least 1 */
  int32_t experts;    /* 1 to FLOAT8_MAX_EXPERTS */
  int32_t long_ids;   /* nonzero: topk_ids are int64, else int32 */
  int32_t reserved;   /* 0 */
} float8_moe_route_desc;

FLOAT8_API float8_status float8_moe_route_plan_create(float8_context* context,
                                                      const float8_moe_route_desc* desc,
                                                      float8_moe_route_plan** out);
FLOAT8_API void float8_moe_route_plan_destroy(float8_moe_route_plan* plan);
/* Returns the bytes of scratch that a call needs, which are free between calls; 0 for NULL. */
FLOAT8_API size_t float8_moe_route_workspace_bytes(const float8_moe_route_plan* plan);

/* All arrays are dense and on the device; M is tokens x top_k. */
typedef struct float8_moe_route_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_moe_route_args));
  /* 0 to tokens_max; 0: only offsets is written, with zeros; float8.hpp: -1 is tokens_max */
  int64_t tokens FLOAT8_DEFAULT(-1);
  /* [tokens][top_k]; an id outside [0, experts) drops its pair. */
  const void* topk_ids FLOAT8_DEFAULT(NULL);
  /* [M], written: the token of each row, of a dropped pair's too */
  int32_t* index FLOAT8_DEFAULT(NULL);
  int32_t* position FLOAT8_DEFAULT(NULL); /* [tokens][top_k], written: the row of each pair */
  /* [experts], written: the end of each expert's rows, as float8_group_layout takes them */
  int32_t* offsets FLOAT8_DEFAULT(NULL);
  const float* scores FLOAT8_DEFAULT(NULL); /* [tokens][top_k]; NULL: row_scores is not written */
  /* [M], written: the score of each row, 0 for that of a dropped pair; NULL without scores */
  float* row_scores FLOAT8_DEFAULT(NULL);
  float8_buffer workspace FLOAT8_DEFAULT({}); /* float8_moe_route_workspace_bytes() */
} float8_moe_route_args;

/* Sorts the pairs by expert, in two launches: those of one expert keep their order, and the rows of
 * dropped pairs are the last ones, from offsets[experts - 1] on. The host reads nothing: it may be
 * captured in a CUDA graph, whose replays have other ids. */
FLOAT8_API float8_status float8_moe_route(const float8_moe_route_plan* plan,
                                          const float8_moe_route_args* args, float8_stream stream);

typedef struct float8_moe_combine_desc {
  size_t struct_size;
  int64_t tokens_max; /* as in float8_moe_route_desc, as top_k and experts */
  int64_t cols;       /* of a row: a multiple of 8, unless both types are FLOAT8_F32 */
  int32_t top_k;
  int32_t experts;
  int32_t y_dtype;   /* a float8_dtype, the type of rows */
  int32_t out_dtype; /* a float8_dtype, the type of tokens */
} float8_moe_combine_desc;

FLOAT8_API float8_status float8_moe_combine_plan_create(float8_context* context,
                                                        const float8_moe_combine_desc* desc,
                                                        float8_moe_combine_plan** out);
FLOAT8_API void float8_moe_combine_plan_destroy(float8_moe_combine_plan* plan);

typedef struct float8_moe_combine_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_moe_combine_args));
  int64_t tokens FLOAT8_DEFAULT(-1);            /* 0 to tokens_max; float8.hpp: -1 is tokens_max */
  const void* y FLOAT8_DEFAULT(NULL);           /* [M][cols]; rows of dropped pairs are not read */
  const float* scores FLOAT8_DEFAULT(NULL);     /* [tokens][top_k]; NULL: all are 1 */
  const int32_t* position FLOAT8_DEFAULT(NULL); /* float8_moe_route's, as offsets */
  const int32_t* offsets FLOAT8_DEFAULT(NULL);  /* [experts] */
  void* out FLOAT8_DEFAULT(NULL);               /* [tokens][cols], written */
} float8_moe_combine_args;

/* out[t] = the sum over k, in order, of scores[t][k] y[position[t][k]], in fp32 and rounded once; a
 * dropped pair adds 0. Without scores it is the gradient of tokens from that of their rows. */
FLOAT8_API float8_status float8_moe_combine(const float8_moe_combine_plan* plan,
                                            const float8_moe_combine_args* args,
                                            float8_stream stream);

typedef struct float8_moe_score_gradient_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_moe_score_gradient_args));
  int64_t tokens FLOAT8_DEFAULT(-1);     /* as in float8_moe_combine_args, to offsets */
  const void* dout FLOAT8_DEFAULT(NULL); /* [tokens][cols] in out_dtype */
  const void* y FLOAT8_DEFAULT(NULL);
  const int32_t* position FLOAT8_DEFAULT(NULL);
  const int32_t* offsets FLOAT8_DEFAULT(NULL);
  float* dscores FLOAT8_DEFAULT(NULL); /* [tokens][top_k], written */
} float8_moe_score_gradient_args;

/* dscores[t][k] = <dout[t], y[position[t][k]]> in fp32, added up in an order that is fixed; 0 for a
 * dropped pair. It takes a plan of float8_moe_combine. */
FLOAT8_API float8_status float8_moe_score_gradient(const float8_moe_combine_plan* plan,
                                                   const float8_moe_score_gradient_args* args,
                                                   float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_MOE_ROUTE_H_ */
