"""The cost model of runtime/gemm/cost_model.cpp over arrays of kernels, with its slopes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from constants import SCALARS, Floats, Tile
from numpy.typing import NDArray

Ints = NDArray[np.int64]
MACS_PER_CLOCK = 4096  # fp8 multiply-adds of one SM's tensor cores
BLOCK = 128  # elements of K in a stage
LIBRARY_MARGIN, LARGE_EFFICIENCY = 0.02, 0.75
CONFIG = re.compile(r"(\d+)x(\d+)s(\d+)c(\d+)x(\d+)(?:k(\d+))?w(\d+)(p?)g(\d+)")
GEMM = re.compile(r"\w+\.\w+\.(\w+)/([\w-]+)/(fast|precise)/m(\d+)n(\d+)k(\d+)")
LINEAR = re.compile(
    r"(\w+)/.*/m(\d+)n(\d+)k(\d+)(?:/b\df\d)?"
)  # of a problem key, today's or 0.1's
NUMBERS = (
    *("tile_m", "tile_n", "stages", "cluster_m", "cluster_n", "split_k", "warpgroups"),
    *("pingpong", "raster"),
)
ROW = np.dtype(
    [
        *(("gemm", int), ("ns", float), ("config", "U48")),
        ("winner", "U48"),  # the configuration but for its stages, which is what wins elsewhere
        *((name, int) for name in NUMBERS),
    ]
)
ABOUT = np.dtype(
    [
        ("own", int, 3),  # m, n and k of the GEMM itself
        ("linear", int, 3),
        *(("sms", int), ("kind", "U200")),  # device, operation, types and scales
        ("mode", int),  # of its tiles' shares: 0 fast, 1 precise, 2 block
        *(("is_tensor", bool), ("d_bytes", int)),
        *(
            ("library", float),
            ("suggestion", float),
        ),  # cuBLASLt's fastest and first; 0: not measured
    ]
)


def _matched(pattern: re.Pattern[str], row: dict[str, str], column: str) -> tuple[str, ...]:
    match = pattern.fullmatch(row[column] or "")
    if match is None:
        raise ValueError(
            f"column {column} is {row[column]!r}; `float8-tune cost-model score --csv` writes it"
        )
    return match.groups()


def _positive(row: dict[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = 0
    if not 0 < value < np.inf:
        raise ValueError(f"column {column} is {row[column]!r}; a positive number stands there")
    return value


class Kernels:
    """Generated kernels, one GEMM's after the other's, and what is known of each GEMM."""

    def __init__(self, rows: NDArray[Any], gemms: NDArray[Any]) -> None:
        self.rows, self.gemms = rows, gemms
        self.gemm: Ints = rows["gemm"]  # whose kernel it is
        self.ns: Floats = rows["ns"]
        self.count = np.bincount(self.gemm, minlength=len(gemms))
        if not self.count.all():
            raise ValueError("a GEMM has no generated kernel")
        self.first: Ints = np.searchsorted(self.gemm, np.arange(len(gemms)))
        self.best = np.minimum.reduceat(self.ns, self.first) if len(gemms) else np.zeros(0)
        self.regret: Floats = self.ns / self.best[self.gemm] - 1
        self.layers: list[tuple[int, int]] = [(n, k) for _, n, k in gemms["linear"].tolist()]
        columns = rows[["tile_m", "tile_n", "warpgroups", "pingpong"]]
        self.tiles: list[Tile] = [(m, n, w, bool(p)) for m, n, w, p in columns.tolist()]

    @classmethod
    def of(cls, table: list[dict[str, str]]) -> Kernels:
        """From rows of `float8-tune cost-model score --csv`."""
        gemms = {row["number"]: row for row in table}
        place = {number: at for at, number in enumerate(gemms)}
        library: list[dict[str, float]] = [{} for _ in gemms]
        rows: list[tuple[Any, ...]] = []
        for row in table:
            at, ns = place[row["number"]], _positive(row, "ns")
            if row["impl"] == "cublaslt":
                library[at][row["config"]] = ns
                continue
            *sizes, pingpong, raster = _matched(CONFIG, row, "config")
            numbers = (*(int(size or 1) for size in sizes), int(pingpong == "p"), int(raster))
            rows.append((at, ns, row["config"], re.sub(r"s\d+", "", row["config"]), *numbers))
        about = []
        for row, times in zip(gemms.values(), library, strict=True):
            d, scales, mode, *own = _matched(GEMM, row, "gemm")
            op, *linear = _matched(LINEAR, row, "problem")
            kind = f"{row['device']} {op} {row['gemm'].rsplit('/', 1)[0]}"
            shares = 2 if "block" in scales else int(mode == "precise")
            fastest = min(times.values(), default=0)
            values = (
                _positive(row, "sms"),
                kind,
                shares,
                "tensor" in scales,
                4 if d == "f32" else 2,
            )
            about.append((own, linear, *values, fastest, times.get("h0", 0)))
        rows.sort(key=lambda kernel: kernel[0])
        return cls(np.array(rows, ROW), np.array(about, ABOUT))

    def subset(self, chosen: NDArray[np.bool_]) -> Kernels:
        """The kernels of the chosen GEMMs."""
        rows = self.rows[chosen[self.gemm]]
        rows["gemm"] = (np.cumsum(chosen) - 1)[rows["gemm"]]
        return Kernels(rows, self.gemms[chosen])

    def cheapest(self, clocks: Floats) -> Ints:
        """The kernel of each GEMM that is chosen; equals are ranked as cheapest_config ranks them."""
        r = self.rows
        area = r["tile_m"] * r["tile_n"]
        order: Ints = np.lexsort((r["config"], r["raster"], -area, clocks, self.gemm))
        return order[self.first]

    def fastest(self) -> Ints:
        order: Ints = np.lexsort((self.ns, self.gemm))
        return order[self.first]

    def nearby(self, known: Kernels, most: int) -> list[list[tuple[int, float]]]:
        """For each GEMM the nearest known ones of its kind in other layers, and their octaves."""
        groups: dict[str, list[int]] = {}
        for i, kind in enumerate(known.gemms["kind"].tolist()):
            groups.setdefault(kind, []).append(i)
        near = []
        for i, kind in enumerate(self.gemms["kind"].tolist()):
            others = [j for j in groups.get(kind, []) if known.layers[j] != self.layers[i]]
            ratios = known.gemms["linear"][others] / self.gemms["linear"][i]
            octaves = np.linalg.norm(np.log2(ratios), axis=1)
            order = np.argsort(octaves, kind="stable")[:most]
            near.append([(others[j], float(octaves[j])) for j in order])
        return near


class Model:
    """The model's clocks, as a function of the logarithms of its constants.

    Promoting costs time, so a slower rate of the tensor cores is a share of the next faster one: each
    tile has the constants fast, precise / fast and block / precise.
    """

    def __init__(self, tiles: list[Tile]) -> None:
        self.tiles = tiles
        share = (None, 0.0)  # at most 1
        scalars = [share if name == "pingpong_epilogue" else (None, None) for name in SCALARS]
        self.bounds = scalars + [share] * (3 * len(tiles))

    def logs(
        self, scalars: dict[str, float], tiles: dict[Tile, tuple[float, float, float]]
    ) -> Floats:
        shares = np.log([tiles[tile] for tile in self.tiles]).reshape(-1, 3)
        shares[:, 1:] -= shares[:, :-1].copy()
        return np.concatenate([np.log([scalars[name] for name in SCALARS]), shares.ravel()])

    def constants(
        self, logs: Floats
    ) -> tuple[dict[str, float], dict[Tile, tuple[float, float, float]]]:
        values = np.exp(logs[: len(SCALARS)])
        shares = np.exp(np.cumsum(logs[len(SCALARS) :].reshape(-1, 3), axis=1))
        tiles = {t: (a, b, c) for t, (a, b, c) in zip(self.tiles, shares.tolist(), strict=True)}
        return dict(zip(SCALARS, values.tolist(), strict=True)), tiles

    def clocks(self, logs: Floats, of: Kernels) -> tuple[Floats, Callable[[Floats], Floats]]:
        """The predicted clocks; and a function from weights of kernels to the slope of their sum."""
        l2, port, store_rate, overhead, latency, launch, skew, hidden, exchange, exchange_rate = (
            np.exp(logs[: len(SCALARS)])
        )
        r, g = of.rows, of.gemms[of.gemm]
        tile_m, tile_n, cluster_m, cluster_n = (
            r[name] for name in ("tile_m", "tile_n", "cluster_m", "cluster_n")
        )
        split, pingpong, sms = r["split_k"], r["pingpong"], np.maximum(1, g["sms"])
        m, n, k = g["own"].T
        cluster = cluster_m * cluster_n * split
        tiles = np.ceil(np.ceil(m / tile_m) / cluster_m) * np.ceil(np.ceil(n / tile_n) / cluster_n)
        clusters = np.maximum(1, sms // cluster)
        waves = np.ceil(tiles / clusters)
        blocks = np.ceil(np.ceil(k / BLOCK) / split)
        index = {tile: i for i, tile in enumerate(self.tiles)}
        at = np.array([index[tile] for tile in of.tiles], int)
        mode = g["mode"]
        shares = np.exp(np.cumsum(logs[len(SCALARS) :].reshape(-1, 3), axis=1))
        math = tile_m * tile_n * BLOCK / MACS_PER_CLOCK / shares[at, mode]
        bytes_ = BLOCK * (tile_m / cluster_n + tile_n / cluster_m)
        from_l2 = bytes_ * np.minimum(tiles, clusters) * cluster / sms / l2
        copies = np.stack([math, from_l2, bytes_ / port, latency / r["stages"]])
        slowest = copies.argmax(0)
        loop = waves * blocks * copies.max(0)
        stores = tile_m * tile_n * g["d_bytes"] / store_rate / split
        shown = np.where(pingpong, hidden, 1.0)
        parts = np.where(split > 1, tile_m * tile_n * 4 * (split - 1) / split / exchange_rate, 0)
        waits = np.where(split > 1, exchange, 0)
        epilogue = (stores + overhead) * shown + waits + parts
        clocks = loop + waves * epilogue + launch + skew * (cluster - 1)

        def slopes(weight: Floats) -> Floats:
            looped = weight * loop
            by_wave = weight * waves
            scalars = [
                -looped[slowest == 1].sum(),
                -looped[slowest == 2].sum(),
                -(by_wave * stores * shown).sum(),
                (by_wave * shown).sum() * overhead,
                looped[slowest == 3].sum(),
                weight.sum() * launch,
                (weight * (cluster - 1)).sum() * skew,
                (by_wave * (stores + overhead) * np.where(pingpong, hidden, 0)).sum(),
                (by_wave * waits).sum(),
                -(by_wave * parts).sum(),
            ]
            by_share = np.zeros((len(self.tiles), 3))
            for share in range(3):
                rows = (slowest == 0) & (mode >= share)
                by_share[:, share] = -np.bincount(at[rows], looped[rows], len(self.tiles))
            return np.concatenate([scalars, by_share.ravel()])

        return clocks, slopes


def efficiency(of: Kernels, clocks: Floats) -> Floats:
    """The share of the tensor cores' rate that these clocks of each GEMM are."""
    macs: Floats = of.gemms["own"].prod(1, dtype=float)
    peak: Ints = MACS_PER_CLOCK * np.maximum(1, of.gemms["sms"])
    return macs / peak / clocks


def library_terms(of: Kernels, clocks: Floats) -> Floats:
    """library_terms of cost_model.cpp: a line with bends in each of log2 m, n, k and the efficiency."""
    columns = [np.ones(len(clocks))]
    values = (*of.gemms["own"].T.astype(float), efficiency(of, clocks))
    all_bends = ((7, 9, 11, 13), (9, 11, 13), (8, 10, 12, 14), (-2, -1, -0.6))
    for value, bends in zip(values, all_bends, strict=True):
        x = np.log2(value)
        columns.append(x - bends[len(bends) // 2])
        columns += [np.maximum(0, x - bend) for bend in bends]
    return np.stack(columns, axis=1)


def takes_library(of: Kernels, clocks: Floats, library: Floats) -> NDArray[np.bool_]:
    """Whether cuBLASLt's first suggestion is taken in place of a kernel of so many clocks."""
    margin = np.where(efficiency(of, clocks) < LARGE_EFFICIENCY, LIBRARY_MARGIN, 0)
    lag = library_terms(of, clocks) @ library
    return of.gemms["is_tensor"] & (of.gemms["suggestion"] > 0) & (lag < margin)
