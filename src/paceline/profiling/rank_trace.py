"""The trace of one rank as data: its steps, phases, computation and collectives; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.own_code import describe_place
from paceline.profiling.intervals import NOTHING, Coverage, Spans, subtract, unite

DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"
COLLECTION, READING, HOST = "garbage collection", "reading values", "host"
CORE = "waiting for a core"
"""A part of every phase: the thread could run, and others used all cores."""

# The phases of a step. Where several cover an instant, it belongs to the first of them: garbage is collected,
# and values are read (`.item()`), inside of another phase.
PHASES = (COLLECTION, READING, DATA, OPTIMIZER, BACKWARD, FORWARD)

UNSCHEDULED: NDArray[np.int64] = np.empty((0, 3), dtype=np.int64)

# Between two ranks: matched with nobody's.
TRANSFERS = ("send", "recv")
# Operations that no rank leaves before all ranks of the group have entered.
MEETINGS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})


@dataclass(frozen=True, slots=True)
class TracedCollective:
    """One rank's part in a collective, or in a transfer between two ranks.

    Attributes:
        operation: such as `all_reduce`.
        sequence: empty for collectives; another name for what is not matched, such as sends and receives.
        number: in that sequence of the group; the same on all of its ranks.
        issued_ns: the rank's arrival. On CPU it is the call, as threads may begin later; on CUDA, where the
            host runs ahead, the begin of the kernel.
        end_ns: the end of the rank's part.
        num_bytes: size of the rank's input; `None` if unknown.
        at: the user's line that issued it; empty if unknown.
    """

    operation: str
    group: str
    sequence: str
    number: int
    issued_ns: int
    end_ns: int
    num_bytes: int | None = None
    at: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """The key that the parts of one collective share on all ranks."""
        return self.group, self.sequence, self.number


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One optimizer step of a rank.

    Attributes:
        number: the same on all ranks.
        begin_ns: the end of the optimizer step before.
        end_ns: the end of this optimizer step.
    """

    number: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class CodePlace:
    """A line of the user's code, and the module whose forward was running.

    Attributes:
        file, line, function: the innermost of the user's.
        module: its name in the outermost module, or its class; empty outside of a forward.
    """

    file: str
    line: int
    function: str
    module: str = ""

    def __str__(self) -> str:
        return describe_place(self.file, self.line, self.function)


@dataclass(frozen=True, slots=True)
class Reducer:
    """A DDP module of the rank.

    Attributes:
        finds_unused: whether it searches the graph for unused parameters before each backward.
        unused_bytes: of the parameters that a backward did not use.
        is_constant: whether all backwards so far used the same parameters.
    """

    finds_unused: bool
    unused_bytes: int
    is_constant: bool


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """What a GPU does besides computing and communicating.

    Attributes:
        copies: disjoint spans of copies and fills of memory.
        syncs: disjoint spans in which the host waits for the device.
        kernels: the begin of each kernel, sorted.
    """

    copies: Spans
    syncs: Spans
    kernels: NDArray[np.int64]

    def move(self, by_ns: int) -> DeviceTrace:
        """Return it with all times moved."""
        return DeviceTrace(self.copies + by_ns, self.syncs + by_ns, self.kernels + by_ns)


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank; all times are nanoseconds on the clock of the first rank.

    Attributes:
        rank: global.
        world_size: ranks of the job; 0 if unknown.
        steps: in order, each beginning where the one before ended or later.
        phases: by name of `PHASES`, disjoint spans.
        compute: disjoint spans of kernels; on CPU the time of the loop in forward, backward and optimizer,
            without its waiting for collectives.
        collectives: in order of issue.
        host: identifies the machine and its start, so the clock; empty if unknown.
        clock_error_ns: how far the times may be off those of the first rank.
        slowdown: how much longer a step took while it was recorded, such as 1.2; `None` if unknown.
        remarks: facts that limit the conclusions.
        samples: rows of an instant and the number of the place at which the training loop was then.
        collections: rows of begin, end and number of the place of each garbage collection in the loop.
        places: lines of the user's, with the module that was running.
        scheduling: rows of an instant, and for how long the training loop had run, and waited for a core,
            until then; no rows if unknown.
        is_loader_inline: whether a loader without workers loaded data in the loop's own thread.
        members: the global ranks of its process groups, by name; those that are missing are unknown.
        reducers: its DDP modules, if Paceline recorded the trace.
        device: what a GPU's trace has besides; `None` on CPU.
    """

    rank: int
    world_size: int
    steps: tuple[TracedStep, ...]
    phases: Mapping[str, Spans]
    compute: Spans
    collectives: tuple[TracedCollective, ...]
    host: str = ""
    clock_error_ns: int = 0
    slowdown: float | None = None
    remarks: tuple[str, ...] = field(default=())
    samples: Spans = field(default_factory=lambda: NOTHING)
    collections: NDArray[np.int64] = field(default_factory=lambda: UNSCHEDULED)
    places: tuple[CodePlace, ...] = ()
    scheduling: NDArray[np.int64] = field(default_factory=lambda: UNSCHEDULED)
    reducers: tuple[Reducer, ...] = ()
    is_loader_inline: bool = False
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    device: DeviceTrace | None = None


def divide_time(trace: RankTrace, elsewhere: Spans) -> dict[str, Coverage]:
    """Return the phases of a rank, divided so that none overlaps another.

    Args:
        elsewhere: disjoint spans that belong to no phase.
    """
    taken, divided = elsewhere, {}
    for phase in PHASES:
        spans = trace.phases.get(phase)
        if spans is not None and len(spans):
            divided[phase] = Coverage(subtract(spans, taken))
            taken = unite(taken, spans)
    return divided
