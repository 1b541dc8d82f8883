"""Simulates a schedule: when each rank does what, its idle share, and the activations that it keeps.

A rank does its actions in order. Each begins when the rank is free and what the action needs has arrived. A
microbatch's activations on a stage are kept from the end of its forward to the end of its backward, or of its
gradients of weights if these are apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.pipeline.schedule import Action, ActionKind, Schedule

# Exact for whole numbers, so that shares can be compared with formulas.
Time = float


@dataclass(frozen=True)
class Costs:
    """Durations of actions, in any unit, and what a microbatch keeps.

    Attributes:
        forward, input, weight: by stage, or one number for all.
        backward: of a whole one, in the same way; default: `input + weight`.
        message: from one rank to another.
        back: the same of gradients; default: `message`.
        activations: of one microbatch by stage, in any unit.
    """

    forward: Time | Sequence[Time] = 1
    input: Time | Sequence[Time] = 1
    weight: Time | Sequence[Time] = 1
    backward: Time | Sequence[Time] | None = None
    message: Time = 0
    back: Time | None = None
    activations: float | Sequence[float] = 1

    def list_durations(self, num_stages: int) -> dict[ActionKind, list[Time]]:
        """Return how long actions take, by kind and stage."""
        ways = (self.forward, self.input, self.weight)
        forward, own, weight, whole = (
            [each] * num_stages if isinstance(each, int | float) else list(each)
            for each in (*ways, 0 if self.backward is None else self.backward)
        )
        if self.backward is None:
            whole = [a + b for a, b in zip(own, weight, strict=True)]
        return {
            ActionKind.FORWARD: forward,
            ActionKind.INPUT: own,
            ActionKind.WEIGHT: weight,
            ActionKind.BACKWARD: whole,
        }


@dataclass(frozen=True, slots=True)
class Span:
    """The time of one action."""

    action: Action
    start: Time
    end: Time


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Attributes:
        spans: by rank, in order.
        total: the time of the step.
        stuck: the actions at which ranks wait for ever, by rank; empty if the schedule ends.
    """

    spans: tuple[tuple[Span, ...], ...]
    total: Time
    costs: Costs
    stuck: dict[int, Action]

    @cached_property
    def most_kept(self) -> tuple[float, ...]:
        """The most activations that each rank keeps at once."""
        return tuple(count_kept(own, self.costs) for own in self.spans)

    @property
    def busy(self) -> Time:
        """The time that all ranks together compute."""
        return sum(span.end - span.start for own in self.spans for span in own)

    @property
    def idle_share(self) -> float:
        """The share of the ranks' time in which they wait: the bubble."""
        return 1 - self.busy / (self.total * len(self.spans)) if self.total else 0.0

    @property
    def idle_over_busy(self) -> float:
        """The waiting time over the computing time."""
        return (self.total * len(self.spans) - self.busy) / self.busy if self.busy else 0.0


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Return when each action runs.

    Args:
        schedule: one that cannot end is simulated up to where its ranks wait for each other.
        costs: of the actions; default: 1 for each forward, gradient of inputs and gradient of weights.
    """
    costs = costs or Costs()
    durations, message = costs.list_durations(schedule.num_stages), costs.message
    back = message if costs.back is None else costs.back
    done: list[Time | None] = [None] * (1 + 2 * schedule.num_stages * schedule.num_microbatches)
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    places = [0] * schedule.num_ranks
    free: list[Time] = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(schedule.waits):
            for action, result, needed in own[places[rank] :]:
                start, way = free[rank], message if action.kind is ActionKind.FORWARD else back
                arrived = True
                for number, crosses in needed:
                    time = done[number]
                    if time is None:
                        arrived = False
                        break
                    start = max(start, time + way if crosses else time)
                if not arrived:
                    break
                free[rank] = done[result] = start + durations[action.kind][action.stage]
                spans[rank].append(Span(action, start, free[rank]))
                places[rank] += 1
                moved = True
    stuck = {
        rank: own[place]
        for rank, (own, place) in enumerate(zip(schedule.actions, places, strict=True))
        if place < len(own)
    }
    return Simulation(tuple(map(tuple, spans)), max(free), costs, stuck)


def count_kept(spans: Sequence[Span], costs: Costs) -> float:
    """Return the most activations that a rank keeps at once.

    Args:
        spans: of the rank, in order.
        costs: for the activations of a microbatch by stage.
    """
    split = {(s.action.stage, s.action.microbatch) for s in spans if s.action.kind is ActionKind.WEIGHT}
    now = most = 0.0
    for span in spans:
        action = span.action
        kept = costs.activations
        size = kept if isinstance(kept, int | float) else kept[action.stage]
        if action.kind is ActionKind.FORWARD:
            now += size
            most = max(most, now)
        elif action.kind is not ActionKind.INPUT or (action.stage, action.microbatch) not in split:
            now -= size
    return most
