"""Answering `import torchao.float8` in programs that cannot be edited."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings

from float8.torch.layer.linear import check_switches
from float8.torchao import _asked, _options, _stand_in

_MODULES = (
    "config",
    "float8_linear",
    "float8_linear_utils",
    "float8_tensor_parallel",
    "fsdp_utils",
)
# Names of the installed torchao.float8, and the modules of it that have them.
_ELSEWHERE = {"FP8Granularity": "types", "Float8MMConfig": "inference"}


_EXPERTS = "torchao.prototype.moe_training.fp8_grouped_mm"


def _install_experts(folders: list[str]) -> None:
    """Gives torchao's fp8 experts our grouped GEMM, where the installed torchao has a module for it.

    Its configs, such as Float8TrainingOpConfig, and its weights stay torchao's own.
    """
    if any(
        os.path.exists(os.path.join(each, *_EXPERTS.split(".")[1:]) + ".py") for each in folders
    ):
        before = sys.modules.get(_EXPERTS)
        ours = importlib.import_module("float8.torchao.fp8_grouped_mm")
        if before is not None and before is not ours:
            warnings.warn(
                "float8: float8.torchao.install() comes after an import of torchao's fp8 experts, which "
                "stay torchao's; call it first",
                stacklevel=3,
            )
        sys.modules[_EXPERTS] = ours


def _find_elsewhere(name: str) -> object:
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(f"torchao.float8.{_ELSEWHERE[name]}"), name)
    raise AttributeError(f"float8: torchao.float8 has no {name!r} after float8.torchao.install()")


def install(
    *,
    recipe: str | None = None,
    fuse: bool = False,
    enable_fsdp_float8_all_gather: bool = False,
) -> None:
    """Makes `torchao.float8` mean this package, in this process.

    recipe: a name of float8.recipes.NAMES, which conversions have in the place of the program's own, as "delayed"
        or "blockwise", which trainers do not offer. Under "delayed" the scales are synchronised at the steps of the model's
        optimizer (float8.torch.sync_at_optimizer_steps), over all ranks: not with pipeline parallelism. None: the program's own.
    fuse: conversions of the program end with float8.torch.fuse(model), so that MLPs cast what they compute, and in
        eager mode rotary positions take one launch.
        Each conversion logs (INFO) how many were fused, and why others were left.
    enable_fsdp_float8_all_gather: FSDP2 gathers the weights of the linears that the program converts in fp8,
        under every recipe, also where its own option is for tensorwise alone, as torchtitan's.

    The options are those of the last call, and are for conversions behind it. A switch that is no bool is a TypeError, and
    another recipe a ConfigError, which is a ValueError.

    Call it before anything imports torchao.float8: names that were imported earlier keep their
    meaning, and a call that comes later warns. The rest of an installed torchao is as before, also
    what else lies in its folder float8, but for the grouped GEMM of its fp8 experts
    (torchao.prototype.moe_training), which is ours too. Where torchao is not installed, imports of torchao.float8
    find this package, accelerate finds a torchao 0.6.1 to train with, and to all others that look
    for torchao it is not there.
    """
    check_switches(fuse=fuse, enable_fsdp_float8_all_gather=enable_fsdp_float8_all_gather)
    ours = importlib.import_module("float8.torchao")
    if recipe is not None:
        ours.Float8LinearConfig.from_recipe_name(recipe)
    _options.set_installed(_options.Options(recipe, fuse, enable_fsdp_float8_all_gather))

    before = sys.modules.get("torchao.float8")
    if before is not None and getattr(before, "install", None) is not ours.install:
        warnings.warn(
            "float8: float8.torchao.install() comes after an import of torchao.float8: names that "
            "were imported before it are still torchao's; call it first",
            stacklevel=2,
        )
    spec = importlib.util.find_spec("torchao")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []

    facade = types.ModuleType("torchao.float8", ours.__doc__)
    facade.__dict__.update({name: getattr(ours, name) for name in dir(ours) if name[:2] != "__"})
    # What this package does not have is found in the installed torchao.
    facade.__file__ = ours.__file__
    facade.__path__ = [os.path.join(folder, "float8") for folder in folders]
    facade.__getattr__ = _find_elsewhere  # type: ignore[method-assign]
    facade.__spec__ = importlib.machinery.ModuleSpec("torchao.float8", None, is_package=True)
    sys.modules["torchao.float8"] = facade
    for name in _MODULES:
        module = importlib.import_module(f"float8.torchao.{name}")
        sys.modules[f"torchao.float8.{name}"] = module
        setattr(facade, name, module)
    _asked.install()
    _install_experts(folders)
    if spec is None:
        _stand_in.install()
    else:
        # The package's own import takes the modules above for its float8, and does not set the name.
        importlib.import_module("torchao").float8 = facade  # type: ignore[attr-defined]
