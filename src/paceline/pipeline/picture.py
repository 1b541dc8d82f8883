"""Draws simulated schedules: a line per rank, time to the right; as text or as SVG.

In a terminal each column is a unit of time: the number of the microbatch in a forward, lower-case letters
around it in a backward. The legend under the picture says which is which.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from paceline.errors import PacelineError
from paceline.pipeline.schedule import KIND_NAMES, ActionKind, Schedule
from paceline.pipeline.simulate import Simulation

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


def draw_svg(schedule: Schedule, simulation: Simulation) -> str:
    """Return the picture as an SVG document."""
    scale = min(28.0, (_MAX_WIDTH - _LEFT - 10) / simulation.total) if simulation.total else 1.0
    width, height = _LEFT + simulation.total * scale + 10, _TOP + _ROW * schedule.num_ranks + 40
    title = (
        f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches: "
        f"{100 * simulation.idle_share:.1f}% idle"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">{escape(title)}</text>',
    ]
    for rank, spans in enumerate(simulation.spans):
        top = _TOP + _ROW * rank
        parts.append(f'<text x="6" y="{top + 17}">rank {rank}</text>')
        is_divided = len(schedule.list_stages(rank)) > 1
        for span in spans:
            action, left = span.action, _LEFT + span.start * scale
            long = (span.end - span.start) * scale
            # Later stages of a rank are darker.
            opacity = 0.55 if is_divided and action.stage < schedule.num_ranks else 1.0
            parts.append(
                f'<rect x="{left:.2f}" y="{top}" width="{long:.2f}" height="{_BAR}" stroke="white" '
                f'fill="{_COLOURS[action.kind]}" fill-opacity="{opacity:.2f}"><title>{action}</title></rect>'
            )
            if long >= 12:
                parts.append(
                    f'<text x="{left + long / 2:.2f}" y="{top + 17}" text-anchor="middle" fill="black">'
                    f"{action.microbatch}</text>"
                )
    return "\n".join([*parts, *_draw_legend(schedule, height), "</svg>"]) + "\n"


def _draw_legend(schedule: Schedule, height: float) -> list[str]:
    kinds = {action.kind for own in schedule.actions for action in own}
    parts, left = [], float(_LEFT)
    for kind in ActionKind:
        if kind in kinds:
            parts.append(
                f'<rect x="{left}" y="{height - 26}" width="14" height="14" fill="{_COLOURS[kind]}"/>'
            )
            parts.append(f'<text x="{left + 20}" y="{height - 15}">{KIND_NAMES[kind]}</text>')
            left += 40 + 7 * len(KIND_NAMES[kind])
    return parts


def write_svg(path: Path, text: str) -> None:
    """Write a picture; raise PL477 if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PacelineError(
            "PL477",
            saw=f"{path} cannot be written: {error.strerror or 'the write failed'}.",
            rule="--svg names a file in a folder that exists.",
            fix="Choose another path, or make its folder.",
        ) from None


def _name_stage(stage: int) -> str:
    first, last = divmod(stage, 26)
    return (chr(ord("A") + first - 1) if first else "") + chr(ord("A") + last)
