"""Float8Linear with torchao's signature."""

from __future__ import annotations

from typing import Any

from torch import nn

from float8.torch import linear as _linear
from float8.torch import notices
from float8.torchao.config import Float8LinearConfig


class Float8Linear(_linear.Float8Linear):
    """The Float8Linear of float8.torch, made from a Float8LinearConfig."""

    config: Float8LinearConfig

    def __init__(self, *args: Any, config: Float8LinearConfig | None = None, **kwargs: Any) -> None:
        own_config = config or Float8LinearConfig()
        fields: dict[str, Any] = {**kwargs, **own_config.linear_config().linear_fields()}
        super().__init__(*args, **fields)
        self.config = own_config
        notices.note_conversion()

    @classmethod
    def from_float(  # type: ignore[override]
        cls, mod: nn.Linear, config: Float8LinearConfig | None = None
    ) -> Float8Linear:
        options = (config or Float8LinearConfig()).linear_config()
        converted = super().from_float(mod, **options.linear_fields())
        assert isinstance(converted, Float8Linear)
        converted.config = config or Float8LinearConfig()
        return converted
