"""Records when the ranks of a pipeline do their actions, to compare a run with its simulation.

Times are those of the monotonic clock, which the processes of one machine share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

from paceline.pipeline.schedule import Action, ActionKind
from paceline.pipeline.simulate import Costs, Simulation, Span, count_kept


class Timeline:
    """The actions of one rank, with their times in seconds.

    An action begins when what it needs has arrived, and ends when its results have been given to the library
    that sends them.

    Args:
        wait_for_device: returns when the device has done its work; called before and after every action.

    Attributes:
        spans: in order.
    """

    def __init__(self, wait_for_device: Callable[[], None]) -> None:
        self.spans: list[Span] = []
        self._wait_for_device = wait_for_device

    @contextmanager
    def measuring(self, action: Action) -> Iterator[None]:
        """Record the action that runs inside."""
        self._wait_for_device()
        start_s = time.perf_counter()
        yield
        self._wait_for_device()
        self.spans.append(Span(action, start_s, time.perf_counter()))


def join_spans(by_rank: Sequence[Sequence[Span]]) -> Simulation:
    """Return one step's run in the form of a simulation; its time 0 is the beginning of the first action.

    Args:
        by_rank: the spans of one step of every rank of a pipeline.
    """
    first = min(span.start for spans in by_rank for span in spans)
    moved = tuple(
        tuple(Span(span.action, span.start - first, span.end - first) for span in spans) for spans in by_rank
    )
    total = max(span.end for spans in moved for span in spans)
    return Simulation(moved, total, tuple(count_kept(spans, Costs()) for spans in moved), {})


def measure_costs(run: Simulation) -> Costs:
    """Return the mean times of a run's actions, by kind and stage."""
    times: dict[tuple[ActionKind, int], list[float]] = {}
    for spans in run.spans:
        for span in spans:
            action = span.action
            times.setdefault((action.kind, action.stage), []).append(span.end - span.start)
    num_stages = 1 + max(stage for _, stage in times)

    def by_stage(kind: ActionKind) -> list[float]:
        return [fmean(times.get((kind, stage), [0.0])) for stage in range(num_stages)]

    return Costs(
        forward=by_stage(ActionKind.FORWARD),
        input=by_stage(ActionKind.INPUT),
        weight=by_stage(ActionKind.WEIGHT),
        backward=by_stage(ActionKind.BACKWARD),
    )
