#!/usr/bin/env python3
"""Fits how cuBLASLt's suggestions for a weight gradient in bf16 are ranked where none was measured.

    float8-tune bench suggestions --shapes shapes.csv --screen-ms 3 --csv h100.csv
    suggestions.py h100.csv [h200.csv ...] [--test left_out.csv] [--folds 5]
                   [-o runtime/gemm/cost_model_constants.cpp]

The coefficients of `suggestion_terms` (runtime/gemm/suggestions.cpp) come from a ridge regression of each
suggestion's lag behind the fastest of its GEMM, in log time. Only differences within a GEMM count. The table
says how much slower than the fastest the suggestion is that each ranking puts first.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import pathlib
import sys

import numpy as np

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
from constants import PATH, Constants, Floats

COLUMNS = (
    *("device", "sms", "d", "m", "n", "k", "heuristic"),
    *("algorithm", "tile_m", "tile_n", "cluster_m", "cluster_n", "split_k", "us"),
)
TILED, VECTOR = 66, 12  # kTiledAlgorithm and kVectorAlgorithm of runtime/gemm/suggestions.hpp
MOST_BEHIND = 0.5  # log time: how far behind a poor one is changes no choice
ROWS_PER_TERM = 10  # fewer do not tell a coefficient


@dataclasses.dataclass
class Gemm:
    """The suggestions of a gradient that were timed, in cuBLASLt's order."""

    layer: tuple[int, int]  # N, K
    us: Floats
    terms: Floats  # a row for each; NaN where it is not ranked
    is_vector: list[bool]

    def lost(self, chosen: int) -> float:
        return float(self.us[chosen] / self.us.min() - 1)

    def first(self, coefficients: Floats) -> int:
        """The one that the ranking puts first: a product of vectors, else the least lag."""
        if any(self.is_vector):
            return self.is_vector.index(True)
        lags = self.terms @ coefficients
        return 0 if np.isnan(lags).all() else int(np.nanargmin(lags))


def terms_of(row: dict[str, float]) -> list[float]:
    """suggestion_terms of runtime/gemm/suggestions.cpp; the gradient is N x K over M."""
    tile_m, tile_n, split = row["tile_m"], row["tile_n"], row["split_k"]
    cluster_m, cluster_n, sms = row["cluster_m"], row["cluster_n"], row["sms"]
    if row["algorithm"] != TILED or min(tile_m, tile_n, cluster_m, cluster_n) == 0:
        return [math.nan] * 12
    tiles_m, tiles_n = math.ceil(row["n"] / tile_m), math.ceil(row["k"] / tile_n)
    cluster, area = cluster_m * cluster_n, tile_m * tile_n
    ctas = math.ceil(tiles_m / cluster_m) * math.ceil(tiles_n / cluster_n) * cluster * split
    wave = max(1, sms // cluster) * cluster
    idle = math.log(math.ceil(ctas / wave) * wave * area / split / (row["n"] * row["k"]))
    waves = math.log2(tiles_m * tiles_n * split / max(1, sms))
    aspect = abs(math.log2(tile_m / tile_n))
    k = math.log2(row["m"])
    is_split = float(split > 1)

    def above(value: float, bend: float) -> float:
        return max(0.0, value - bend)

    return [
        *(idle, idle * above(k, 6), waves, above(waves, 1), above(waves, 1) * above(k, 6)),
        *(above(waves, 2), above(math.log2(area), 14), math.log2(area) * above(k, 10)),
        *(above(aspect, 1), above(aspect, 2) * above(k, 6), is_split, is_split * (k - 10)),
    ]


def read(path: str) -> list[Gemm]:
    """Reads a table; an error names its line and column."""
    groups: list[list[dict[str, float]]] = []
    last: tuple[object, ...] = ()
    with open(path, newline="") as file:
        table = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
        if missing:
            raise ValueError(
                f"{path}: no column {missing[0]}; `float8-tune bench suggestions --csv` writes it"
            )
        for fields in table:
            row = {}
            for name in (*COLUMNS[3:], "sms"):
                try:
                    row[name] = float(fields[name])
                except (TypeError, ValueError):
                    row[name] = math.nan
                if not 0 <= row[name] < 1e9 or (
                    row[name] == 0 and name in ("us", "m", "n", "k", "sms", "split_k")
                ):
                    raise ValueError(
                        f"{path}, line {table.line_num}: column {name} is {fields[name]!r}; "
                        "a positive number stands there"
                    )
            gemm = (fields["device"], fields["d"], row["m"], row["n"], row["k"])
            if gemm != last or row["heuristic"] <= groups[-1][-1]["heuristic"]:
                groups.append([])
            groups[-1].append(row)
            last = gemm
    return [
        Gemm(
            (int(rows[0]["n"]), int(rows[0]["k"])),
            np.array([row["us"] for row in rows]),
            np.array([terms_of(row) for row in rows]),
            [row["algorithm"] == VECTOR for row in rows],
        )
        for rows in groups
    ]


def fit(gemms: list[Gemm]) -> Floats:
    """The coefficients, by ridge regression within GEMMs."""
    terms, lags = [], []
    for gemm in gemms:
        ranked = ~np.isnan(gemm.terms[:, 0])
        if not ranked.any():
            continue
        lag = np.minimum(MOST_BEHIND, np.log(gemm.us / gemm.us.min()))[ranked]
        terms.append(gemm.terms[ranked] - gemm.terms[ranked].mean(0))
        lags.append(lag - lag.mean())
    rows = sum(map(len, lags))
    if rows < 12 * ROWS_PER_TERM:
        raise ValueError(
            f"{rows} ranked suggestions of {len(gemms)} GEMMs do not tell 12 coefficients; measure "
            f"{12 * ROWS_PER_TERM} and more with `float8-tune bench suggestions`"
        )
    a, b = np.concatenate(terms), np.concatenate(lags)
    return np.linalg.solve(a.T @ a + np.eye(12), a.T @ b)


def held_out(gemms: list[Gemm], folds: int) -> list[float]:
    """What each GEMM loses where its layer's part is ranked by a fit to the others."""
    fold_of = {layer: i % folds for i, layer in enumerate(sorted({g.layer for g in gemms}))}
    fits = [fit([g for g in gemms if fold_of[g.layer] != fold]) for fold in range(folds)]
    return [g.lost(g.first(fits[fold_of[g.layer]])) for g in gemms]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", nargs="+", help="tables of `float8-tune bench suggestions --csv`")
    parser.add_argument("--test", help="another one; of it the layers that train has not")
    parser.add_argument("--folds", type=int, default=5, help="parts held out in turn")
    parser.add_argument("--start", type=pathlib.Path, default=PATH, help="the constants before")
    parser.add_argument("-o", "--output", type=pathlib.Path, help="write the constants here")
    options = parser.parse_args()
    try:
        constants = Constants.read(options.start)
        gemms = [gemm for path in options.train for gemm in read(path)]
        fitted = fit(gemms)
        rows = {
            "cuBLASLt's first": [g.lost(0) for g in gemms],
            "ranked first, before": [g.lost(g.first(constants.suggestions)) for g in gemms],
            "ranked first, fitted": [g.lost(g.first(fitted)) for g in gemms],
            f"ranked first, {options.folds} folds": held_out(gemms, options.folds),
        }
        if options.test:
            layers = {gemm.layer for gemm in gemms}
            test = [gemm for gemm in read(options.test) if gemm.layer not in layers]
            rows["held out: cuBLASLt's first"] = [g.lost(0) for g in test]
            rows["held out: ranked first"] = [g.lost(g.first(fitted)) for g in test]
    except (OSError, ValueError) as error:
        sys.exit(f"suggestions.py: {error}")
    print(f"{'slower than the fastest':<28}{'GEMMs':>6}{'mean':>8}{'median':>8}{'p95':>8}")
    for name, lost in rows.items():
        figures = (np.mean(lost), np.median(lost), np.percentile(lost, 95))
        print(f"{name:<28}{len(lost):>6}" + "".join(f"{100 * f:>6.1f} %" for f in figures))
    constants.suggestions = fitted
    constants.write(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
