"""The cost model's constants: runtime/gemm/cost_model_constants.cpp as data, and its text."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PATH = pathlib.Path(__file__).resolve().parents[2] / "runtime/gemm/cost_model_constants.cpp"
# The constants that are one number each, with the digits that the source has of them.
SCALARS = {
    "l2_bytes_per_clock": 4,
    "port_bytes_per_clock": 4,
    "store_bytes_per_clock": 4,
    "tile_overhead": 4,
    "latency": 4,
    "launch": 4,
    "cluster_skew": 4,
    "pingpong_epilogue": 3,
    "exchange": 4,
    "exchange_bytes_per_clock": 4,
}
Tile = tuple[int, int, int, bool]  # m, n, warpgroups, ping-pong


@dataclasses.dataclass
class Constants:
    """See CostModel in runtime/gemm/cost_model.hpp."""

    scalars: dict[str, float]
    tiles: dict[Tile, tuple[float, float, float]]  # the shares fast, precise, block
    library: Floats
    suggestions: Floats

    @classmethod
    def read(cls, path: pathlib.Path = PATH) -> Constants:
        """Reads what source() wrote, in any layout."""
        text = re.sub(r"\s", "", path.read_text())

        def found(pattern: str) -> str:
            match = re.search(pattern, text)
            if match is None:
                raise ValueError(f"{path}: it has no {pattern}; is it cost_model_constants.cpp?")
            return match[1]

        tiles = re.findall(r"\{(\d+),(\d+),(\d+),(true|false),([\d.]+),([\d.]+),([\d.]+)\}", text)
        return cls(
            {name: float(found(rf"\.{name}=([\d.e+-]+)")) for name in SCALARS},
            {
                (int(m), int(n), int(groups), pingpong == "true"): (float(a), float(b), float(c))
                for m, n, groups, pingpong, a, b, c in tiles
            },
            np.array(found(r"\.library=\{(.*?)\}").split(","), float),
            np.array(found(r"\.suggestions=\{(.*?)\}").split(","), float),
        )

    def source(self) -> str:
        """The text of the file; scripts/format lays the tiles out."""
        lines = [
            f"      .{name} = {self.scalars[name]:.{digits}g}," for name, digits in SCALARS.items()
        ]
        tiles = [
            f"{{{m}, {n}, {groups}, {str(pingpong).lower()}, {fast:.3f}, {precise:.3f}, {block:.3f}}}"
            for (m, n, groups, pingpong), (fast, precise, block) in self.tiles.items()
        ]
        lines.append(f"      .tiles = {{{_joined(tiles, 2, 17)}}},")
        for name, ending in (("library", ","), ("suggestions", "};")):
            values = [f"{value:.4f}" for value in getattr(self, name)]
            lines.append(f"      .{name} = {{{_joined(values, 8, 12 + len(name))}}}{ending}")
        return _SOURCE.format("\n".join(lines))

    def write(self, path: pathlib.Path | None) -> None:
        """Writes the text to a file, or prints it where none is given."""
        if path is None:
            print("\n" + self.source())
        else:
            path.write_text(self.source())


def _joined(parts: list[str], columns: int, indent: int) -> str:
    rows = [", ".join(parts[i : i + columns]) for i in range(0, len(parts), columns)]
    return (",\n" + " " * indent).join(rows)


_SOURCE = """\
// Written by the programs of benchmarks/fit; see docs/method.md.
#include "runtime/gemm/cost_model.hpp"

namespace f8::runtime {{

const CostModel& CostModel::fitted() {{
  static const CostModel kModel = {{
{}
  return kModel;
}}

}}  // namespace f8::runtime
"""
