/* A whole model: which linears to convert, and the plans of those; and which attentions.
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
 * `measured` of that command has the rule on without the flag. */
#ifndef FLOAT8_MODEL_H_
#define FLOAT8_MODEL_H_

#include "float8/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

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
  /* 0: a linear. Else the SwiGLU experts of a layer, which have one verdict and no plan: how many a rank
   * has, of k inputs and outputs and n hidden features each; m_max is then the rows of all. */
  int64_t experts;
  int64_t skew; /* how they share these rows: 0 evenly, 1 by Zipf's law, 100: one has them all */
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
  /* Nonzero: MLPs of converted linears run as one function, as float8.torch.fuse makes them. The linears of one
   * then have one verdict, where the table has MLPs. */
  int32_t fused_mlps;
  int32_t reserved; /* 0 */
  /* The device that the verdicts are for, by its name in the tuning table or a part of it in any case of letters, as
   * "H200": only its rows count. NULL: the context's device, whose rows go before those of others; an emulated one has
   * the table's first device. FLOAT8_NOT_FOUND names those that there are. Plans are of the context's device. */
  const char* device;
} float8_model_desc;

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
  /* The layer's plan, to run and not to destroy; NULL: the layer is kept in high precision, or is of
   * experts. */
  const float8_linear* linear;
  /* The speedup of forward and backward, by the tuning table or the filter file; 1 if nothing is
   * known. */
  double speedup;
  double speedup_low;
  double speedup_high;
  int32_t evidence; /* a float8_evidence */
  int32_t convert;  /* 1: the layer is converted */
  /* What ranks send for the layer in a step, in bf16 and in fp8, and how much of it GEMMs do not
   * hide; 0 where no ranks share the model, or nothing is known. */
  double wire_bf16_us;
  double wire_fp8_us;
  double exposed_bf16_us;
  double exposed_fp8_us;
  int32_t wire_is_prediction; /* 1: the model was not measured on so many ranks, hosts */
  int32_t reserved_2;         /* 0 */
  /* The device that the verdict is for, and the one whose rows the speedup is of: "" where nothing is known, or a
   * filter file has it. */
  const char* device;
  const char* measured_on;
} float8_model_verdict;

/* Gives the verdict of layers[index]. The caller sets *verdict's struct_size before the call. */
FLOAT8_API float8_status float8_model_layer_verdict(const float8_model* model, size_t index,
                                                    float8_model_verdict* verdict);
/* Return the number of layers, and of those that are converted; 0 for NULL. */
FLOAT8_API size_t float8_model_layer_count(const float8_model* model);
FLOAT8_API size_t float8_model_converted_count(const float8_model* model);
/* Returns the largest workspace of its linears, which may share one on a stream; 0 for NULL. */
FLOAT8_API size_t float8_model_workspace_bytes(const float8_model* model);

/* The verdicts of a filter file on attention, which `float8-tune filter --attention --verdicts` writes. */
typedef struct float8_attention_verdicts float8_attention_verdicts;

/* The decision for a layer's attention. Its texts live as long as the verdicts. */
typedef struct float8_attention_verdict {
  size_t struct_size;
  const char* name;   /* in the file; a part between dots that is "*" stands for any number */
  const char* recipe; /* "fp8_forward" or "fp8"; "bf16": it is kept */
  const char* reason; /* one line */
  int64_t heads_q;    /* of one rank of tensor parallelism, as heads_kv */
  int64_t heads_kv;
  int64_t head_dim;
  int64_t tokens;   /* of the step that it was decided for */
  int64_t sequence; /* tokens of each sequence of it, under a causal mask */
  double speedup;   /* of forward and backward; 1 if nothing is known */
  double speedup_low;
  double speedup_high;
  int32_t evidence; /* a float8_evidence */
  int32_t reserved; /* 0 */
} float8_attention_verdict;

/* Reads a file. FLOAT8_INVALID_ARGUMENT: it has linears alone. On failure *out is NULL. */
FLOAT8_API float8_status float8_attention_verdicts_read(const char* path,
                                                        float8_attention_verdicts** out);
FLOAT8_API void float8_attention_verdicts_destroy(float8_attention_verdicts* verdicts);
/* Returns how many there are; 0 for NULL. */
FLOAT8_API size_t float8_attention_verdicts_count(const float8_attention_verdicts* verdicts);
/* Give the verdict at a place in the file, and the one on the attention of this name or, where the file has none, of
 * the nearest module around it: that on "layers.0.attention" is found by "layers.0.attention.inner" too. The caller
 * sets *verdict's struct_size before the call. FLOAT8_INVALID_ARGUMENT: the file has no such layer. */
FLOAT8_API float8_status float8_attention_verdicts_get(const float8_attention_verdicts* verdicts,
                                                       size_t index,
                                                       float8_attention_verdict* verdict);
FLOAT8_API float8_status float8_attention_verdicts_find(const float8_attention_verdicts* verdicts,
                                                        const char* name,
                                                        float8_attention_verdict* verdict);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLOAT8_MODEL_H_ */
