"""torchao's styles of tensor parallelism, which this version refuses when they are made."""

from __future__ import annotations

from float8.torchao.fsdp_utils import not_yet


class Float8ColwiseParallel:
    def __init__(self, *_: object, **__: object) -> None:
        not_yet("Float8ColwiseParallel")


class Float8RowwiseParallel:
    def __init__(self, *_: object, **__: object) -> None:
        not_yet("Float8RowwiseParallel")


class PrepareFloat8ModuleInput:
    def __init__(self, *_: object, **__: object) -> None:
        not_yet("PrepareFloat8ModuleInput")
