"""The delayed scales of a converted module's experts: a part of the model's scale state for each weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from float8.recipes import Recipe

if TYPE_CHECKING:
    from float8.torch.scales import ScaleState


class ExpertLinear:
    """The linears of all experts with one weight, which a scale state has as it has a Float8Linear."""

    # Of what a Float8Linear may have.
    _weight_gather = None
    _sharing = None

    def __init__(self, module: nn.Module, name: str, recipe: Recipe, config: int) -> None:
        self._module = module
        self.name = name
        self.recipe = recipe
        self._config = config
        self._scales: ScaleState | None = None
        self._scale_view: torch.Tensor | None = None
        self._scale_index = 0
        self._layout = 0
        self._first_step = False

    @property
    def weight(self) -> Any:
        return getattr(self._module, self.name)

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._scales is not None:
            self._scales.attach(self, self._scale_index)
