"""What install() adds to each conversion of a program whose own options do not have it."""

from __future__ import annotations

import dataclasses
import logging

from torch import nn

from float8.torch.base_linear import is_float8
from float8.torch.layer.fuse import fuse

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Options:
    """fuse, enable_fsdp_float8_all_gather: as for install()."""

    fuse: bool = False
    enable_fsdp_float8_all_gather: bool = False


installed = Options()


def set_installed(options: Options) -> None:
    global installed
    installed = options


def after_conversion(model: nn.Module) -> nn.Module:
    """Fuses the MLPs of a converted model where install() was told to, and returns the model."""
    if installed.fuse and not is_float8(model):
        done = fuse(model)
        left = [each for each in done if not each.fused]
        _log.info(
            "float8: fused %d MLPs of %s%s",
            len(done) - len(left),
            type(model).__name__,
            "".join(f"; left {each.name}: {each.why}" for each in left),
        )
    return model
