"""Draws a simulated schedule: a line per rank, time to the right; as text for a terminal, or as SVG.

In a terminal each column is a unit of time: the number of the microbatch in a forward, lower-case letters
around it in a backward. The legend under the picture says which is which.
"""

from __future__ import annotations

from html import escape

from paceline.pipeline.schedule import ActionKind, Schedule
from paceline.pipeline.simulate import Simulation

_COLOURS = {
    ActionKind.FORWARD: "#4c78a8",
    ActionKind.BACKWARD: "#f58518",
    ActionKind.INPUT: "#f2a65a",
    ActionKind.WEIGHT: "#54a24b",
}
_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "gradient of the input",
    ActionKind.WEIGHT: "gradients of the weights",
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
    scale = min(28.0, (_MAX_WIDTH - _LEFT - 10) / max(simulation.total, 1))
    width = _LEFT + simulation.total * scale + 10
    height = _TOP + _ROW * schedule.num_ranks + 40
    idle = f"{100 * simulation.idle_share:.1f}% idle"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">{escape(schedule.name)}, {schedule.num_ranks} ranks, '
        f"{schedule.num_microbatches} microbatches: {idle}</text>",
    ]
    for rank, spans in enumerate(simulation.spans):
        top = _TOP + _ROW * rank
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
    parts += _draw_legend(schedule, height)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_legend(schedule: Schedule, height: float) -> list[str]:
    kinds = {action.kind for own in schedule.actions for action in own}
    parts, left = [], float(_LEFT)
    for kind in ActionKind:
        if kind in kinds:
            parts.append(
                f'<rect x="{left}" y="{height - 26}" width="14" height="14" fill="{_COLOURS[kind]}"/>'
            )
            parts.append(f'<text x="{left + 20}" y="{height - 15}">{_NAMES[kind]}</text>')
            left += 40 + 7 * len(_NAMES[kind])
    return parts


def _name_stage(stage: int) -> str:
    first, last = divmod(stage, 26)
    return (chr(ord("A") + first - 1) if first else "") + chr(ord("A") + last)
