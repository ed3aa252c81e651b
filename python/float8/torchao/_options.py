"""What install() adds to each conversion of a program whose own options do not have it."""

from __future__ import annotations

import collections
import dataclasses
import logging

from torch import nn

from float8.torch import notices
from float8.torch.base_linear import is_float8
from float8.torch.layer.fuse import fuse
from float8.torch.step_sync import sync_at_optimizer_steps

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Options:
    """recipe, fuse, enable_fsdp_float8_all_gather: as for install()."""

    recipe: str | None = None
    fuse: bool = False
    enable_fsdp_float8_all_gather: bool = False


installed = Options()


def set_installed(options: Options) -> None:
    global installed
    installed = options


def check_single_layer() -> None:
    """Says what install() was told that is for models, where a program makes a layer in fp8 itself."""
    if installed.recipe == "delayed":
        raise NotImplementedError(
            'float8: install(recipe="delayed") is for models that convert_to_float8_training converts, which have one '
            "scale state; this program makes its Float8Linears itself: choose another recipe"
        )
    if installed.fuse:
        notices.warn_once(
            "fuse of single layers",
            "install(fuse=True) fuses models that convert_to_float8_training converts, and this program makes its "
            "Float8Linears itself: call float8.torch.fuse(model) behind that",
        )


def after_conversion(model: nn.Module) -> nn.Module:
    """Does what install() was told to with a converted model, and returns the model."""
    if installed.recipe == "delayed":
        sync_at_optimizer_steps(model)
    if installed.fuse and not is_float8(model):
        done = fuse(model)
        fused = collections.Counter(each.what for each in done if each.fused)
        _log.info(
            "float8: fused %d MLPs of %s, and rotary positions in %d modules%s",
            fused["mlp"],
            type(model).__name__,
            fused["rotary"],
            "".join(f"; left {each.name}: {each.why}" for each in done if not each.fused),
        )
    return model
