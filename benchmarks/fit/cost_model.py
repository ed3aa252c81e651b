#!/usr/bin/env python3
"""Fits the constants of the model that chooses generated kernels where nothing was measured.

    float8-tune cost-model score --train builtin,all.f8db [--test left_out.jsonl] --csv kernels.csv
    cost_model.py kernels.csv [--folds 5] [-o runtime/gemm/cost_model_constants.cpp]

A GEMM's regret is the time of the model's choice among the kernels timed over the fastest one's, less one. The
fit minimises a smooth form of it, the regret that a choice by chance would have if better predictions were
likelier, from the constants of today on. What cuBLASLt's first suggestion takes is fitted after that, by ridge
regression. The table has the regret before and after, where layers (N, K) are held out, and of the test set.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import sys

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
from constants import PATH, Constants, Floats
from predicted import Kernels, Model, library_terms, takes_library

TEMPERATURE = 0.015  # a choice by chance takes predictions this near as alike
TAIL = 0.5  # the weight of the root mean square beside the mean
SHAPE = 0.05  # the weight of the predictions' own errors
PULL = 2e-4  # towards the start, where the GEMMs leave a constant open
MOST_LAG = 0.3  # of the library (log time): more changes no choice
ROWS_PER_TERM = 10  # fewer say nothing of the library
MOST_NEARBY, NEAREST, NO_VOTE, VOTE = 8, 0.05, 0.5, 0.12  # of voted_clocks()
NEW_TILE = (0.6, 0.45, 0.4)  # where the fit of one begins
NEVER_MEASURED = (0.6, 0.45, 0.45)  # what the model takes for its shares
COLUMNS = ("set", "number", "device", "sms", "problem", "gemm", "impl", "config", "ns")


def read(path: str) -> dict[str, Kernels]:
    """The sets "train" and "test" of the table."""
    sets: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    with open(path, newline="") as file:
        table = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
        if missing:
            raise ValueError(
                f"{path}: no column {missing[0]}; `float8-tune cost-model score --csv` writes it"
            )
        for row in table:
            sets.setdefault(row["set"], []).append(row)
    if not sets["train"]:
        raise ValueError(f"{path}: no row of the set train; see `float8-tune cost-model score`")
    try:
        return {name: Kernels.of(rows) for name, rows in sets.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def objective(logs: Floats, model: Model, kernels: Kernels, start: Floats) -> tuple[float, Floats]:
    """What is minimised, and its gradient, by the logarithms of the constants."""
    clocks, slopes = model.clocks(logs, kernels)
    predicted, first, count = np.log(clocks), kernels.first, kernels.count
    best = np.minimum.reduceat(predicted, first)
    weight = np.exp((best[kernels.gemm] - predicted) / TEMPERATURE)
    weight /= np.add.reduceat(weight, first)[kernels.gemm]
    lost = np.add.reduceat(weight * kernels.regret, first)
    by_lost = -weight * (kernels.regret - lost[kernels.gemm]) / TEMPERATURE
    off = predicted - np.log(kernels.ns)
    off -= (np.add.reduceat(off, first) / count)[kernels.gemm]
    missed = np.sqrt(np.add.reduceat(off**2, first) / count)
    by_missed = off / np.maximum(1e-12, count * missed)[kernels.gemm]
    rms = np.sqrt(np.mean(lost**2))
    moved = logs - start
    value = lost.mean() + TAIL * rms + SHAPE * missed.mean() + PULL * np.sum(moved**2)
    each = (1 + TAIL * lost / max(rms, 1e-12))[kernels.gemm] * by_lost + SHAPE * by_missed
    return value, slopes(each / len(count) / clocks) + 2 * PULL * moved


def fitted(kernels: Kernels, constants: Constants) -> Constants:
    """The constants with the least objective near these."""
    tiles = constants.tiles | {t: NEW_TILE for t in kernels.tiles if t not in constants.tiles}
    model = Model(list(tiles))
    start = model.logs(constants.scalars, tiles)
    found = optimize.minimize(
        objective, start, (model, kernels, start), "L-BFGS-B", jac=True, bounds=model.bounds
    )
    scalars, tiles = model.constants(found.x)
    fit = Constants(scalars, tiles, constants.library, constants.suggestions)
    fit.library = fitted_library(kernels, fit)
    return fit


def votes(kernels: Kernels, known: Kernels) -> Floats:
    """The share of nearby winners' votes for each kernel; the layer's own rows are left out."""
    shares = np.zeros(len(kernels.ns))
    winner = known.fastest()
    for i, near in enumerate(kernels.nearby(known, MOST_NEARBY)):
        of = slice(kernels.first[i], kernels.first[i] + kernels.count[i])
        weights = [1 / (octaves**2 + NEAREST) for _, octaves in near]
        for (other, _), weight in zip(near, weights, strict=True):
            same = kernels.rows["winner"][of] == known.rows["winner"][winner[other]]
            shares[of] += same * weight / (NO_VOTE + sum(weights))
    return shares


def voted(kernels: Kernels, constants: Constants, known: Kernels | None) -> Floats:
    tiles = {tile: NEVER_MEASURED for tile in kernels.tiles} | constants.tiles
    model = Model(list(tiles))
    clocks, _ = model.clocks(model.logs(constants.scalars, tiles), kernels)
    return clocks if known is None else clocks * np.exp(-VOTE * votes(kernels, known))


def fitted_library(kernels: Kernels, constants: Constants) -> Floats:
    """The coefficients of the library's lag behind the model's choices."""
    clocks = voted(kernels, constants, kernels)
    chosen = kernels.cheapest(clocks)
    suggestion = kernels.gemms["suggestion"]
    rows = kernels.gemms["is_tensor"] & (suggestion > 0)
    terms = library_terms(kernels, clocks[chosen])[rows]
    if len(terms) < ROWS_PER_TERM * terms.shape[1]:
        return constants.library
    lag = np.log(suggestion[rows] / kernels.ns[chosen][rows]).clip(-MOST_LAG, MOST_LAG)
    ridge = np.eye(terms.shape[1])
    ridge[0, 0] = 0
    return np.linalg.solve(terms.T @ terms + ridge, terms.T @ lag)


def regrets(
    kernels: Kernels, constants: Constants, known: Kernels | None = None
) -> tuple[Floats, Floats]:
    """Each GEMM's regret among generated kernels, and with cuBLASLt's where they were timed."""
    clocks = voted(kernels, constants, known)
    chosen = kernels.cheapest(clocks)
    takes = takes_library(kernels, clocks[chosen], constants.library)
    taken = np.where(takes, kernels.gemms["suggestion"], kernels.ns[chosen])
    has_library = kernels.gemms["library"] > 0
    either = np.minimum(kernels.best, kernels.gemms["library"])[has_library]
    return kernels.regret[chosen], taken[has_library] / either - 1


def held_out(kernels: Kernels, constants: Constants, folds: int) -> tuple[Floats, Floats]:
    """The regrets where each part of the layers is chosen for by a fit to the others."""
    layers = sorted(set(kernels.layers))
    fold_of = {layer: i % folds for i, layer in enumerate(layers)}
    fold: NDArray[np.int64] = np.array([fold_of[layer] for layer in kernels.layers])
    parts = []
    for i in range(folds):
        if (fold == i).any() and (fold != i).any():
            model = fitted(kernels.subset(fold != i), constants)
            parts.append(regrets(kernels.subset(fold == i), model))
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", help="the table of `float8-tune cost-model score --csv`")
    parser.add_argument("--folds", type=int, default=5, help="parts held out in turn; 1: none")
    parser.add_argument("--start", type=pathlib.Path, default=PATH, help="the constants before")
    parser.add_argument("-o", "--output", type=pathlib.Path, help="write the constants here")
    options = parser.parse_args()
    try:
        sets = read(options.kernels)
        before = Constants.read(options.start)
    except (OSError, ValueError) as error:
        sys.exit(f"cost_model.py: {error}")
    train, test = sets["train"], sets["test"]
    after = fitted(train, before)
    rows = {"before": regrets(train, before), "fitted": regrets(train, after)}
    rows["with rows of other layers"] = regrets(train, after, train)
    if options.folds > 1:
        rows[f"{options.folds} folds"] = held_out(train, before, options.folds)
    if len(test.ns):
        rows["held out, before"] = regrets(test, before)
        rows["held out, fitted"] = regrets(test, after)
    print(f"{'slower than the fastest':<28}{'GEMMs':>6}  median     p95  or cuBLASLt  p95")
    for name, (generated, either) in rows.items():
        figures = [
            100 * np.percentile(x, q) if len(x) else np.nan
            for x in (generated, either)
            for q in (50, 95)
        ]
        print(f"{name:<28}{len(generated):>6}" + "".join(f"{f:>6.1f} %" for f in figures))
    after.write(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
