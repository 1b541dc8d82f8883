"""The data types that travel between the thread in a rank and the launcher.

JSON-able. A rank sends a `Beat` every second and a `Report` when it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.launching.ending.endings import Ending


@dataclass(frozen=True)
class Frame:
    """One line of a stack.

    Attributes:
        file: its path.
        line: from 1; 0 if unknown.
        function: its name.
        text: the line's source, without indentation; may be empty.
    """

    file: str
    line: int
    function: str
    text: str = ""


@dataclass(frozen=True)
class Group:
    """A process group as one of its members knows it.

    Attributes:
        name: torch's, the same on all members; `"0"` is the default group.
        label: what a person calls it: the axis of a mesh, the description given to `new_group`, or `"world"`.
        ranks: its members' global ranks, in the group's order.
    """

    name: str
    label: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A collective, or a send or receive, as one rank issued it.

    Attributes:
        group: name of the group.
        number: place in the group's sequence of collectives, from 1; sends and receives are numbered by
            themselves, per group and peer.
        operation: `all_reduce`, `broadcast`, `all_gather`, `reduce_scatter`, `barrier`, `send` ...
        sizes: shapes of its inputs.
        dtypes: of its inputs, as `float32`.
        reduce_op: `sum`, `max` ...; `None` if there is none or it is unknown.
        peer: global rank that it is from or to (send, recv), or its root (broadcast, reduce ...), where that
            is known; else `None`.
        done: whether it has completed on this rank.
        began_s: seconds since 1970.
        frames: who called it, innermost first.
        purpose: of a send or receive of a pipeline: `the gradient of microbatch 5 from stage 3 to stage 2`.
        module: whose parameters FSDP gathers or whose gradients it reduces; empty otherwise.
        splits: of an all_to_all, the elements for each rank of the group, and those expected from each; or
            the sum of both.
    """

    group: str
    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    reduce_op: str | None
    peer: int | None
    done: bool
    began_s: float
    frames: tuple[Frame, ...] = ()
    purpose: str = ""
    module: str = ""
    splits: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Stack:
    """The stack of one thread.

    Attributes:
        thread: its name; `MainThread` is the script's.
        frames: innermost first.
    """

    thread: str
    frames: tuple[Frame, ...]


Phase = Literal["starting", "joining", "running", "leaving"]


Effect = Literal["applied", "skipped", "raised", "inherited"]


@dataclass(frozen=True)
class NotFinite:
    """The first gradient of a rank that is not finite: infinite or no number.

    Attributes:
        number: of the backward pass, from 1; passes of this process through the parameters of its optimizers.
        time_s: seconds since 1970.
        effect: `"applied"` if it made the weights non-finite, `"skipped"` if a GradScaler or the script keeps
            skipping such steps, `"raised"` if an exception has ended the script in such a step,
            `"inherited"` if the weights were not finite before.
        parameter: where it began: the last one in the model whose gradient (for `"inherited"`: which itself)
            is not finite; empty where that is not known.
        kind: the class of its module.
        is_at_end: whether no parameter comes after it.
        frames: the user's line that called backward, innermost first.
    """

    number: int
    time_s: float
    effect: Effect
    parameter: str
    kind: str
    is_at_end: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class PlaceTime:
    """The time that a rank's main thread spent at a place.

    Attributes:
        seconds: estimated from samples.
        is_waiting: whether it waited for other ranks there.
        frames: its stack, innermost first, shortened: the user's own and some of the libraries'.
    """

    seconds: float
    is_waiting: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Pace:
    """The places of a rank's main thread, from samples.

    Attributes:
        samples: their number.
        places: where it was then; together they make up the time that the samples stand for.
    """

    samples: int
    places: tuple[PlaceTime, ...]


@dataclass(frozen=True)
class Fact:
    """Numbers of one rank, which the launcher compares with those of other ranks at the same event.

    Attributes:
        kind: which rules read it.
        event: its name, the same on all ranks that have it.
        ranks: those; empty if any may.
        passes: backward passes of this rank so far.
        values: JSON-able, by name.
        frames: the user's lines that led to it, innermost first.
    """

    kind: str
    event: str
    ranks: tuple[int, ...]
    passes: int
    values: Mapping[str, Any]
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Beat:
    """A regular sign of life of a rank.

    Attributes:
        rank: global.
        time_s: seconds since 1970.
        phase: `"starting"` before the script's first line, `"joining"` while it waits for the other ranks in
            `init_process_group`, then `"running"`, and `"leaving"` once the script has ended and the
            interpreter has not.
        issued: by group, how many collectives.
        completed: by group, how many of these; `0:transfers` has the sends and receives of group `0`.
        place: a number that changes with where the main thread is (a hash of its stack).
        is_waiting: whether the main thread is in a function of torch.distributed, for new groups too.
        not_finite: its first gradient that was not finite, once it is certain; repeated in every beat.
        pace: where it was since the previous beat; `None` while it has no process group.
        facts: what its numbers have shown since the previous beat.
    """

    rank: int
    time_s: float
    phase: Phase
    issued: dict[str, int]
    completed: dict[str, int]
    place: int
    is_waiting: bool
    not_finite: NotFinite | None = None
    pace: Pace | None = None
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True)
class Report:
    """The full state of a rank, sent on request and at its end.

    Attributes:
        rank: global.
        time_s: seconds since 1970.
        phase: as in `Beat`.
        groups: by name.
        calls: the latest of each group, and all that have not completed, in the order of issue.
        stacks: of all Python threads but the watching one, the main thread's first. Where an exception ends
            the script: the place where it was raised.
        last: what ends the rank, if it is about to end.
        issued: by group, how many collectives; for a rank that has ended and whose calls are unknown.
        meets: address, port and number of ranks with which it calls `init_process_group` now; else empty.
        joins_as: the number under which it calls `init_process_group` now; -1 if unknown.
        num_microbatches: of torch's pipeline schedule that it runs now, or had at its end; 0 without one.
        num_named: how many groups torch has named by counting, among them those that this rank is not in, and
            one that it makes now; 0 where that is not known.
        made_at: by name of a group, the user's line that made it.
        action: what the rank of a pipeline does or is about to do: `the forward of microbatch 3 on stage 0`.
        awaited: the purpose of the send or receive for which it waits.
    """

    rank: int
    time_s: float
    phase: Phase
    groups: dict[str, Group]
    calls: tuple[Call, ...]
    stacks: tuple[Stack, ...]
    last: Ending | None = None
    issued: dict[str, int] = field(default_factory=dict)
    meets: str = ""
    joins_as: int = -1
    num_microbatches: int = 0
    num_named: int = 0
    made_at: dict[str, Frame] = field(default_factory=dict)
    action: str = ""
    awaited: str = ""

    @property
    def is_closing(self) -> bool:
        """Whether a rank sent it unasked at its script's end, when no thread is left to show."""
        return self.phase == "leaving" and self.last is None and not self.stacks


ProcessState = Literal["running", "sleeping", "stopped", "uninterruptible", "ended", "unreachable"]


# The system's name of the thread in each rank that watches it. Its own I/O is not the rank's.
WATCHING_THREAD = "paceline-watch"
# A rank that uses this share of a core works. The share is small, because others may use the same core;
# waiting in gloo, whose threads wake up a hundred times a second, takes about a hundredth.
BUSY_SHARE = 0.1


@dataclass(frozen=True)
class Process:
    """The state of a rank's process, as the launcher sees it from outside.

    Attributes:
        rank: global.
        node: name of its machine.
        pid: there; 0 where it never started.
        state: from /proc; `"ended"` for one that has, `"unreachable"` for one of a node that does not answer.
        exit_code: of one that has ended (negative: the signal); `None` for the others.
        cpu_share: of one core, by it and its children, over the last seconds.
        io_rate: bytes per second that they read and wrote meanwhile, in files and pipes.
        native: the stack that an interpreter wrote from its signal handler, innermost first: the rank's,
            where its thread couldn't answer, or that of a loader's worker for which the rank waits.
    """

    rank: int
    node: str
    pid: int
    state: ProcessState
    exit_code: int | None = None
    cpu_share: float = 0.0
    io_rate: float = 0.0
    native: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Seen:
    """A job at one instant, as the launcher has collected it.

    Attributes:
        world_size: ranks that there should be.
        processes: by rank, of all ranks.
        reports: by rank, the answers that came.
        quiet_s: for how long no rank has moved.
    """

    world_size: int
    processes: dict[int, Process]
    reports: dict[int, Report]
    quiet_s: float = 0.0


@dataclass(frozen=True)
class SharedPlace:
    """The ranks that are at the same place, for a verdict.

    Attributes:
        ranks: which ones.
        what: `waits in all_reduce number 5 of world (float32 [128], sum)`, `ended with code 0` ...
        frames: the user's own, innermost first; may be empty.
    """

    ranks: tuple[int, ...]
    what: str
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The reason why a job does not continue, for people and programs.

    Attributes:
        code: of the page, `PL8nn`.
        headline: one sentence: what is wrong.
        places: where all ranks are, those that wait first.
        rule: which rule was broken.
        fix: the next move.
        more: likely causes, and other ranks that are waited for.
    """

    code: str
    headline: str
    places: tuple[SharedPlace, ...]
    rule: str
    fix: str
    more: tuple[str, ...] = field(default=())
