"""Draws a picture of a scaling measurement, if matplotlib is installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from paceline.bench.scaling import Scaling
from paceline.errors import PacelineError

SUFFIXES = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Raise, before minutes are spent on measuring, if a picture could not be written.

    Raises:
        PacelineError: PL623 for another kind of file, PL624 without matplotlib, PL625 where the folder is
            missing or not writable.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise PacelineError(
            "PL623",
            saw=f"--plot {path}.",
            rule=f"The extension of the name selects the format: {', '.join(SUFFIXES)}.",
            fix=f"Write for example --plot {path.with_suffix('.png')}.",
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise PacelineError(
            "PL624",
            saw="--plot, and matplotlib is not installed.",
            rule="Pictures are drawn with matplotlib, which nothing else needs.",
            fix="Run `pip install matplotlib`, or leave --plot out: bars are printed in any case.",
        )
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise PacelineError(
            "PL625",
            saw=f"--plot {path}: "
            + (
                f"{folder} is not a folder with write permission." if not path.is_dir() else "it is a folder."
            ),
            rule="The picture is written there at the end.",
            fix="Name a file in an existing folder with write permission.",
        )


def draw_scaling(scaling: Scaling, path: Path) -> None:
    """Draw throughput and efficiency by number of ranks into a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    ranks = [point.num_ranks for point in scaling.points]
    rates = [point.samples_per_s for point in scaling.points]
    below = [rate.median - rate.low for rate in rates]
    above = [rate.high - rate.median for rate in rates]
    left.plot(ranks, [rates[0].median * n / ranks[0] for n in ranks], "--", color="0.6", label="linear")
    left.errorbar(
        ranks, [rate.median for rate in rates], [below, above], marker="o", capsize=3, label="measured"
    )
    left.set(xlabel="ranks", ylabel="samples/s", xticks=ranks)
    left.set_ylim(bottom=0)
    left.legend()
    shares = [point.efficiency for point in scaling.points]
    right.plot(ranks, [p.best_efficiency for p in scaling.points], "--", color="0.6", label="at best")
    right.errorbar(
        ranks,
        [share.median for share in shares],
        [[share.median - share.low for share in shares], [share.high - share.median for share in shares]],
        marker="o",
        capsize=3,
        label="measured",
    )
    right.set(xlabel="ranks", ylabel=f"efficiency against {ranks[0]}", xticks=ranks)
    right.set_ylim(bottom=0)
    right.legend()
    kind = "weak: the batch grows with the ranks" if scaling.is_weak else "strong: the same batch shared out"
    figure.suptitle(
        f"{scaling.num_parameters / 1e6:.3g}M parameters, {scaling.device}, {kind}, "
        f"{scaling.threads_per_rank} thread(s) per rank"
    )
    figure.savefig(path)
