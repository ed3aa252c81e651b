"""Runs a Python program in which torchao.float8 is this package, without an edit of the program.

python -m float8.torchao [OPTION...] PROGRAM.py [ARGUMENT...]
torchrun --nproc-per-node 8 -m float8.torchao [OPTION...] -m MODULE [ARGUMENT...]

--recipe NAME                    train with this recipe in the place of the program's own: tensorwise, rowwise,
                                 rowwise_with_gw_hp, blockwise or delayed
--fuse                           fuse the MLPs of each model that the program converts (float8.torch.fuse)
--enable-fsdp-float8-all-gather  let FSDP2 gather weights in fp8, under every recipe
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import float8.torchao

OPTIONS = {
    "--recipe": "recipe",
    "--fuse": "fuse",
    "--enable-fsdp-float8-all-gather": "enable_fsdp_float8_all_gather",
}


def main(arguments: list[str]) -> int:
    options: dict[str, Any] = {}
    while arguments[:1] and arguments[0] in OPTIONS:
        name, arguments = OPTIONS[arguments[0]], arguments[1:]
        options[name] = True
        if name == "recipe":
            options[name], arguments = (arguments or [""])[0], arguments[1:]
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[is_module:]
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    float8.torchao.install(**options)
    sys.argv = arguments
    if is_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
