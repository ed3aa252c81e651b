"""The linears of a converted module's experts, one for each weight: what a scale state, and FSDP's gathers in
fp8, have in the place of a Float8Linear."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from float8.recipes import EMULATE, Recipe

if TYPE_CHECKING:
    from float8.torch.scales import ScaleState
    from float8.torch.shard.expert_gather import ExpertGather


class ExpertLinear:
    """The linears of all experts with one weight."""

    _sharing = None  # of what a Float8Linear may have

    def __init__(self, module: nn.Module, name: str, recipe: Recipe, config: int) -> None:
        self.module = module
        self.name = name
        self._layer_name = name  # in the model, once it is converted
        self._weight_gather: ExpertGather | None = None
        self.recipe = recipe
        self._config = config
        self._scales: ScaleState | None = None
        self._scale_view: torch.Tensor | None = None
        self._scale_index = 0
        self._layout = 0
        # Two that are computed as one weight, with the rows of the first one in front.
        self.pair: tuple[ExpertLinear, ExpertLinear] | None = None
        self._first_step = False
        self.together: list[ExpertLinear] = []  # those that one call computes, with this one
        self.tensor_group: Any = None  # of the ranks that share the weight's hidden dimension

    @property
    def weight(self) -> Any:
        return getattr(self.module, self.name)

    @property
    def in_first_step(self) -> bool:
        """Tells whether calls with the weight take their scales from its own values."""
        return self._first_step or any(each._first_step for each in self.together)

    @property
    def is_transposed(self) -> bool:
        """Tells whether the weight is stored as [experts, in_features, out_features]."""
        return getattr(self.module, "is_transposed", False)

    @property
    def _parameters(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def scales_on(self, device: torch.device) -> tuple[torch.Tensor | None, int]:
        """Returns the part of the scale state, which follows the weights, and the state's layout."""
        view = self._scale_view
        if view is not None and view.device != device and self._scales is not None:
            self._scales.follow(device)
            view = self._scale_view
        return view, self._layout

    def describe(self) -> str:
        """Returns what the weight has in common on all ranks, in words."""
        dtype = str(self.weight.dtype).removeprefix("torch.")
        options = f"emulate={bool(self._config & EMULATE)}"
        return f"experts {list(self.weight.shape)} {self.recipe} in {dtype}, {options}, fp8 gathers"

    def __getstate__(self) -> dict[str, Any]:
        own = {"_weight_gather": None, "tensor_group": None}  # a copy has a weight of its own
        return {**self.__dict__, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._scales is not None:
            self._scales.attach(self, self._scale_index)
