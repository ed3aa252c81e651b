/* Mixtures of experts: which row each pair of a token and one of its experts has (float8_moe_route), the
 * MLP of SwiGLU experts over those rows (float8_moe), and the sums over each token's rows
 * (float8_moe_combine). The rows are those of expert linears (experts.h), sorted by expert. A layer of
 * m = tokens x top_k rows calls, in this order:
 *   forward   float8_moe_route; float8_group_layout of its offsets; float8_moe_forward of x and index;
 *             float8_moe_combine of y and the scores
 *   backward  float8_moe_score_gradient of dout and y; float8_moe_backward of dout as dy, index and
 *             row_scores as score; float8_moe_combine of dx without scores: the gradient of x
 * The conventions of all calls are in float8.h. */
#ifndef FLOAT8_MOE_H_
#define FLOAT8_MOE_H_

#include "float8/call.h"
#include "float8/context.h"
#include "float8/experts.h"
#include "float8/moe_route.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The MLP: y = w2_e (silu(gate) * up) of each row of expert e, where gate and up are the halves of
 * w13_e x. Its results are those of two float8_experts with silu(gate) * up, and its gradients, rounded
 * once to the tensors' type between them; but neither these nor the rows of tokens are ever in memory:
 * the casts compute and gather what they read. */
typedef struct float8_moe_desc {
  size_t struct_size;
  int64_t m_max;        /* the largest m that a call will have, all experts together; 1 to 2^30 */
  int64_t dim;          /* D: the elements of a token, a multiple of 16 */
  int64_t hidden;       /* F: the rows of gate, and those of up; a multiple of 16 */
  int32_t experts;      /* 1 to FLOAT8_MAX_EXPERTS */
  int32_t tensor_dtype; /* a float8_dtype, the type of x, w13, w2, y, dy and dx */
  /* "tensorwise", "rowwise", "blockwise", "delayed", or a recipe of yours (recipe.h) of fp8 operands alone;
   * FLOAT8_UNSUPPORTED for others. */
  const char* recipe;
  const float8_recipe* custom_recipe;
  int32_t grad_weight_dtype;      /* a float8_dtype, the type of dw13 and dw2 */
  int32_t accumulate_grad_weight; /* nonzero: a backward may add to the gradients that are there */
  int32_t non_finite;             /* a float8_non_finite */
  int32_t sm_limit;               /* the most SMs that a GEMM takes; 0: all */
  /* Nonzero: `saved` has no fp8 copies of w13 and w2, and a backward is given both and casts them again. */
  int32_t recompute_weight;
  /* Nonzero: x and dy are [m][dim], the rows of experts themselves, one group after the other; tokens is m,
   * and calls have neither index nor score. */
  int32_t rows_in_place;
  /* Nonzero: w13 and dw13 are two tensors [experts][hidden][dim] each: w13 and dw13 of a call are the gates',
   * w3 and dw3 those of up. The results are those of one tensor with the rows of both, also their scales. */
  int32_t w3_apart;
  /* Nonzero: w13 (with w3), or w2, is frozen, as float8_experts_desc.no_grad_weight has it of one linear. A
   * backward of a frozen w13 reads no x, and `saved` has nothing of silu(gate) * up with a frozen w2. */
  int32_t no_grad_w13;
  int32_t no_grad_w2;
  int32_t reserved; /* 0 */
} float8_moe_desc;

/* Chooses, compiles and loads the kernels, as float8_linear_plan does. On failure *out is NULL. */
FLOAT8_API float8_status float8_moe_plan(float8_context* context, const float8_moe_desc* desc,
                                         float8_moe** out);
FLOAT8_API void float8_moe_destroy(float8_moe* moe);
/* Return the bytes of scratch that a call needs, which are free between calls and lie behind the reserved
 * bytes of a workspace that linears have too (float8.h, convention 6), and the bytes that forward
 * fills for backward, 2 F elements and F bytes a row at least, at any m up to m_max; 0 for NULL. */
FLOAT8_API size_t float8_moe_workspace_bytes(const float8_moe* moe);
FLOAT8_API size_t float8_moe_saved_bytes(const float8_moe* moe);
/* What a call computes. A backward is one call, FLOAT8_MOE_BACKWARD, or one of each part that its gradients need,
 * in this order: launches and results are the same, and the memory that a part reads last is the caller's
 * again before the next one. */
typedef enum float8_moe_call {
  FLOAT8_MOE_BACKWARD = 0,
  /* dw2, and the gradient of silu(gate) * up where its buffer is given; reads that of w2. */
  FLOAT8_MOE_GRAD_HIDDEN = 1,
  /* The fp8 copies of the gradients of gate and up, those whose buffers are given; reads gate and up, and the
   * gradient of silu(gate) * up. */
  FLOAT8_MOE_GRAD_GATE_UP = 2,
  /* dx, which reads the first of these copies, the scales of the other one where both were made, and the
   * buffer of w13. */
  FLOAT8_MOE_GRAD_INPUT = 3,
  FLOAT8_MOE_GRAD_WEIGHT = 4, /* dw13 and dw3, which read the second copy */
  FLOAT8_MOE_FORWARD = 5,     /* for a backward */
  FLOAT8_MOE_EVALUATE = 6     /* with none */
} float8_moe_call;
/* Added to a float8_moe_call: it is given w13 and w2 in fp8. */
#define FLOAT8_MOE_WEIGHTS_GIVEN 8
/* Returns the bytes of scratch of such a call, at most those above; 0 for NULL and for other numbers. */
FLOAT8_API size_t float8_moe_call_bytes(const float8_moe* moe, int32_t call);

/* What lives between calls, each in a buffer of its own: the first three in place of one `saved`. */
typedef enum float8_moe_buffer {
  FLOAT8_MOE_GATE_UP = 0,      /* [m][2 F] of tensor_dtype */
  FLOAT8_MOE_SAVED_OF_W13 = 1, /* nothing with recompute_weight */
  FLOAT8_MOE_SAVED_OF_W2 = 2,
  FLOAT8_MOE_HIDDEN_GRAD =
      3, /* [m][F] of tensor_dtype; it and those below between parts of a backward */
  FLOAT8_MOE_GATE_UP_GRAD_Q = 4,
  FLOAT8_MOE_GATE_UP_GRAD_QT = 5 /* nothing with no_grad_w13 */
} float8_moe_buffer;
typedef struct float8_moe_buffers {
  float8_buffer gate_up FLOAT8_DEFAULT({});
  float8_buffer saved_of_w13 FLOAT8_DEFAULT({});
  float8_buffer saved_of_w2 FLOAT8_DEFAULT({});
  float8_buffer hidden_grad FLOAT8_DEFAULT({});
  float8_buffer gate_up_grad_q FLOAT8_DEFAULT({});
  float8_buffer gate_up_grad_qt FLOAT8_DEFAULT({});
} float8_moe_buffers;
/* Returns the bytes of a buffer at any m up to m_max; matrices may have those of a call's m. 0 for NULL and for
 * other numbers. */
FLOAT8_API size_t float8_moe_buffer_bytes(const float8_moe* moe, int32_t buffer);

/* Returns the expert linear of w13 (0) or w2 (1), for float8_scales_desc.experts; NULL for another index and
 * for NULL. It belongs to the MLP and is good for as long, and no other call takes it. */
FLOAT8_API const float8_experts* float8_moe_linear(const float8_moe* moe, int32_t index);

/* Here and below fp8 of a matrix is NULL, but for w13 and w2, where it is as in float8_experts_forward_args
 * and float8_experts_backward_args. */
typedef struct float8_moe_forward_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_moe_forward_args));
  /* the rows of experts, that of the layout; 0 to m_max; float8.hpp: -1 is m_max */
  int64_t m FLOAT8_DEFAULT(-1);
  int64_t tokens FLOAT8_DEFAULT(-1);  /* the rows of x; float8.hpp: -1 is m with rows_in_place */
  float8_matrix x FLOAT8_DEFAULT({}); /* [tokens][dim] */
  /* int32[m] on the device: the row of x that is each row, 0 to tokens - 1; read up to the last group's
   * end. No call checks the numbers. */
  const int32_t* index FLOAT8_DEFAULT(NULL);
  float8_matrix w13
      FLOAT8_DEFAULT({}); /* [experts][2 hidden][dim], the rows of gate first; as w of experts */
  float8_matrix w2 FLOAT8_DEFAULT({}); /* [experts][dim][hidden] */
  float8_result y FLOAT8_DEFAULT({});  /* [m][dim]; accumulate is 0 */
  /* As float8_group_layout left it for this m; read. Its plan has the same m_max and experts. */
  float8_buffer layout FLOAT8_DEFAULT({});
  /* float8_moe_saved_bytes(), written; empty: there is no backward */
  float8_buffer saved FLOAT8_DEFAULT({});
  float8_buffer workspace FLOAT8_DEFAULT({}); /* float8_moe_workspace_bytes() */
  int32_t zero_tail FLOAT8_DEFAULT(0);        /* as in float8_experts_forward_args, of y */
  int32_t reserved FLOAT8_DEFAULT(0);         /* 0 */
  /* With desc.w3_apart. fp8 is NULL: that of w13 has the rows of both. */
  float8_matrix w3 FLOAT8_DEFAULT({});
  /* As in float8_experts_forward_args; a scale state has a part for each expert linear. */
  const float8_step* step FLOAT8_DEFAULT(NULL);
  float8_scale_slots w13_scales FLOAT8_DEFAULT({});
  float8_scale_slots w2_scales FLOAT8_DEFAULT({});
  float8_moe_buffers buffers FLOAT8_DEFAULT({}); /* in place of `saved` the first three, written */
} float8_moe_forward_args;

/* A gradient whose data is NULL is not wanted, and its work is skipped. */
typedef struct float8_moe_backward_args {
  size_t struct_size FLOAT8_DEFAULT(sizeof(float8_moe_backward_args));
  int64_t m FLOAT8_DEFAULT(-1); /* m, tokens, x and index are the forward's */
  int64_t tokens FLOAT8_DEFAULT(-1);
  float8_matrix x FLOAT8_DEFAULT({});
  const int32_t* index FLOAT8_DEFAULT(NULL);
  float8_matrix dy
      FLOAT8_DEFAULT({}); /* [tokens][dim]: row r of y has the gradient score[r] dy[index[r]] */
  /* [m] on the device: row_scores of float8_moe_route, or 1 for each row; not NULL with index */
  const float* score FLOAT8_DEFAULT(NULL);
  /* With desc.recompute_weight the forward's; else unread. */
  float8_matrix w13 FLOAT8_DEFAULT({});
  float8_matrix w2 FLOAT8_DEFAULT({});
  float8_result dx FLOAT8_DEFAULT({}); /* [m][dim], of each row; accumulate is 0 */
  /* As w13 and w2 in grad_weight_dtype; zeros, accumulation and gaps are as in
   * float8_experts_backward_args. */
  float8_result dw13 FLOAT8_DEFAULT({});
  float8_result dw2 FLOAT8_DEFAULT({});
  float8_buffer layout FLOAT8_DEFAULT({});    /* the forward's; read */
  float8_buffer saved FLOAT8_DEFAULT({});     /* as the forward left it; read */
  float8_buffer workspace FLOAT8_DEFAULT({}); /* as in the forward */
  int32_t zero_tail FLOAT8_DEFAULT(0);        /* of dx */
  int32_t reserved FLOAT8_DEFAULT(0);         /* 0 */
  float8_matrix w3 FLOAT8_DEFAULT({});        /* as in the forward */
  float8_result dw3 FLOAT8_DEFAULT({});       /* with desc.w3_apart, as dw13 */
  /* As in float8_experts_backward_args: the forward's, which no sync has changed since. */
  const float8_step* step FLOAT8_DEFAULT(NULL);
  float8_scale_slots w13_scales FLOAT8_DEFAULT({});
  float8_scale_slots w2_scales FLOAT8_DEFAULT({});
  /* In place of `saved` the forward's, and of a part those that it reads and leaves. A part needs no tensor
   * that it does not read, and is refused a buffer or a gradient that is not its own. */
  float8_moe_buffers buffers FLOAT8_DEFAULT({});
  int32_t part FLOAT8_DEFAULT(FLOAT8_MOE_BACKWARD); /* or one of the four parts */
  int32_t reserved_2 FLOAT8_DEFAULT(0);             /* 0 */
} float8_moe_backward_args;

/* Enqueue casts and GEMMs, as float8_experts_forward and float8_experts_backward do. */
FLOAT8_API float8_status float8_moe_forward(const float8_moe* moe,
                                            const float8_moe_forward_args* args,
                                            float8_stream stream);
FLOAT8_API float8_status float8_moe_backward(const float8_moe* moe,
                                             const float8_moe_backward_args* args,
                                             float8_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_MOE_H_ */
