"""Which linears gain from fp8: the verdicts of `float8-tune filter`, from the same tuning table. And which attentions, by
the filter file that it writes."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from float8 import _library
from float8.recipes import Recipe, recipe_struct

_EVIDENCE = ("measured", "interpolated", "modelled", "rule")
_POLICIES = {"measured": 0, "torchao": 1}
AUTO_FILTER = "auto_filter_small_kn"


@dataclasses.dataclass(frozen=True)
class Layer:
    """A linear of a model: its name, in_features (k), out_features (n) and, where they are its own,
    the rows of x in a call: an expert of a mixture sees fewer than the rest of the model.

    With `experts` it is the SwiGLU experts of a layer, which have one verdict: so many that a rank has,
    of k inputs and outputs and n hidden features each, and `tokens` are the rows of all of them. `skew`
    says how they share these: 0 evenly, 1 by Zipf's law, 100 where one has them all.
    """

    name: str
    k: int
    n: int
    tokens: int | None = None
    experts: int | None = None
    skew: int = 0


@dataclasses.dataclass(frozen=True)
class Wire:
    """What ranks send for a layer in a step, and what of it GEMMs do not hide, in microseconds."""

    bf16_us: float
    fp8_us: float
    bf16_exposed_us: float
    fp8_exposed_us: float
    is_prediction: bool  # the model was not measured on so many ranks and hosts


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
    wire: Wire | None = None  # where ranks share the model
    tokens: int | None = None  # the rows of x that it was judged by
    device: str = ""  # the device that it is for, by its full name
    measured_on: str = (
        ""  # that whose rows the speedup is of; of a filter file, or where nothing is known, empty
    )


@dataclasses.dataclass(frozen=True)
class AttentionVerdict:
    """What a filter file says about the attention of a layer: its recipe, "fp8_forward" or "fp8", or "bf16" where it is
    kept, why, and the speedup of forward and backward with its interval.

    The heads are those of one rank of tensor parallelism. It was decided for steps of `tokens` in sequences of
    `sequence`, under a causal mask.
    """

    name: str
    recipe: str
    reason: str
    evidence: str
    speedup: float
    speedup_low: float
    speedup_high: float
    heads_q: int
    heads_kv: int
    head_dim: int
    tokens: int
    sequence: int

    @property
    def convert(self) -> bool:
        return self.recipe != "bf16"


class AttentionFile:
    """A filter file that has attention, open within `with`. Raises ValueError where it has linears alone."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._handle = ctypes.c_void_p()
        read = _library.library().float8_attention_verdicts_read
        _library.check(read(os.fspath(path).encode(), ctypes.byref(self._handle)))

    def __enter__(self) -> AttentionFile:
        return self

    def __exit__(self, *_: object) -> None:
        _library.library().float8_attention_verdicts_destroy(self._handle)

    def all(self) -> list[AttentionVerdict]:
        loaded = _library.library()
        count = loaded.float8_attention_verdicts_count(self._handle)
        return [self._given(loaded.float8_attention_verdicts_get, i) for i in range(count)]

    def find(self, name: str) -> AttentionVerdict:
        """Returns the verdict on the attention of this name, or of the nearest module around it (ValueError)."""
        return self._given(_library.library().float8_attention_verdicts_find, name.encode())

    def _given(self, call: Any, which: int | bytes) -> AttentionVerdict:
        found = _library.sized(_library.AttentionVerdict)
        _library.check(call(self._handle, which, ctypes.byref(found)))
        return AttentionVerdict(
            name=found.name.decode(),
            recipe=found.recipe.decode(),
            reason=found.reason.decode(),
            evidence=_EVIDENCE[found.evidence],
            **{
                field.name: getattr(found, field.name)
                for field in dataclasses.fields(AttentionVerdict)[4:]
            },
        )


def attention_verdicts(file: str | os.PathLike[str]) -> list[AttentionVerdict]:
    """Returns the verdicts on attention of a filter file, which `float8-tune filter --attention --verdicts` writes.

    Raises ValueError where it has linears alone.
    """
    with AttentionFile(file) as opened:
        return opened.all()


def _device_asked(device: int | str | None) -> tuple[int | None, str | None]:
    """Returns the number of the device, or the part of a name, that filter_layers' device is."""
    what = "it is the number of a CUDA device, a part of the name of one that was measured, such as 'H200', or None"
    if isinstance(device, bool) or not isinstance(device, (int, str, type(None))):
        raise TypeError(f"float8: device is {device!r}; {what}")
    if device == "" or (isinstance(device, int) and device < 0):
        raise ValueError(f"float8: device is {device!r}; {what}")
    return (None, device) if isinstance(device, str) else (device, None)


def _model_layers(layers: Sequence[Layer]) -> ctypes.Array[_library.ModelLayer]:
    descs = [
        _library.sized(
            _library.LinearDesc,
            n=layer.n,
            k=layer.k,
            m_max=0 if layer.tokens is None else layer.tokens,
        )
        for layer in layers
    ]
    return (_library.ModelLayer * len(layers))(
        *(
            _library.sized(
                _library.ModelLayer,
                name=layer.name.encode(),
                desc=ctypes.pointer(desc),
                experts=layer.experts or 0,
                skew=layer.skew,
            )
            for layer, desc in zip(layers, descs, strict=True)
        )
    )


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
    device: int | str | None = None,
    fsdp: int = 1,
    tp: int = 1,
    hosts: int | None = None,
    network_gbit: float | None = None,
    fuse: bool = False,
) -> list[Verdict]:
    """Decides for each linear, and for the experts of each layer, whether fp8 pays.

    layers: unique names.
    tokens: the rows of x in a call, of layers that do not say their own.
    names: parts of names that keep a layer in high precision. "auto_filter_small_kn" among them
        switches the policy's rule on, as for torchao; the policy "measured" has it on anyway.
    policy: "measured" compares speedups of the tuning table with 1 + margin; "torchao" has
        torchao's fixed limits.
    table: a table's file; None: the built-in one.
    verdicts: a filter file of `float8-tune filter --verdicts`.
    device: the CUDA device that is asked about, by its number, or one with rows in the table by its name
        or a part of it, in any case of letters: "H200" asks its rows alone. A name and None need no GPU;
        None asks about the table's first device, the H100 in the built-in one.
    fsdp, tp: how many ranks share each weight by FSDP, and the layers by tensor parallelism, whose
        names (wq, o_proj, ...) say how; the layers are whole. Speedups then include the wire.
    hosts: of all fsdp * tp ranks; None: as few as have at most 8 each.
    network_gbit: Gbit/s of each GPU's network card; None: 400.
    fuse: float8.torch.fuse will run the MLPs, whose linears then have one verdict where the table has MLPs.

    Raises ValueError that names the layer or the field, and FileNotFoundError for a device without rows.
    """
    if policy not in _POLICIES:
        raise ValueError(f"float8: policy is {policy!r}; it is one of {', '.join(_POLICIES)}")
    wanted = _list_of_layers(layers)
    check_tokens("tokens", tokens)
    fqns = list_of(names)
    if policy == "measured" and verdicts is None and AUTO_FILTER not in fqns:
        fqns.append(AUTO_FILTER)
    ordinal, part = _device_asked(device)
    custom, recipe_name = _recipe_fields(recipe)
    model_desc = _library.sized(
        _library.ModelDesc,
        layers=_model_layers(wanted),
        count=len(wanted),
        tokens=tokens,
        recipe=recipe_name,
        custom_recipe=ctypes.pointer(custom) if custom is not None else None,
        filter_fqns=(ctypes.c_char_p * len(fqns))(*(name.encode() for name in fqns)),
        filter_fqn_count=len(fqns),
        verdicts=os.fspath(verdicts).encode() if verdicts is not None else None,
        margin=margin,
        policy=_POLICIES[policy],
        fsdp=_ranks("fsdp", fsdp),
        tp=_ranks("tp", tp),
        hosts=0 if hosts is None else _ranks("hosts", hosts),
        network_gbit=0 if network_gbit is None else network_gbit,
        fused_mlps=bool(fuse),
        device=part.encode() if part is not None else None,
    )
    loaded = _library.library()
    with _library.Context(os.fspath(table) if table is not None else None, ordinal) as context:
        model = ctypes.c_void_p()
        _library.check(
            loaded.float8_model_plan(context.handle, ctypes.byref(model_desc), ctypes.byref(model))
        )
        try:
            is_shared = fsdp * tp > 1
            return [_verdict(model, i, layer, tokens, is_shared) for i, layer in enumerate(wanted)]
        finally:
            loaded.float8_model_destroy(model)


# 0 has a meaning of its own in the C ABI.
def _ranks(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"float8: {name} is {value}; it must be 1 or more")
    return value


def _verdict(
    model: ctypes.c_void_p, index: int, layer: Layer, tokens: int, is_shared: bool
) -> Verdict:
    found = _library.sized(_library.ModelVerdict)
    _library.check(_library.library().float8_model_layer_verdict(model, index, ctypes.byref(found)))
    return Verdict(
        layer=layer,
        convert=bool(found.convert),
        reason=found.reason.decode(),
        evidence=_EVIDENCE[found.evidence],
        speedup=found.speedup,
        speedup_low=found.speedup_low,
        speedup_high=found.speedup_high,
        wire=Wire(
            found.wire_bf16_us,
            found.wire_fp8_us,
            found.exposed_bf16_us,
            found.exposed_fp8_us,
            bool(found.wire_is_prediction),
        )
        if is_shared and layer.experts is None
        else None,
        tokens=layer.tokens or tokens,
        device=found.device.decode(),
        measured_on=found.measured_on.decode(),
    )


def list_of(names: Sequence[str]) -> list[str]:
    """Returns the names; a text alone, whose letters would be names, is refused (TypeError)."""
    if isinstance(names, str):
        raise TypeError(f"float8: names is {names!r}; it is a list of names, such as [{names!r}]")
    return list(names)


def check_tokens(what: str, tokens: object) -> None:
    """Raises TypeError or ValueError where `tokens` is no number of rows."""
    if not isinstance(tokens, int) or isinstance(tokens, bool):
        raise TypeError(f"float8: {what} is {tokens!r}; it is the number of rows of x in a call")
    if tokens < 1:
        raise ValueError(f"float8: {what} is {tokens}; it must be 1 or more")


def _list_of_layers(layers: Iterable[Layer]) -> list[Layer]:
    """Returns the layers; what is none is refused (TypeError)."""
    items = [] if isinstance(layers, str) else list(layers)
    for layer in items:
        if isinstance(layer, Layer) and layer.tokens is not None:
            check_tokens(f"the tokens of {layer.name}", layer.tokens)
        if isinstance(layer, Layer) and layer.experts is not None:
            _check_experts(layer)
    if isinstance(layers, str) or not all(isinstance(each, Layer) for each in items):
        raise TypeError(
            "float8: layers is not a list of float8.Layer; filter_layers takes layers, a recipe and "
            "tokens, in this order"
        )
    return items


def _check_experts(layer: Layer) -> None:
    experts = layer.experts
    if not isinstance(experts, int) or isinstance(experts, bool):
        raise TypeError(f"float8: the experts of {layer.name} are {experts!r}; it is their number")
    if not isinstance(layer.skew, int) or isinstance(layer.skew, bool):
        raise TypeError(
            f"float8: the skew of {layer.name} is {layer.skew!r}; it is 0 for even shares, the exponent of "
            "Zipf's law, or 100 where one expert has all rows"
        )
    if experts < 1:  # 0 is a linear in the C ABI
        raise ValueError(f"float8: {layer.name} has {experts} experts; it has 1 or more")


def layer_pattern(name: str) -> str:
    """Returns "layers.12.attention.wk" as "layers.*.attention.wk"."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _recipe_fields(recipe: str | Recipe) -> tuple[_library.RecipeStruct | None, bytes | None]:
    if isinstance(recipe, str):
        return None, recipe.encode()
    if recipe.name is not None:
        return None, recipe.name.encode()
    return recipe_struct(recipe), None


# The columns of the table, and whether their texts are on the left.
_COLUMNS = {
    "layer": True,
    "count": False,
    "M": False,
    "N": False,
    "K": False,
    "verdict": True,
    "speedup": False,
    "interval": False,
    "wire us": False,
    "exposed us": False,
    "evidence": True,
    "reason": True,
}


_ATTENTION_COLUMNS = {
    "attention": True,
    "count": False,
    "heads": True,
    "verdict": True,
    "speedup": False,
    "interval": False,
    "evidence": True,
    "reason": True,
}


def explain(verdicts: Sequence[Verdict] | Sequence[AttentionVerdict]) -> str:
    """Returns verdicts on linears, or those on attention, as the table that `float8-tune filter` prints.

    Layers that differ in their number alone share a row. N and K are those of the whole layer; M is
    there where layers differ in it. Heads are those of queries, of keys, and the elements of each.
    """
    linears = [verdict for verdict in verdicts if isinstance(verdict, Verdict)]
    attention = [verdict for verdict in verdicts if isinstance(verdict, AttentionVerdict)]
    if not linears and attention:
        return _explain_attention(attention)
    counts: dict[tuple[object, ...], int] = {}
    first: dict[tuple[object, ...], Verdict] = {}
    for verdict in linears:
        layer = verdict.layer
        name = layer_pattern(layer.name)
        key = (name, verdict.tokens, layer.n, layer.k, verdict.convert, verdict.reason)
        counts[key] = counts.get(key, 0) + 1
        first.setdefault(key, verdict)
    rows = [
        _cells(layer_pattern(verdict.layer.name), counts[key], verdict)
        for key, verdict in first.items()
    ]
    titles = list(_COLUMNS)
    if len({verdict.tokens for verdict in linears}) < 2:
        titles.remove("M")
    if all(verdict.wire is None for verdict in linears):
        titles = [title for title in titles if not title.endswith(" us")]
    return _table({title: _COLUMNS[title] for title in titles}, rows)


def _explain_attention(verdicts: list[AttentionVerdict]) -> str:
    counts: dict[AttentionVerdict, int] = {}
    for verdict in verdicts:
        kind = dataclasses.replace(verdict, name=layer_pattern(verdict.name))
        counts[kind] = counts.get(kind, 0) + 1
    rows = [
        {
            "attention": verdict.name,
            "count": str(count),
            "heads": f"{verdict.heads_q}/{verdict.heads_kv} of {verdict.head_dim}",
            "verdict": f"float8 {verdict.recipe}" if verdict.convert else "keep bf16",
            **_speedup_cells(verdict),
            "evidence": verdict.evidence,
            "reason": verdict.reason,
        }
        for verdict, count in counts.items()
    ]
    return _table(_ATTENTION_COLUMNS, rows)


def _table(columns: Mapping[str, bool], rows: list[dict[str, str]]) -> str:
    """Returns rows under the titles of these columns, of which each says whether its texts are on the left."""
    widths = {title: max(map(len, (title, *(row[title] for row in rows)))) for title in columns}
    lines = (
        "  ".join(
            row[title].ljust(widths[title]) if on_left else row[title].rjust(widths[title])
            for title, on_left in columns.items()
        ).rstrip()
        for row in ({title: title for title in columns}, *rows)
    )
    return "\n".join(lines)


def _speedup_cells(verdict: Verdict | AttentionVerdict, known: bool = False) -> dict[str, str]:
    """`known`: a speedup of 1 is one, and does not stand for what is not known."""
    bounds = (verdict.speedup_low, verdict.speedup_high)
    known = known or (verdict.speedup, *bounds) != (1, 1, 1)
    return {
        "speedup": f"{verdict.speedup:.3f}" if known else "-",
        "interval": f"[{bounds[0]:.3f}, {bounds[1]:.3f}]" if known else "-",
    }


def _cells(name: str, count: int, verdict: Verdict) -> dict[str, str]:
    wire = verdict.wire if verdict.wire and verdict.wire.bf16_us > 0 else None
    return {
        "layer": name,
        "count": str(count),
        "M": str(verdict.tokens or ""),
        "N": str(verdict.layer.n),
        "K": str(verdict.layer.k),
        "verdict": "float8" if verdict.convert else "keep bf16",
        **_speedup_cells(verdict, wire is not None),
        "wire us": f"{wire.bf16_us:.1f} -> {wire.fp8_us:.1f}" if wire else "-",
        "exposed us": f"{wire.bf16_exposed_us:.1f} -> {wire.fp8_exposed_us:.1f}" if wire else "-",
        "evidence": verdict.evidence,
        "reason": verdict.reason,
    }
