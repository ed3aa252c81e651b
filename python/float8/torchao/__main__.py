"""Runs a Python program in which torchao.float8 is this package, without an edit of the program.

python -m float8.torchao PROGRAM.py [ARGUMENT...]
torchrun --nproc-per-node 8 -m float8.torchao -m MODULE [ARGUMENT...]
"""

from __future__ import annotations

import os
import runpy
import sys

import float8.torchao


def main(arguments: list[str]) -> int:
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[is_module:]
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    float8.torchao.install()
    sys.argv = arguments
    if is_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
