"""The cost model of runtime/gemm/cost_model.cpp over arrays of kernels, with its slopes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np
from constants import SCALARS, Floats, Tile
from numpy.typing import NDArray

Ints = NDArray[np.int64]
MACS_PER_CLOCK = 4096  # fp8 multiply-adds of one SM's tensor cores
BLOCK = 128  # elements of K in a stage
LIBRARY_MARGIN, LARGE_EFFICIENCY = 0.02, 0.75
CONFIG = re.compile(r"(\d+)x(\d+)s(\d+)c(\d+)x(\d+)(?:k(\d+))?w(\d+)(p?)g(\d+)")
GEMM = re.compile(r"\w+\.\w+\.(\w+)/([\w-]+)/(fast|precise)/m(\d+)n(\d+)k(\d+)")
LINEAR = re.compile(r"(\w+)/.*/m(\d+)n(\d+)k(\d+)/b\df\d")


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


@dataclasses.dataclass
class Kernels:
    """Generated kernels, one after the other by GEMM, and what is known of each GEMM."""

    ns: Floats  # of each kernel
    gemm: Ints  # whose kernel it is
    numbers: Ints  # tile_m, tile_n, stages, cluster_m, cluster_n, split_k, warpgroups, p, raster
    config: list[str]
    identity: NDArray[np.str_]  # the configuration but for its stages, which is what wins elsewhere
    shape: Ints  # of each GEMM: its own m, n, k
    linear: Ints  # its linear's
    sms: Ints
    kind: list[tuple[str, str, str]]  # device, operation, and types and scales
    mode: Ints  # of its shares: 0 fast, 1 precise, 2 block
    d_bytes: Ints
    library: Floats  # cuBLASLt's fastest; 0: not measured
    suggestion: Floats  # its first

    def __post_init__(self) -> None:
        count = np.bincount(self.gemm, minlength=len(self.sms))
        self.count = count
        self.first = np.concatenate([[0], np.cumsum(count)[:-1]]).astype(int)
        empty = len(self.ns) == 0
        self.best = np.zeros(0) if empty else np.minimum.reduceat(self.ns, self.first)
        self.regret = self.ns / self.best[self.gemm] - 1
        self.layers = [(int(n), int(k)) for _, n, k in self.linear]
        self.is_tensor = np.array(["/tensor" in kind[2] for kind in self.kind], bool)
        self.tiles: list[Tile] = [
            (m, n, groups, bool(p))
            for m, n, groups, p in np.unique(self.numbers[:, [0, 1, 6, 7]], axis=0).tolist()
        ]
        order = sorted(range(len(self.ns)), key=lambda i: self.config[i])
        self.by_key = np.empty(len(order), int)
        self.by_key[order] = range(len(order))

    @classmethod
    def of(cls, rows: list[dict[str, str]]) -> Kernels:
        """From rows of `float8-tune cost-model score --csv`."""
        gemms = {row["number"]: row for row in rows}
        place = {number: at for at, number in enumerate(gemms)}
        own = [_matched(GEMM, row, "gemm") for row in gemms.values()]
        linears = [_matched(LINEAR, row, "problem") for row in gemms.values()]
        library: list[dict[str, float]] = [{} for _ in gemms]
        kernels = []
        for row in rows:
            at, ns = place[row["number"]], _positive(row, "ns")
            if row["impl"] == "cublaslt":
                library[at][row["config"]] = ns
                continue
            *sizes, pingpong, raster = _matched(CONFIG, row, "config")
            numbers = [*(int(size or 1) for size in sizes), int(pingpong == "p"), int(raster)]
            kernels.append((at, ns, numbers, row["config"]))
        kernels.sort(key=lambda kernel: kernel[0])
        if len({kernel[0] for kernel in kernels}) < len(gemms):
            raise ValueError("a GEMM has no generated kernel")
        return cls(
            ns=np.array([kernel[1] for kernel in kernels]),
            gemm=np.array([kernel[0] for kernel in kernels], int),
            numbers=np.array([kernel[2] for kernel in kernels], int).reshape(-1, 9),
            config=[kernel[3] for kernel in kernels],
            identity=np.array([re.sub(r"s\d+", "", kernel[3]) for kernel in kernels], str),
            shape=np.array([match[3:] for match in own], int).reshape(-1, 3),
            linear=np.array([match[1:] for match in linears], int).reshape(-1, 3),
            sms=np.array([_positive(row, "sms") for row in gemms.values()], int),
            kind=[
                (row["device"], linear[0], row["gemm"].rsplit("/", 1)[0])
                for row, linear in zip(gemms.values(), linears, strict=True)
            ],
            mode=np.array([2 if "block" in m[1] else int(m[2] == "precise") for m in own], int),
            d_bytes=np.array([4 if match[0] == "f32" else 2 for match in own], int),
            library=np.array([min(times.values(), default=0) for times in library], float),
            suggestion=np.array([times.get("h0", 0) for times in library], float),
        )

    def subset(self, chosen: NDArray[np.bool_]) -> Kernels:
        """The kernels of the chosen GEMMs."""
        rows = chosen[self.gemm]
        renumbered = np.cumsum(chosen) - 1
        return Kernels(
            ns=self.ns[rows],
            gemm=renumbered[self.gemm[rows]],
            numbers=self.numbers[rows],
            config=[name for name, kept in zip(self.config, rows, strict=True) if kept],
            identity=self.identity[rows],
            shape=self.shape[chosen],
            linear=self.linear[chosen],
            sms=self.sms[chosen],
            kind=[kind for kind, kept in zip(self.kind, chosen, strict=True) if kept],
            mode=self.mode[chosen],
            d_bytes=self.d_bytes[chosen],
            library=self.library[chosen],
            suggestion=self.suggestion[chosen],
        )

    def cheapest(self, clocks: Floats) -> Ints:
        """The kernel of each GEMM that is chosen; equals are ranked as cheapest_config ranks them."""
        area = self.numbers[:, 0] * self.numbers[:, 1]
        order = np.lexsort((self.by_key, self.numbers[:, 8], -area, clocks, self.gemm))
        cheapest: Ints = order[self.first]
        return cheapest

    def fastest(self) -> Ints:
        fastest: Ints = np.lexsort((np.arange(len(self.ns)), self.ns, self.gemm))[self.first]
        return fastest

    def nearby(self, known: Kernels, most: int) -> list[list[tuple[int, float]]]:
        """For each GEMM the nearest known ones of its kind in other layers, and their octaves."""
        groups: dict[tuple[str, str, str], list[int]] = {}
        for i, kind in enumerate(known.kind):
            groups.setdefault(kind, []).append(i)
        near = []
        for i, kind in enumerate(self.kind):
            others = [j for j in groups.get(kind, []) if known.layers[j] != self.layers[i]]
            octaves = np.linalg.norm(np.log2(known.linear[others] / self.linear[i]), axis=1)
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
        tile_m, tile_n, stages, cluster_m, cluster_n, split, groups, pingpong, _ = of.numbers.T
        m, n, k = of.shape[of.gemm].T
        sms = np.maximum(1, of.sms[of.gemm])
        cluster = cluster_m * cluster_n * split
        tiles = np.ceil(np.ceil(m / tile_m) / cluster_m) * np.ceil(np.ceil(n / tile_n) / cluster_n)
        clusters = np.maximum(1, sms // cluster)
        waves = np.ceil(tiles / clusters)
        blocks = np.ceil(np.ceil(k / BLOCK) / split)
        index = {tile: i for i, tile in enumerate(self.tiles)}
        at = np.array(
            [
                index[a, b, c, bool(p)]
                for a, b, c, p in zip(
                    tile_m.tolist(),
                    tile_n.tolist(),
                    groups.tolist(),
                    pingpong.tolist(),
                    strict=True,
                )
            ],
            int,
        )
        mode = of.mode[of.gemm]
        shares = np.exp(np.cumsum(logs[len(SCALARS) :].reshape(-1, 3), axis=1))
        math = tile_m * tile_n * BLOCK / MACS_PER_CLOCK / shares[at, mode]
        bytes_ = BLOCK * (tile_m / cluster_n + tile_n / cluster_m)
        from_l2 = bytes_ * np.minimum(tiles, clusters) * cluster / sms / l2
        copies = np.stack([math, from_l2, bytes_ / port, latency / stages])
        slowest = copies.argmax(0)
        loop = waves * blocks * copies.max(0)
        stores = tile_m * tile_n * of.d_bytes[of.gemm] / store_rate / split
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
    return of.shape.prod(1, dtype=float) / MACS_PER_CLOCK / np.maximum(1, of.sms) / clocks


def library_terms(of: Kernels, clocks: Floats) -> Floats:
    """library_terms of cost_model.cpp: a line with bends in each of log2 m, n, k and the efficiency."""
    columns = [np.ones(len(clocks))]
    values = (*of.shape.T.astype(float), efficiency(of, clocks))
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
    return of.is_tensor & (of.suggestion > 0) & (lag < margin)
