"""The structs that Python gives to the C ABI are those of its headers."""

from __future__ import annotations

import ctypes
import pathlib
import re

import pytest

from float8 import _library

_HEADERS = pathlib.Path(__file__).parents[3] / "runtime/include/float8"
_TYPES = {
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "const char*": ctypes.c_char_p,
    "float8_cast_setting": _library.CastSetting,
    "float8_gemm_setting": _library.GemmSetting,
}
_STRUCTS = {
    "cast_setting": _library.CastSetting,
    "gemm_setting": _library.GemmSetting,
    "recipe": _library.RecipeStruct,
    "context_options": _library.ContextOptions,
    "linear_desc": _library.LinearDesc,
    "model_layer": _library.ModelLayer,
    "model_desc": _library.ModelDesc,
    "model_verdict": _library.ModelVerdict,
}


def _fields(struct: str) -> list[tuple[str, str]]:
    """Returns the types and names of the fields that the header gives a struct."""
    text = "".join(path.read_text() for path in _HEADERS.glob("*.h"))
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    body = re.search(rf"struct float8_{struct} {{(.*?)}}(?: float8_{struct})?;", text, re.DOTALL)
    assert body is not None
    fields = []
    for line in body[1].split(";")[:-1]:
        kind, name = re.sub(r" FLOAT8_DEFAULT\(.*\)$", "", line.strip()).rsplit(" ", 1)
        fields.append((kind, name))
    return fields


@pytest.mark.parametrize("struct", _STRUCTS)
def test_structs_are_the_header_s(struct: str) -> None:
    fields = _fields(struct)
    own = _STRUCTS[struct]._fields_
    assert [name for name, *_ in own] == [name for _, name in fields]
    for (name, kind, *_), (of_header, _) in zip(own, fields, strict=True):
        if of_header in _TYPES:
            assert kind is _TYPES[of_header], name
        else:  # pointers to structs, and functions
            assert ctypes.sizeof(kind) == ctypes.sizeof(ctypes.c_void_p), name
