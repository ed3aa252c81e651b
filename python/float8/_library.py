"""libfloat8 through ctypes: what needs neither PyTorch nor a GPU."""

from __future__ import annotations

import ctypes
import functools
import pathlib
from typing import Any

_FOLDER = pathlib.Path(__file__).parent


class CastSetting(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("scaling", "granularity", "format", "pow2")]


class GemmSetting(ctypes.Structure):
    _fields_ = [("a", CastSetting), ("b", CastSetting), ("fast", ctypes.c_int32)]


class RecipeStruct(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("output", GemmSetting),
        ("grad_input", GemmSetting),
        ("grad_weight", GemmSetting),
        ("reserved", ctypes.c_int32),
    ]


class ContextOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("cache_dir", ctypes.c_char_p),
        ("serial_launch", ctypes.c_int32),
        ("check_pointers", ctypes.c_int32),
        ("emulate", ctypes.c_int32),
        ("no_table", ctypes.c_int32),
        ("moves_saved", ctypes.c_int32),
        ("tune_on_first_use", ctypes.c_int32),
        ("database", ctypes.c_char_p),
    ]


class LinearDesc(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("m_max", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("recipe", ctypes.c_char_p),
        ("grad_weight_dtype", ctypes.c_int32),
        ("bias", ctypes.c_int32),
        ("accumulate_grad_weight", ctypes.c_int32),
        ("no_grad_input", ctypes.c_int32),
        ("custom_recipe", ctypes.POINTER(RecipeStruct)),
        ("tensor_dtype", ctypes.c_int32),
        ("recompute", ctypes.c_int32),
        ("bias_grad", ctypes.c_int32),
        ("bias_grad_dtype", ctypes.c_int32),
        ("non_finite", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("accumulate_grad_input", ctypes.c_int32),
        ("sm_limit", ctypes.c_int32),
        ("weight_shards", ctypes.c_int32),
        ("no_grad_weight", ctypes.c_int32),
    ]


class ModelLayer(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("desc", ctypes.POINTER(LinearDesc)),
        ("experts", ctypes.c_int64),
        ("skew", ctypes.c_int64),
    ]


class ModelDesc(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("layers", ctypes.POINTER(ModelLayer)),
        ("count", ctypes.c_size_t),
        ("tokens", ctypes.c_int64),
        ("recipe", ctypes.c_char_p),
        ("custom_recipe", ctypes.POINTER(RecipeStruct)),
        ("filter_fqns", ctypes.POINTER(ctypes.c_char_p)),
        ("filter_fqn_count", ctypes.c_size_t),
        ("callback", ctypes.c_void_p),
        ("callback_user", ctypes.c_void_p),
        ("verdicts", ctypes.c_char_p),
        ("margin", ctypes.c_double),
        ("policy", ctypes.c_int32),
        ("compile_threads", ctypes.c_int32),
        ("fsdp", ctypes.c_int64),
        ("tp", ctypes.c_int64),
        ("hosts", ctypes.c_int64),
        ("network_gbit", ctypes.c_double),
        ("fused_mlps", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("device", ctypes.c_char_p),
    ]


class ModelVerdict(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("reason", ctypes.c_char_p),
        ("linear", ctypes.c_void_p),
        ("speedup", ctypes.c_double),
        ("speedup_low", ctypes.c_double),
        ("speedup_high", ctypes.c_double),
        ("evidence", ctypes.c_int32),
        ("convert", ctypes.c_int32),
        ("wire_bf16_us", ctypes.c_double),
        ("wire_fp8_us", ctypes.c_double),
        ("exposed_bf16_us", ctypes.c_double),
        ("exposed_fp8_us", ctypes.c_double),
        ("wire_is_prediction", ctypes.c_int32),
        ("reserved_2", ctypes.c_int32),
        ("device", ctypes.c_char_p),
        ("measured_on", ctypes.c_char_p),
    ]


class AttentionVerdict(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("recipe", ctypes.c_char_p),
        ("reason", ctypes.c_char_p),
        ("heads_q", ctypes.c_int64),
        ("heads_kv", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("sequence", ctypes.c_int64),
        ("speedup", ctypes.c_double),
        ("speedup_low", ctypes.c_double),
        ("speedup_high", ctypes.c_double),
        ("evidence", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


def sized(struct: Any, **fields: Any) -> Any:
    """Returns a struct of that type with struct_size and the fields set."""
    return struct(struct_size=ctypes.sizeof(struct), **fields)


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the wheel's libfloat8, loaded at first use."""
    paths = list(_FOLDER.glob("lib/libfloat8.so.*"))
    if len(paths) != 1:
        raise ImportError(
            f"float8: {_FOLDER} has no libfloat8; install the package (pip install .)"
        )
    loaded = ctypes.CDLL(str(paths[0]))
    loaded.float8_last_error.restype = ctypes.c_char_p
    loaded.float8_version.restype = ctypes.c_char_p
    destroyed = ("context", "model", "attention_verdicts")
    for name in (f"float8_{each}_destroy" for each in destroyed):
        getattr(loaded, name).argtypes = [ctypes.c_void_p]
        getattr(loaded, name).restype = None
    loaded.float8_context_load_table.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    loaded.float8_model_plan.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    loaded.float8_model_layer_verdict.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    loaded.float8_attention_verdicts_read.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    loaded.float8_attention_verdicts_count.argtypes = [ctypes.c_void_p]
    loaded.float8_attention_verdicts_count.restype = ctypes.c_size_t
    loaded.float8_attention_verdicts_get.argtypes = loaded.float8_model_layer_verdict.argtypes
    loaded.float8_attention_verdicts_find.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_void_p,
    ]
    loaded.float8_context_info.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ]
    loaded.float8_linear_info.argtypes = loaded.float8_context_info.argtypes
    return loaded


def info(describe: Any, handle: Any) -> str:
    """Returns the text of float8_context_info or float8_linear_info."""
    needed = ctypes.c_size_t()
    check(describe(handle, None, 0, ctypes.byref(needed)))
    text = ctypes.create_string_buffer(needed.value)
    check(describe(handle, text, needed.value, None))
    return text.value.decode()


_INVALID_ARGUMENT = 1
_NOT_FOUND = 2


def check(status: int) -> None:
    """Raises what a status that is not FLOAT8_OK says, with the words of float8_last_error()."""
    if status == 0:
        return
    message = "float8: " + library().float8_last_error().decode()
    if status == _INVALID_ARGUMENT:
        raise ValueError(message)
    if status == _NOT_FOUND:
        raise FileNotFoundError(message)
    raise RuntimeError(message)


class Context:
    """A context of the C ABI on the emulated device, which needs no GPU."""

    def __init__(self, table: str | None = None, device: int | None = None) -> None:
        handle = ctypes.c_void_p()
        options = sized(ContextOptions, emulate=device is None)
        check(
            library().float8_context_create(
                device or 0, ctypes.byref(options), ctypes.byref(handle)
            )
        )
        self.handle = handle
        if table is not None:
            check(library().float8_context_load_table(handle, str(table).encode(), None))

    def table_info(self) -> str:
        # The lines before are about the device, which is only there to be asked.
        text = info(library().float8_context_info, self.handle)
        return text[text.index("tuning table:") :]

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        library().float8_context_destroy(self.handle)
