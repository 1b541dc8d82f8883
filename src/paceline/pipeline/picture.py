"""Draws schedules, simulated or measured: a line per rank, time to the right; as text or as SVG.

In a terminal each column is a unit of time: the number of the microbatch in a forward, lower-case letters
around it in a backward. The legend under the picture says which is which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from paceline.errors import PacelineError
from paceline.pipeline.schedule import KIND_NAMES, ActionKind, Schedule
from paceline.pipeline.simulate import Simulation, Span

_COLOURS = {
    ActionKind.FORWARD: "#4c78a8",
    ActionKind.BACKWARD: "#f58518",
    ActionKind.INPUT: "#f2a65a",
    ActionKind.WEIGHT: "#54a24b",
}
_ROW, _BAR, _LEFT, _TOP = 34, 26, 64, 30
_MAX_WIDTH = 1600


def draw_text(schedule: Schedule, simulation: Simulation, width: int = 120) -> str:
    """Return the picture as lines of text, cut off at `width` columns.

    Args:
        schedule: that was simulated.
        simulation: its times; of whole units, such as with the default costs.
        width: columns.
    """
    cell = 1 + max(len(str(schedule.num_microbatches - 1)), 1) + (2 if schedule.num_stages > 26 else 1)
    lines = []
    for rank, spans in enumerate(simulation.spans):
        line = ""
        for span in spans:
            line = line.ljust(round(span.start) * cell, ".")
            action = span.action
            letter = _name_stage(action.stage)
            # Upper case for forwards, as the only work that adds activations.
            letter = letter if action.kind is ActionKind.FORWARD else letter.lower()
            mark = "'" if action.kind is ActionKind.WEIGHT else " "
            word = f"{letter}{action.microbatch}{mark}"
            line += word.ljust((round(span.end) - round(span.start)) * cell, "-")
        lines.append(f"rank {rank:<3}{line.ljust(round(simulation.total) * cell, '.')}")
    shown = [line if len(line) <= width else line[: width - 1] + ">" for line in lines]
    legend = "A0 forward of microbatch 0 on stage A (the first), a0 its backward"
    if schedule.splits_backward:
        legend += " or the gradient of its input, a0' the gradients of its weights"
    return "\n".join([*shown, f"{legend}; dots: idle"]) + "\n"


def draw_times(runs: Sequence[tuple[str, Simulation]], width: int = 120) -> str:
    """Return runs one under the other, to one scale of time, as lines of text.

    Args:
        runs: with a title for each, such as a plan and what was measured.
        width: columns.
    """
    columns = width - len("rank 000")
    scale = columns / max(run.total for _, run in runs)
    lines = []
    for title, run in runs:
        lines.append(f"{title}: {run.idle_share:.1%} idle")
        for rank, spans in enumerate(run.spans):
            line = ""
            for span in spans:
                start, end = round(span.start * scale), round(span.end * scale)
                line = line.ljust(start, ".") + _name_span(span, end - max(start, len(line)))
            lines.append(f"rank {rank:<3}{line.ljust(round(run.total * scale), '.')}")
    return "\n".join(lines) + "\n"


def _name_span(span: Span, num_columns: int) -> str:
    """Return an action's letter and number in so many columns, or the part that fits."""
    action = span.action
    letter = _name_stage(action.stage)
    letter = letter if action.kind is ActionKind.FORWARD else letter.lower()
    mark = "'" if action.kind is ActionKind.WEIGHT else ""
    return f"{letter}{action.microbatch}{mark}".ljust(num_columns, "-")[: max(num_columns, 0)]


def draw_svg(schedule: Schedule, simulation: Simulation) -> str:
    """Return the picture as an SVG document."""
    title = f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
    return draw_panels([(title, schedule, simulation)], most_per_unit=28.0)


def draw_panels(
    panels: Sequence[tuple[str, Schedule, Simulation]], *, most_per_unit: float = math.inf
) -> str:
    """Return runs one under the other, to one scale of time, as an SVG document.

    Args:
        panels: title, schedule and run of each; the titles are completed by the idle share.
        most_per_unit: the most pixels for a unit of time.
    """
    longest = max(run.total for _, _, run in panels)
    scale = min(most_per_unit, (_MAX_WIDTH - _LEFT - 10) / longest) if longest else 1.0
    width = _LEFT + longest * scale + 10
    heights = [_TOP + _ROW * schedule.num_ranks for _, schedule, _ in panels]
    height = sum(heights) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
    ]
    top = 0
    for (title, schedule, run), own in zip(panels, heights, strict=True):
        parts += _draw_panel(f"{title}: {100 * run.idle_share:.1f}% idle", schedule, run, top, scale)
        top += own
    parts += _draw_legend([schedule for _, schedule, _ in panels], height)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_panel(title: str, schedule: Schedule, run: Simulation, above: int, scale: float) -> list[str]:
    parts = [f'<text x="{_LEFT}" y="{above + 18}" font-size="13">{escape(title)}</text>']
    for rank, spans in enumerate(run.spans):
        top = above + _TOP + _ROW * rank
        parts.append(f'<text x="6" y="{top + 17}">rank {rank}</text>')
        for span in spans:
            action, left = span.action, _LEFT + span.start * scale
            long = (span.end - span.start) * scale
            # Later stages of a rank are darker.
            opacity = 1 - 0.45 * (action.stage // schedule.num_ranks == 0) * (
                len(schedule.list_stages(rank)) > 1
            )
            parts.append(
                f'<rect x="{left:.2f}" y="{top}" width="{long:.2f}" height="{_BAR}" stroke="white" '
                f'fill="{_COLOURS[action.kind]}" fill-opacity="{opacity:.2f}"><title>{action}</title></rect>'
            )
            if long >= 12:
                parts.append(
                    f'<text x="{left + long / 2:.2f}" y="{top + 17}" text-anchor="middle" fill="black">'
                    f"{action.microbatch}</text>"
                )
    return parts


def _draw_legend(schedules: Sequence[Schedule], height: float) -> list[str]:
    kinds = {action.kind for schedule in schedules for own in schedule.actions for action in own}
    parts, left = [], float(_LEFT)
    for kind in ActionKind:
        if kind in kinds:
            parts.append(
                f'<rect x="{left}" y="{height - 26}" width="14" height="14" fill="{_COLOURS[kind]}"/>'
            )
            parts.append(f'<text x="{left + 20}" y="{height - 15}">{KIND_NAMES[kind]}</text>')
            left += 40 + 7 * len(KIND_NAMES[kind])
    return parts


def check_svg(path: Path) -> None:
    """Raise PL477 for a picture that could not be written, before minutes are spent on measuring."""
    if path.is_dir() or not path.parent.is_dir():
        raise _picture_error(path, "it is a folder" if path.is_dir() else "there is no such folder")


def write_svg(path: Path, text: str) -> None:
    """Write a picture; raise PL477 if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _picture_error(path, error.strerror or "the write failed") from None


def _picture_error(path: Path, reason: str) -> PacelineError:
    return PacelineError(
        "PL477",
        saw=f"{path} cannot be written: {reason}.",
        rule="--svg names a file in a folder that exists.",
        fix="Choose another path, or make its folder.",
    )


def _name_stage(stage: int) -> str:
    first, last = divmod(stage, 26)
    return (chr(ord("A") + first - 1) if first else "") + chr(ord("A") + last)
