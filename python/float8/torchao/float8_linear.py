"""Float8Linear with torchao's signature."""

from __future__ import annotations

from typing import Any

from torch import nn

from float8.torch import notices
from float8.torch.layer import linear as _linear
from float8.torch.layer.convert import LinearConfig
from float8.torchao import _options
from float8.torchao.config import Float8LinearConfig


class Float8Linear(_linear.Float8Linear):
    """The Float8Linear of float8.torch, made from a Float8LinearConfig."""

    config: Float8LinearConfig

    def __init__(self, *args: Any, config: Float8LinearConfig | None = None, **kwargs: Any) -> None:
        own_config = (config or Float8LinearConfig()).as_installed()
        _options.check_single_layer()
        fields: dict[str, Any] = {**kwargs, **own_config.linear_config().linear_fields()}
        super().__init__(*args, **fields)
        self.config = own_config
        notices.note_conversion()

    @classmethod
    def from_float(  # type: ignore[override]
        cls, mod: nn.Linear, config: Float8LinearConfig | None = None
    ) -> Float8Linear:
        own_config = config or Float8LinearConfig()
        return cls.of_model(mod, own_config, own_config.linear_config())

    @classmethod
    def of_model(
        cls, mod: nn.Linear, config: Float8LinearConfig, options: LinearConfig
    ) -> Float8Linear:
        """Makes a linear of a model, whose conversion has made `options` of the config."""
        converted = super().from_float(mod, **options.linear_fields())
        assert isinstance(converted, Float8Linear)
        converted.config = config
        return converted

    def extra_repr(self) -> str:
        config = self.config
        casts = {
            "i": config.cast_config_input,
            "w": config.cast_config_weight,
            "go": config.cast_config_grad_output,
            "i_gw": config.cast_config_input_for_grad_weight,
            "w_gi": config.cast_config_weight_for_grad_input,
            "go_gw": config.cast_config_grad_output_for_grad_weight,
        }
        # The second cast of a tensor is named where it is another than the first.
        first = {name.partition("_")[0]: cast for name, cast in reversed(casts.items())}
        words = ",".join(
            f"{name}:{cast.short_str()}"
            for name, cast in casts.items()
            if cast is not None and (name in first or cast != first[name.partition("_")[0]])
        )
        return f"{super().extra_repr()}, cast_configs={words}"
