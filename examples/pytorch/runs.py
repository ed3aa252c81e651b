"""What a training run leaves: a CSV of its steps, plots, and comparisons of several runs."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import re
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


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    name: str
    runs: list[Run]

    @property
    def steps(self) -> list[int]:
        return self.runs[0].steps

    @property
    def losses(self) -> list[tuple[float, ...]]:
        """The smoothed losses of all runs at each step."""
        return list(zip(*(run.smoothed for run in self.runs), strict=True))

    @property
    def loss(self) -> float:
        """The mean of the final smoothed losses."""
        return statistics.fmean(self.losses[-1])

    @property
    def spread(self) -> float | None:
        """Their standard deviation, None of one run."""
        return statistics.stdev(self.losses[-1]) if len(self.runs) > 1 else None

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(run.tokens_per_s for run in self.runs)


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Returns groups by name; the runs NAME-seed1, NAME-seed2 are those of NAME."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        name = re.sub(r"-seed\d+$", "", run.name)
        groups.setdefault(name, []).append(run)
    for name, members in groups.items():
        if any(run.steps != members[0].steps for run in members):
            raise ValueError(f"the runs of {name} have unlike steps")
    return [Group(name, members) for name, members in groups.items()]


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


def plot(groups: Sequence[Group], path: pathlib.Path) -> None:
    """Draws smoothed losses and tokens per second over the steps, where matplotlib is installed.

    The loss of a group is the mean of its runs, between the least and the largest.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        print(f"matplotlib is not installed, so there is no {path}")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (of_loss, of_speed) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for group in groups:
        losses = group.losses
        means = [statistics.fmean(each) for each in losses]
        (line,) = of_loss.plot(group.steps, means, label=group.name, linewidth=1)
        if len(group.runs) > 1:
            ends = ([min(each) for each in losses], [max(each) for each in losses])
            of_loss.fill_between(group.steps, *ends, color=line.get_color(), alpha=0.2)
        for run in group.runs:
            speeds = [speed for _, _, speed in run.rows]
            of_speed.plot(run.steps, speeds, color=line.get_color(), linewidth=1)
    of_loss.set(xlabel="step", ylabel="smoothed loss", yscale="log")
    of_speed.set(xlabel="step", ylabel="tokens/s", ylim=(0, None))
    of_loss.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    print(f"plot: {path}")


def print_comparison(groups: Sequence[Group]) -> None:
    """Prints final smoothed losses and speeds, and what they are to those of the first group."""
    first = groups[0]
    width = max(len("run"), *(len(group.name) for group in groups))
    print(
        f"{'run':{width}}  seeds   steps     loss   spread  to first   tokens/s  to first",
    )
    for group in groups:
        spread = "-" if group.spread is None else f"{group.spread:.4f}"
        print(
            f"{group.name:{width}}  {len(group.runs):5}  {len(group.steps):6}  {group.loss:7.4f}"
            f"  {spread:>7}  {100 * (group.loss / first.loss - 1):+7.2f}%"
            f"  {group.tokens_per_s:9.0f}  {group.tokens_per_s / first.tokens_per_s:8.3f}"
        )
