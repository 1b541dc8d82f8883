"""Draws simulated schedules: a line per rank, time to the right.

In a terminal each column is a unit of time: the number of the microbatch in a forward, lower-case letters
around it in a backward. The legend under the picture says which is which.
"""

from __future__ import annotations

from paceline.pipeline.schedule import ActionKind, Schedule
from paceline.pipeline.simulate import Simulation


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


def _name_stage(stage: int) -> str:
    first, last = divmod(stage, 26)
    return (chr(ord("A") + first - 1) if first else "") + chr(ord("A") + last)
