"""Formats what a person reads before and after a run."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import plotext

from paceline.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from paceline.recipe import Layout, Recipe

_MAX_WIDTH = 88


def describe_recipe(recipe: Recipe, path: str, folder: Path, layout: Layout, *, verbose: bool) -> str:
    """Return a line per section: the keys that differ from their defaults, or all of them."""
    lines = [
        f"{path} on {layout.num_ranks} rank{'s' if layout.num_ranks > 1 else ''} ({layout}), into {folder}"
    ]
    tables = recipe.model_dump(mode="json", exclude_none=True, exclude_defaults=not verbose)
    for section, table in tables.items():
        keys = "  ".join(f"{key}={_short(value)}" for key, value in table.items())
        if keys:
            lines.append(f"  {section:<11} {keys}")
    return "\n".join(lines)


def describe_summary(summary: dict[str, Any]) -> str:
    """Return the report at the end of a run, from `Summary` as a dict."""
    parts = [_plot_losses(summary["losses"]), _describe_quality(summary), _describe_speed(summary)]
    parts.append(_describe_files(Path(summary["folder"])))
    return "\n\n".join(part for part in parts if part)


def _plot_losses(losses: list[float | None]) -> str:
    points = [(number, loss) for number, loss in enumerate(losses, start=1) if loss is not None]
    if len(points) < 2:
        return ""
    # Means over spans of steps, two per column: a curve that a person can read.
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    size = -(-len(points) // (2 * width))
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    plotext.clf()
    plotext.theme("clear")
    plotext.plotsize(width, 16)
    numbers = [fmean(number for number, _ in part) for part in parts]
    plotext.plot(numbers, [fmean(loss for _, loss in part) for part in parts], marker="hd")
    plotext.title("training loss by step" + (f" (means of {size})" if size > 1 else ""))
    return str(plotext.uncolorize(plotext.build())).rstrip()


def _describe_quality(summary: dict[str, Any]) -> str:
    lines = [f"{'steps':<18} {summary['steps']}  ({format_count(summary['samples'])} samples)"]
    if summary["skipped"]:
        lines.append(
            f"{'skipped':<18} {summary['skipped']} steps with a loss or gradient that was not finite"
        )
    unit = " nats per token" if summary["tokens_per_s"] else ""
    for name, value in (summary["valid"] or {}).items():
        lines.append(f"{'validation ' + name:<18} {value:.4f}{unit if name == 'loss' else ''}")
    return "\n".join(lines)


def _describe_speed(summary: dict[str, Any]) -> str:
    if summary["step_s"] is None:
        return "the run was already complete; nothing was trained"
    rows = [
        ("step time", f"{format_seconds(summary['step_s'])} (median)"),
        ("samples/s", format_count(summary["samples_per_s"])),
        ("tokens/s", format_count(summary["tokens_per_s"]) if summary["tokens_per_s"] else None),
        ("communication", f"{summary['comm_share']:.1%} of the step time waiting for other ranks"),
        ("data", f"{summary['data_share']:.1%} of the step time waiting for samples"),
        ("FLOP/s", format_count(summary["flops_per_s"]) if summary["flops_per_s"] else None),
        ("MFU", f"{summary['mfu']:.1%}" if summary["mfu"] else None),
        (
            "memory",
            f"{format_bytes(summary['memory_bytes'])} peak on rank 0" if summary["memory_bytes"] else None,
        ),
    ]
    if summary["world_size"] == 1:
        rows = [row for row in rows if row[0] != "communication"]
    return "\n".join(f"{name:<18} {value}" for name, value in rows if value is not None)


def _describe_files(folder: Path) -> str:
    names = {
        "recipe.toml": "the resolved recipe",
        "metrics.jsonl": "one object per step",
        "evaluations.jsonl": "one object per evaluation",
        "checkpoints": "paceline checkpoint show " + str(folder),
        "tensorboard": "tensorboard --logdir " + str(folder / "tensorboard"),
        "logs": "what each rank printed",
    }
    rows = [f"  {name:<18} {what}" for name, what in names.items() if (folder / name).exists()]
    return "\n".join([f"files in {folder}", *rows]) if rows else f"{folder} is removed again (--dry-run)"


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_short, value)) if isinstance(value, list) else str(value)
