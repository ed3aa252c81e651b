"""The schemas of torch.ops.float8, whose kernels python/shim/ops.cpp registers and describes; experts/ops.py has
those of experts_forward_kept and moe_forward_kept, and experts/tensor_parallel.py that of experts_cast_over_ranks.

They are here and not next to the kernels, since PyTorch's stable ABI cannot give an op tags.
"""

from __future__ import annotations

import torch

# Of any strides, as nn.Linear takes them. Inductor gives each of its calls of another op an x of
# its own, in memory, if it fuses what computes x.
_FLEXIBLE = (
    (
        "quantize(Tensor x, int config, int operand, bool backward, Tensor? scales=None, int "
        "layout=0, bool evaluate=False) -> (Tensor, Tensor)"
    ),
    (
        "quantize_again(Tensor x, Tensor x_qt, int config, Tensor? scales=None, int layout=0, Tensor? "
        "behind=None) -> Tensor"
    ),
    (
        "linear_forward(Tensor x, Tensor? x_q, Tensor? x_qt, Tensor weight, Tensor? w_q, Tensor? "
        "w_qt, Tensor? bias, Tensor? scales, int config, int layout, bool save, Tensor? "
        "w_scales=None, Tensor? w_state=None) -> (Tensor, Tensor)"
    ),
    (
        "linear_backward(Tensor dy, Tensor saved, Tensor? x, Tensor? x_qt, Tensor weight, Tensor? "
        "w_qt, Tensor? scales, int config, int layout, int wanted, Tensor? w_scales=None, int "
        "w_shards=1, Tensor? dy_q=None, Tensor? dy_qt=None) -> (Tensor, Tensor, Tensor)"
    ),
    (
        "experts_forward(Tensor x, Tensor weight, Tensor layout, int config, bool save, Tensor? "
        "scales=None, int scale_layout=0, Tensor? w_q=None, Tensor? w_scales=None, Tensor? x_amax=None, "
        "Tensor? x_row_amax=None, Tensor? w_amax=None) -> (Tensor, Tensor)"
    ),
    (
        "experts_backward(Tensor dy, Tensor saved, Tensor layout, Tensor? weight, int experts, int n, "
        "int k, int grad_dtype, int config, int wanted, Tensor? x=None, Tensor? scales=None, int "
        "scale_layout=0, Tensor? w_qt=None, Tensor? w_scales=None, Tensor? dy_amax=None, Tensor? "
        "dy_row_amax=None, Tensor? w_amax=None) -> (Tensor, Tensor)"
    ),
    (
        "moe_forward(Tensor x, Tensor? index, Tensor w13, Tensor w2, Tensor layout, int config, bool "
        "save, Tensor? w13_q=None, Tensor? w13_scales=None, Tensor? w2_q=None, Tensor? w2_scales=None, "
        "Tensor? w3=None, Tensor? w13_state=None, Tensor? w2_state=None, int scale_layout=0) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
    (
        "experts_forward_kept(Tensor x, Tensor weight, Tensor layout, int config, bool save, Tensor[] "
        "kept) -> (Tensor, Tensor)"
    ),
    (
        "moe_forward_kept(Tensor x, Tensor? index, Tensor w13, Tensor w2, Tensor layout, int config, bool "
        "save, Tensor[] kept, Tensor? w3=None) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    (
        "moe_backward(Tensor x, Tensor? dy, Tensor? index, Tensor? score, Tensor? w13, Tensor? w2, "
        "Tensor[] read, Tensor layout, int experts, int hidden, int grad_dtype, int config, int part, "
        "int wanted, Tensor? w13_qt=None, Tensor? w13_scales=None, Tensor? w2_qt=None, Tensor? "
        "w2_scales=None, Tensor? w3=None, Tensor? w13_state=None, Tensor? w2_state=None, int "
        "scale_layout=0) -> (Tensor, Tensor)"
    ),
    (
        "moe_route(Tensor ids, Tensor? scores, int experts, int config) -> (Tensor, Tensor, Tensor, "
        "Tensor)"
    ),
    "moe_combine(Tensor y, Tensor? scores, Tensor position, Tensor offsets, int config) -> Tensor",
    (
        "attention_forward(Tensor q, Tensor k, Tensor v, float scale, bool causal, int window, int config, "
        "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, SymInt "
        "max_seqlen_k=0, int recipe=0) -> (Tensor, Tensor, Tensor)"
    ),
    (
        "attention_dequantize(Tensor saved, Tensor o, int heads_kv, SymInt tokens_kv, float scale, bool "
        "causal, int window, int config, SymInt sequences=0) -> (Tensor, Tensor, Tensor)"
    ),
    (
        "attention_backward(Tensor dout, Tensor o, Tensor lse, Tensor saved, int heads_kv, SymInt "
        "tokens_kv, float scale, bool causal, int window, int config, SymInt sequences=0, int recipe=1, "
        "Tensor? q=None, Tensor? k=None, Tensor? v=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0) -> "
        "(Tensor, Tensor, Tensor)"
    ),
    (
        "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, int dtype, bool inverse, bool tokens_first, bool "
        "q_in_memory, bool k_in_memory, int config) -> (Tensor, Tensor)"
    ),
    (
        "rms_norm(Tensor x, Tensor weight, float eps, float weight_offset, int rounding, int dtype, bool with_rstd, int "
        "config) -> (Tensor, Tensor)"
    ),
    (
        "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, float weight_offset, int rounding, bool "
        "with_dx, bool with_dweight, int config) -> (Tensor, Tensor)"
    ),
    (
        "moe_score_gradient(Tensor dout, Tensor y, Tensor position, Tensor offsets, int config) "
        "-> Tensor"
    ),
)

_OTHERS = (
    (
        "quantize_activation(Tensor x, Tensor? up, int activation, int config, bool backward, Tensor? "
        "scales=None, int layout=0, bool evaluate=False) -> (Tensor, Tensor)"
    ),
    (
        "quantize_activation_again(Tensor x, Tensor? up, int activation, Tensor x_qt, int config, Tensor? "
        "scales, int layout, Tensor behind) -> Tensor"
    ),
    (
        "quantize_rms_norm(Tensor x, Tensor weight, Tensor rstd, int config, bool backward, Tensor? "
        "scales=None, int layout=0, bool evaluate=False) -> (Tensor, Tensor)"
    ),
    (
        "quantize_rms_norm_again(Tensor x, Tensor weight, Tensor rstd, Tensor x_qt, int config) -> "
        "Tensor"
    ),
    (
        "quantize_layer_norm(Tensor x, Tensor weight, Tensor? bias, Tensor mean, Tensor rstd, int "
        "config, bool backward, Tensor? scales=None, int layout=0, bool evaluate=False) -> (Tensor, "
        "Tensor)"
    ),
    (
        "quantize_layer_norm_again(Tensor x, Tensor weight, Tensor? bias, Tensor mean, Tensor rstd, "
        "Tensor x_qt, int config) -> Tensor"
    ),
    (
        "quantize_activation_backward(Tensor grad, Tensor x, int activation, int config, bool sums, "
        "Tensor? scales=None, int layout=0) -> (Tensor, Tensor, Tensor)"
    ),
    (
        "quantize_glu_backward(Tensor grad, Tensor gate, Tensor up, int activation, int config, bool sums, "
        "Tensor[] scales, int layout=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    (
        "quantize_merged_glu_backward(Tensor grad, Tensor gate_up, bool up_first, int activation, int config, "
        "bool sums, Tensor? scales=None, int layout=0) -> (Tensor, Tensor, Tensor)"
    ),
    (
        "cast_weight(Tensor weight, Tensor q, Tensor qt, Tensor state, Tensor like, int config) "
        "-> ()"
    ),
    (
        "quantize_list(Tensor[] x, int config, int operand, Tensor[] scales, int layout, int[] "
        "dtypes=[], Tensor(a!)[]? into=None) -> Tensor[]"
    ),
    "quantize_amax(Tensor x, int config, int operand, int rows_max) -> (Tensor, Tensor)",
    (
        "quantize_shard(Tensor x, Tensor amax, Tensor row_amax, int config, int operand, int "
        "rows_max) -> (Tensor, Tensor)"
    ),
    (
        "quantize_activation_amax(Tensor x, Tensor? up, Tensor? grad, int activation, int config) -> "
        "(Tensor, Tensor, Tensor)"
    ),
    (
        "quantize_activation_shard(Tensor x, Tensor? up, Tensor? grad, Tensor left, Tensor amax, Tensor "
        "row_amax, int activation, int config) -> Tensor[]"
    ),
    (
        "quantize_amax_list(Tensor[] x, int[] config, int operand, int[] rows_max, int[] "
        "whole_rows=[], int[] first_rows=[], int[] dtypes=[]) -> (Tensor, Tensor)"
    ),
    (
        "quantize_shard_list(Tensor[] x, Tensor[] amax, Tensor[] row_amax, int[] config, int operand, "
        "int[] rows_max, int[] whole_rows=[], int[] first_rows=[], int[] dtypes=[], Tensor(a!)[]? "
        "into=None, int[] copies=[]) -> Tensor[]"
    ),
    (
        "amax_words(int rows_max, int cols, int config, int operand, int whole_rows=0, int "
        "copies=0) -> (int, int)"
    ),
    (
        "copy_layout(int rows_max, int rows, int cols, int config, int operand, int copies, "
        "bool over_ranks, int whole_rows=0) -> (int, int, int, int, int)"
    ),
    (
        "adamw(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] "
        "exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, Tensor[] steps, Tensor(f!)[] amax, Tensor(g!)[] "
        "row_amax, Tensor(h!)[] states, Tensor(i!)[] copies, int[] config, int[] dtypes, int[] rows_max, "
        "Tensor[] scales, int layout, float[] options, bool maximize, "
        "Tensor? lr=None, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()"
    ),
    "reads_shards(Tensor dy, Tensor weight, int config) -> bool",
    (
        "gemm_into(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor(a!) d, Tensor? "
        "bias, int contracted, int config, int gemm, bool accumulate, int sm_limit=0) -> ()"
    ),
    "experts_layout(Tensor offs, SymInt m, int config) -> Tensor",
    "experts_bytes(int m, int experts, int n, int k, int config) -> (int, int)",
    (
        "experts_cast(Tensor w, Tensor(a!) q, Tensor(b!) qt, Tensor? amax, Tensor? row_amax, int config, "
        "int dtype, Tensor? second_w=None, Tensor? scales=None, int scale_layout=0) -> ()"
    ),
    (
        "experts_refresh(Tensor w, Tensor q, Tensor qt, Tensor state, Tensor like, int config, Tensor? "
        "second_w=None) -> ()"
    ),
    "experts_amax(Tensor w, int config, int dtype, Tensor? second_w=None) -> (Tensor, Tensor)",
    (
        "experts_cast_over_ranks(Tensor w, Tensor amax, Tensor row_amax, int config, int dtype) -> (Tensor, "
        "Tensor)"
    ),
    (
        "experts_copies(int experts, int n, int k, int config, bool over_ranks) -> (int, int, int, int, "
        "bool, int, int)"
    ),
    (
        "moe_bytes(int m, int experts, int hidden, int dim, int dtype, int config) -> (int, int, "
        "int, int)"
    ),
    "routing_errors() -> int[]",
    "sequence_errors() -> int[]",
    "cudnn_version() -> int",
    "saved_bytes(int m, int n, int k, int config, bool x_given, bool w_given) -> int",
    (
        "quantized_bytes(int rows, int cols, int config, int operand, bool backward, int "
        "whole_rows=0, bool of_activation=False) -> (int, int)"
    ),
    "prepare(Tensor x, Tensor weight, int[] n, int[] k, int m, int config, bool apart) -> ()",
    "capture_id(Tensor x) -> int",
    "context(int device) -> int",
    "plans(int device) -> int[]",
    "scales_bytes(int config, int layout) -> int",
    "scales_init(Tensor(a!) state, int config, int layout) -> ()",
    "scales_set_first(Tensor(a!) state, int config, int layout, int[] linears) -> ()",
    "scales_find_first(Tensor state, int config, int layout) -> int[]",
    "tune_on_first_use(int milliseconds, str database) -> ()",
    ("scales_sync(Tensor(a!) state, int config, int layout, Tensor? found_inf=None) -> ()"),
)

LIBRARY = torch.library.Library("float8", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)
for _schema in _FLEXIBLE:
    LIBRARY.define(_schema, tags=_TAGS)  # type: ignore[no-untyped-call]
for _schema in _OTHERS:
    LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
