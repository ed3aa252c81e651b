"""What a training run leaves: a CSV of its steps, plots, and comparisons of several runs."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import statistics
from collections.abc import Sequence

COLUMNS = ("step", "loss", "tokens_per_s")
Row = tuple[int, float, float]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's name, and a row for each step."""

    name: str
    rows: list[Row]

    @property
    def steps(self) -> list[int]:
        return [step for step, _, _ in self.rows]

    @property
    def smoothed(self) -> list[float]:
        """The mean loss of the last 5 % of the run's steps, at each step."""
        window = max(1, len(self.rows) // 20)
        losses = [loss for _, loss, _ in self.rows]
        return [
            statistics.fmean(losses[max(0, end - window) : end])
            for end in range(1, len(losses) + 1)
        ]

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(speed for _, _, speed in self.rows)


def write_csv(path: pathlib.Path, rows: Sequence[Row]) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])


def read_csv(path: pathlib.Path) -> Run:
    """Reads a run; its name is that of its folder."""
    try:
        with open(path, newline="") as file:
            lines = csv.reader(file)
            if tuple(next(lines, ())) != COLUMNS:
                raise ValueError
            rows = [(int(step), float(loss), float(speed)) for step, loss, speed in lines]
    except (csv.Error, ValueError):
        raise ValueError(f"{path} is no CSV of a run, with columns {', '.join(COLUMNS)}") from None
    if not rows:
        raise ValueError(f"{path} has no steps")
    return Run(path.resolve().parent.name, rows)


def plot(runs: Sequence[Run], path: pathlib.Path) -> None:
    """Draws smoothed losses and tokens per second over the steps, where matplotlib is installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print(f"matplotlib is not installed, so there is no {path}")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (of_loss, of_speed) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for run in runs:
        of_loss.plot(run.steps, run.smoothed, label=run.name, linewidth=1)
        of_speed.plot(run.steps, [speed for _, _, speed in run.rows], label=run.name, linewidth=1)
    of_loss.set(xlabel="step", ylabel="smoothed loss", yscale="log")
    of_speed.set(xlabel="step", ylabel="tokens/s", ylim=(0, None))
    of_loss.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    print(f"plot: {path}")


def print_comparison(runs: Sequence[Run]) -> None:
    """Prints final smoothed losses and speeds, and what they are to those of the first run."""
    first = runs[0]
    width = max(len("run"), *(len(run.name) for run in runs))
    print(f"{'run':{width}}  {'steps':>6}  {'loss':>7}  {'to first':>8}  {'tokens/s':>9}  to first")
    for run in runs:
        loss = run.smoothed[-1]
        print(
            f"{run.name:{width}}  {len(run.rows):6}  {loss:7.4f}"
            f"  {100 * (loss / first.smoothed[-1] - 1):+7.2f}%"
            f"  {run.tokens_per_s:9.0f}  {run.tokens_per_s / first.tokens_per_s:8.3f}"
        )
