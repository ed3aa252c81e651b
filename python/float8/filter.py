"""Which linears gain from fp8: the verdicts of `float8-tune filter`, from the same tuning table."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Iterable, Sequence

from float8 import _library
from float8.recipes import Recipe, recipe_struct

_EVIDENCE = ("measured", "interpolated", "modelled", "rule")
_POLICIES = {"measured": 0, "torchao": 1}
AUTO_FILTER = "auto_filter_small_kn"


@dataclasses.dataclass(frozen=True)
class Layer:
    """A linear of a model: its name, in_features (k) and out_features (n)."""

    name: str
    k: int
    n: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a layer is converted, why, and the speedup of forward and backward with its interval."""

    layer: Layer
    convert: bool
    reason: str
    evidence: str
    speedup: float
    speedup_low: float
    speedup_high: float


def filter_layers(
    layers: Iterable[Layer],
    recipe: str | Recipe,
    tokens: int,
    *,
    names: Sequence[str] = (),
    policy: str = "measured",
    margin: float = 0.02,
    table: str | os.PathLike[str] | None = None,
    verdicts: str | os.PathLike[str] | None = None,
    device: int | None = None,
) -> list[Verdict]:
    """Decides for each layer whether fp8 pays.

    layers: unique names.
    tokens: the rows of x in a call.
    names: parts of names that keep a layer in high precision. "auto_filter_small_kn" among them
        switches the policy's rule on, as for torchao; the policy "measured" has it on anyway.
    policy: "measured" compares speedups of the tuning table with 1 + margin; "torchao" has
        torchao's fixed limits.
    table: a table's file; None: the built-in one.
    verdicts: a filter file of `float8-tune filter --verdicts`.
    device: the CUDA device whose table answers; None needs no GPU and takes the H100's.

    Raises ValueError that names the layer or the field.
    """
    if policy not in _POLICIES:
        raise ValueError(f"float8: policy is {policy!r}; it is one of {', '.join(_POLICIES)}")
    wanted = list(layers)
    fqns = list_of(names)
    if policy == "measured" and verdicts is None and AUTO_FILTER not in fqns:
        fqns.append(AUTO_FILTER)
    custom, recipe_name = _recipe_fields(recipe)
    descs = [_library.sized(_library.LinearDesc, n=layer.n, k=layer.k) for layer in wanted]
    items = (_library.ModelLayer * len(wanted))(
        *(
            _library.sized(_library.ModelLayer, name=layer.name.encode(), desc=ctypes.pointer(desc))
            for layer, desc in zip(wanted, descs, strict=True)
        )
    )
    model_desc = _library.sized(
        _library.ModelDesc,
        layers=items,
        count=len(wanted),
        tokens=tokens,
        recipe=recipe_name,
        custom_recipe=ctypes.pointer(custom) if custom is not None else None,
        filter_fqns=(ctypes.c_char_p * len(fqns))(*(name.encode() for name in fqns)),
        filter_fqn_count=len(fqns),
        verdicts=os.fspath(verdicts).encode() if verdicts is not None else None,
        margin=margin,
        policy=_POLICIES[policy],
    )
    loaded = _library.library()
    with _library.Context(os.fspath(table) if table is not None else None, device) as context:
        model = ctypes.c_void_p()
        _library.check(
            loaded.float8_model_plan(context.handle, ctypes.byref(model_desc), ctypes.byref(model))
        )
        try:
            return [_verdict(model, i, layer) for i, layer in enumerate(wanted)]
        finally:
            loaded.float8_model_destroy(model)


def _verdict(model: ctypes.c_void_p, index: int, layer: Layer) -> Verdict:
    found = _library.sized(_library.ModelVerdict)
    _library.check(_library.library().float8_model_layer_verdict(model, index, ctypes.byref(found)))
    return Verdict(
        layer=layer,
        convert=bool(found.linear),
        reason=found.reason.decode(),
        evidence=_EVIDENCE[found.evidence],
        speedup=found.speedup,
        speedup_low=found.speedup_low,
        speedup_high=found.speedup_high,
    )


def list_of(names: Sequence[str]) -> list[str]:
    """Returns the names; a text alone, whose letters would be names, is refused (TypeError)."""
    if isinstance(names, str):
        raise TypeError(f"float8: names is {names!r}; it is a list of names, such as [{names!r}]")
    return list(names)


def layer_pattern(name: str) -> str:
    """Returns "layers.12.attention.wk" as "layers.*.attention.wk"."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _recipe_fields(recipe: str | Recipe) -> tuple[_library.RecipeStruct | None, bytes | None]:
    if isinstance(recipe, str):
        return None, recipe.encode()
    if recipe.name is not None:
        return None, recipe.name.encode()
    return recipe_struct(recipe), None


def explain(verdicts: Sequence[Verdict]) -> str:
    """Returns the verdicts as the table that `float8-tune filter` prints.

    Layers that differ in their number alone share a row.
    """
    counts: dict[tuple[str, int, int, bool, str], int] = {}
    first: dict[tuple[str, int, int, bool, str], Verdict] = {}
    for verdict in verdicts:
        layer = verdict.layer
        name = layer_pattern(layer.name)
        key = (name, layer.n, layer.k, verdict.convert, verdict.reason)
        counts[key] = counts.get(key, 0) + 1
        first.setdefault(key, verdict)
    rows = [
        ("layer", "count", "N", "K", "verdict", "speedup", "interval", "evidence", "reason"),
        *(
            (
                key[0],
                str(counts[key]),
                str(verdict.layer.n),
                str(verdict.layer.k),
                "float8" if verdict.convert else "keep bf16",
                f"{verdict.speedup:.3f}",
                f"[{verdict.speedup_low:.3f}, {verdict.speedup_high:.3f}]",
                verdict.evidence,
                verdict.reason,
            )
            for key, verdict in first.items()
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = (True, False, False, False, True, False, False, True, True)
    lines = (
        "  ".join(
            text.ljust(width) if is_left else text.rjust(width)
            for text, width, is_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines)
