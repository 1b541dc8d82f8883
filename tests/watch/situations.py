"""Builds jobs as the launcher may see them, for tests of verdicts."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.watch.protocol.report import Call, Frame, Group, Phase, Process, Report, Seen, Stack

NOW_S = 1_000_000.0
SCRIPT = "/job/train.py"


def library(path: str, function: str, line: int = 10) -> Frame:
    """Return a frame of torch or of Python; `torch/...` or `queue.py`."""
    paths = sysconfig.get_paths()
    root = paths["purelib"] if path.startswith("torch/") else paths["stdlib"]
    return Frame(f"{root}/{path}", line, function)


def user(line: int, function: str = "main", text: str = "", file: str = SCRIPT) -> Frame:
    """Return a frame of the script."""
    return Frame(file, line, function, text)


COLLECTIVE = (
    library("torch/distributed/distributed_c10d.py", "all_reduce"),
    library("torch/distributed/c10d_logger.py", "wrapper"),
)
BACKWARD = (
    library("torch/autograd/graph.py", "_engine_run_backward"),
    library("torch/autograd/__init__.py", "backward"),
    library("torch/_tensor.py", "backward"),
)
LOADER = (
    library("selectors.py", "select"),
    library("multiprocessing/connection.py", "wait"),
    library("torch/utils/data/dataloader.py", "_get_data"),
    library("torch/utils/data/dataloader.py", "__next__"),
)


def call(
    number: int = 1,
    operation: str = "all_reduce",
    *,
    at: int | Sequence[Frame] = 31,
    group: str = "0",
    sizes: Sequence[Sequence[int]] = ((128,),),
    dtypes: Sequence[str] = ("float32",),
    op: str | None = None,
    peer: int | None = None,
    done: bool = False,
    age_s: float = 60.0,
    inside: Sequence[Frame] = COLLECTIVE,
    module: str = "",
    splits: tuple[tuple[int, ...], ...] = (),
) -> Call:
    """Return a call, unfinished and 60 s old by default, at a line of `train.py` or in given frames."""
    frames = (user(at, "step"),) if isinstance(at, int) else tuple(at)
    shapes = tuple(tuple(size) for size in sizes)
    return Call(
        group,
        number,
        operation,
        shapes,
        tuple(dtypes) if shapes else (),
        op,
        peer,
        done,
        NOW_S - age_s,
        (*inside, *frames),
        module=module,
        splits=splits,
    )


class Job:
    """A job whose ranks are told one by one; those that aren't are well and do nothing."""

    def __init__(self, world_size: int, groups: Sequence[Group] = ()) -> None:
        self.world_size = world_size
        world = Group("0", "default_pg", tuple(range(world_size)))
        self.groups = {group.name: group for group in (world, *groups)}
        self.processes = {r: Process(r, "node-a", 1000 + r, "sleeping") for r in range(world_size)}
        self.reports: dict[int, Report] = {}

    def is_in(self, rank: int, *stack: Frame, calls: Sequence[Call] = (), phase: Phase = "running") -> None:
        """Give the rank's main thread this stack."""
        groups = {name: group for name, group in self.groups.items() if rank in group.ranks}
        stacks = (Stack("MainThread", tuple(stack)),) if stack else ()
        self.reports[rank] = Report(rank, NOW_S, phase, groups, tuple(calls), stacks)

    def waits(self, rank: int, *calls: Call) -> None:
        """Make the rank wait in the last of these calls."""
        self.is_in(rank, *calls[-1].frames, calls=calls)

    def process(self, rank: int, **changes: object) -> None:
        """Change the view of the rank from outside."""
        self.processes[rank] = replace(self.processes[rank], **changes)  # type: ignore[arg-type]

    def ends(self, rank: int, exit_code: int = 0, **changes: object) -> None:
        """End the rank's process, without an answer."""
        self.process(rank, state="ended", exit_code=exit_code, **changes)
        self.reports.pop(rank, None)

    @property
    def seen(self) -> Seen:
        return Seen(self.world_size, self.processes, self.reports, quiet_s=30.0)


def reader(text: str, file: str = SCRIPT) -> Callable[[str], list[str]]:
    """Return a `read_source` that knows one file."""
    return lambda path: text.splitlines() if path == file else []


def line_of(text: str, part: str) -> int:
    """Return the number of the only line with this part."""
    found = [n for n, line in enumerate(text.splitlines(), 1) if part in line]
    assert len(found) == 1, (part, found)
    return found[0]
