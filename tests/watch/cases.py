"""The expected report on each script of `scripts/`: a table of faulty ones, and one of healthy ones.

The scripts are run unmodified, on gloo, by `paceline run --nproc-per-node N script.py`. In a faulty script
`# WAITS` stands on the line where the waiting ranks are, and `# CAUSE` on the line where the ranks are that
they wait for, or which ended these. Lines are those of the script's innermost frame; where a loop may be met
at any of its lines, the one that calls it is marked too. A verdict that shows a marked line is right. Where a
rank crashes, gloo ends the others within milliseconds: of kind "crash" only `# CAUSE` has to be shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

SCRIPTS = Path(__file__).parent / "scripts"

Mark = Literal["WAITS", "CAUSE"]
Kind = Literal["hang", "mismatch", "crash", "init", "slow", "healthy"]
Alone = Literal["hangs", "fails", "passes"]

_MARKS = re.compile(r"  # (WAITS CAUSE|WAITS|CAUSE)$")
_LOST_PEER = r"Connection (closed|reset) by peer"


@dataclass(frozen=True)
class Case:
    """A script and what has to be said of it.

    Attributes:
        script: its name, without folder and `.py`.
        nproc: ranks that it is made for.
        kind: `"hang"`, `"mismatch"` (collectives that don't fit), `"crash"` (a rank ends by itself), `"init"`
            (ranks don't find each other), `"slow"` (goes on, but not well), or `"healthy"`.
        codes: any of these is right, the best first; none for healthy ones.
        operation: what the waiting ranks wait in; empty where none waits.
        ranks_waiting: they wait; for what doesn't fit, those that issued what `# WAITS` marks.
        ranks_missing: they are waited for; for what doesn't fit, those that issued the other thing. Empty
            where there is none, or where chance decides.
        says: regular expressions that the verdict must match, all of them.
        alone: what becomes of the job without a watch: it hangs, fails or passes.
        torch_says: regular expression for what torch or gloo raises where it fails alone.
        is_traceless: whether no line tells what the missing ranks do.
        args: of the script.
        hang_after_s: to run it with.
        lasts_s: about how long it runs, for one that ends by itself, once its ranks have torch imported.
        may_say: codes that are no false alarm in a healthy script.
        memory_mb: of the memory group that it has to be run in; 0 for none.
    """

    script: str
    nproc: int
    kind: Kind
    codes: tuple[str, ...] = ()
    operation: str = ""
    ranks_waiting: tuple[int, ...] = ()
    ranks_missing: tuple[int, ...] = ()
    says: tuple[str, ...] = ()
    alone: Alone = "hangs"
    torch_says: str = ""
    is_traceless: bool = False
    args: tuple[str, ...] = ()
    hang_after_s: float = 4.0
    lasts_s: float = 0.0
    may_say: tuple[str, ...] = ()
    memory_mb: int = 0

    @property
    def path(self) -> Path:
        """The path of the script."""
        folder = "healthy" if self.kind == "healthy" else "faulty"
        return SCRIPTS / folder / f"{self.script}.py"

    def find_lines(self, mark: Mark) -> tuple[int, ...]:
        """Return the numbers of the lines that carry a mark."""
        return tuple(number for number, marks in read_marks(self.path) if mark in marks)


def read_marks(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Marked lines of a script, from 1, with their marks."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if found := _MARKS.search(line):
            yield number, found[1].split()


def _faulty(
    kind: Kind,
    script: str,
    nproc: int,
    codes: str,
    operation: str,
    waiting: tuple[int, ...],
    missing: tuple[int, ...],
    *says: str,
    **rest: Any,
) -> Case:
    alone: Alone = "fails" if "torch_says" in rest else "passes" if "lasts_s" in rest else "hangs"
    found = tuple(codes.split())
    return Case(script, nproc, kind, found, operation, waiting, missing, says, alone, **rest)


_hang = partial(_faulty, "hang")
_other = partial(_faulty, "mismatch")
_count = partial(_faulty, "mismatch", torch_says=r"Received data size doesn't match expected size")
_silent = partial(_faulty, "mismatch", lasts_s=14.0)
# Once, and the job comes to its end.
_passing = partial(_faulty, "mismatch", lasts_s=5.0)
_start = partial(_faulty, "init")
_raises = partial(_faulty, "crash")
_dies = partial(_faulty, "crash", torch_says=_LOST_PEER)
_slow = partial(_faulty, "slow")

_ELSEWHERE = (
    _hang("rank0_property", 3, "PL800", "all_reduce", (0,), (1, 2), r"rank\(\) == 0", r"sleep"),
    _hang("other_ranks_return", 2, "PL800", "all_reduce", (0,), (1,), r"sleep"),
    _hang("uneven_stream", 2, "PL800", "all_reduce", (0,), (1,), r"sleep"),
    _hang("asleep", 2, "PL800", "all_reduce", (1,), (0,), r"sleep", r"ask_server"),
    _hang("lock_held", 2, "PL800", "all_reduce", (0,), (1,), r"lock"),
    # Chance decides who gets the lock; the other one waits for it.
    _hang("file_lock", 2, "PL800", "", (), (), r"flock", r"barrier"),
    _hang("subprocess_waits", 2, "PL800", "barrier", (1,), (0,), r"subprocess"),
    _hang("loader_worker_stuck", 2, "PL800", "all_reduce", (0,), (1,), r"loader"),
    _hang("native_sleep", 2, "PL800", "all_reduce", (0,), (1,), r"settle"),
    # A rank that computes is given ten times as long.
    _hang("endless_loop", 2, "PL800", "all_reduce", (0,), (1,), r"pack", hang_after_s=1.5),
    # Ranks 1 and 3 wait in a barrier of the world for 0 and 2, which wait for them on their axis.
    _hang(
        "loader_worker_lock",
        2,
        "PL800",
        "all_reduce",
        (0,),
        (1,),
        r"with CACHE",
        r"loader_worker_lock.py:\d+",
    ),
    _hang("loader_worker_queue", 2, "PL800", "all_reduce", (1,), (0,), r"waits for a queue", r"queue.get"),
    _hang("mesh_axis_branch", 4, "PL800 PL806", "all_reduce", (0, 2), (1, 3), r"\btp\b"),
    _hang("stopped", 2, "PL809", "all_reduce", (0,), (1,), r"stopped", is_traceless=True),
    _hang("queues_run_dry", 2, "PL811", "", (), (0, 1), r"queue"),
    _hang("exit_early", 3, "PL801", "all_reduce", (0, 1), (2,), torch_says=_LOST_PEER),
    _hang("script_ends_early", 2, "PL801", "reduce", (0,), (1,), torch_says=_LOST_PEER, is_traceless=True),
)

# Of ranks in different operations of one group it is as true that one isn't there (PL800).
_DIFFERENT_OPERATIONS = (
    _other("order_operations", 2, "PL802", "all_reduce", (1,), (0,), r"broadcast"),
    _other("barrier_one_rank", 2, "PL802", "barrier", (0,), (1,), r"all_reduce", r"is_main"),
    _other("gather_on_destination", 2, "PL802", "gather", (0,), (1,), r"barrier"),
    _other("state_dict_rank0", 2, "PL802 PL800", "all_gather", (0,), (1,), r"barrier"),
    _count("checkpoint_rank0_saves", 2, "PL802 PL803", "all_gather", (0,), (1,), r"rank == 0"),
    _other("loop_save", 2, "PL802 PL800", "all_gather", (0,), (1,), r"rank == 0"),
    _other("evaluation_rank0_buffers", 2, "PL802 PL800", "barrier", (1,), (0,), r"broadcast"),
    _other("time_based_logging", 2, "PL802", "all_gather", (0,), (1,), r"all_reduce"),
    _other("barrier_in_finally", 2, "PL802 PL800", "all_reduce", (0,), (1,), r"barrier"),
    _other("checkpoint_rank0_loads", 2, "PL802 PL800", "all_reduce", (1,), (0,), r"barrier"),
    _other("uneven_data", 2, "PL802 PL800", "all_reduce", (0,), (1,), r"barrier"),
    _other("early_break", 2, "PL802 PL800", "all_reduce", (0,), (1,), r"all_gather"),
    _other("early_return", 3, "PL802 PL800", "all_reduce", (0, 1), (2,), r"barrier"),
    _other("early_stopping", 2, "PL802 PL800", "all_reduce", (0,), (1,), r"barrier"),
    _other("swallowed_exception", 2, "PL802 PL800", "all_reduce", (0,), (1,), r"barrier"),
    _other("nan_skip", 3, "PL802 PL800", "all_reduce", (0, 1), (2,), r"barrier"),
    _other("no_sync_one_rank", 2, "PL802 PL800", "all_reduce", (1,), (0,), r"barrier"),
    # Chance decides which thread's call comes first on which rank.
    _other("threads_order", 2, "PL802 PL803", "", (), (), r"all_reduce", r"\breduce\b"),
    # Both wait for the other's data: roots 0 and 1.
    _other("broadcast_source", 2, "PL802", "broadcast", (0, 1), (), r"root|src|source"),
)

_SHARDED = (
    _count("fsdp_block_skipped", 2, "PL802", "all_gather", (0,), (1,), r"blocks\.2", r"blocks\.3"),
    _silent("fsdp_blocks_alike", 2, "PL802", "all_gather", (0,), (1,), r"blocks\.2", r"blocks\.3"),
    _other("fsdp_batch_skipped", 2, "PL802 PL800", "all_gather", (0,), (1,), r"barrier"),
)

_DIFFERENT_ARGUMENTS = (
    _count("all_to_all_counts", 3, "PL803", "all_to_all", (1,), (2,), r"rank 1 sends 3 elements to rank 2"),
    _count(
        "all_to_all_experts", 2, "PL803", "all_to_all", (1,), (0,), r"rank 1 sends \d+ elements to rank 0"
    ),
    # Of functional collectives, torch records what each rank sends and expects in all.
    _count("all_to_all_functional", 2, "PL803", "all_to_all", (0,), (1,), r"elements in all, and expect"),
    _count("rank0_branch", 3, "PL803 PL802", "all_reduce", (0,), (1, 2), r"rank == 0"),
    _count("rank0_helper", 2, "PL803 PL802", "all_reduce", (0,), (1,), r"is_main"),
    _other("order_of_names", 2, "PL803", "all_reduce", (0,), (1,), r"\[1\]", r"\[3\]"),
    _count("sizes_last_batch", 2, "PL803", "all_gather", (0,), (1,)),
    _count("sizes_vocabulary", 2, "PL803", "all_reduce", (0,), (1,)),
    _count("different_parameters", 2, "PL803", "all_reduce", (0,), (1,)),
    _count("dtype_mixed_precision", 2, "PL804", "all_reduce", (0,), (1,), r"bfloat16", r"float32"),
    # Equal in bytes: gloo adds integers to floats, and nobody notices.
    _silent("dtype_of_counts", 2, "PL804", "all_reduce", (0,), (1,), r"int64", r"float64"),
    _silent("reduce_op", 2, "PL805", "all_reduce", (0,), (1,), r"(?i)\bmax\b", r"(?i)\bsum\b"),
    _passing(
        "reduce_op_once", 2, "PL805", "all_reduce", (0,), (1,), r"gives max", r"gives sum", r"number \d+"
    ),
)

_GROUPS = (
    _hang("groups_cycle", 3, "PL806", "all_reduce", (0, 1, 2), (), r"pair_0_1", r"pair_1_2"),
    _hang("mesh_cycle", 4, "PL806", "all_reduce", (0, 1, 2, 3), (), r"\bdp\b", r"\btp\b"),
    _hang("barrier_other_group", 4, "PL806 PL800", "barrier", (1, 3), (0, 2), r"team[01]"),
    # torch names groups by each rank's own count: ranks 0 and 1 are ahead by one. Chance decides whether the
    # others wait there too, or find addresses under the first group's name and go on.
    _hang("new_group_members_only", 4, "PL807", "new_group", (0, 1), (2, 3)),
    _hang(
        "new_group_by_members", 3, "PL807", "new_group", (0, 1), (2,), r"(?i)rank 2 never called new_group"
    ),
    _hang("mesh_on_some_ranks", 4, "PL807", "new_group", (0, 1, 2), (3,), r"init_device_mesh"),
    _hang("send_without_recv", 3, "PL808 PL806", "send", (2,), (0,), r"broadcast"),
    _hang("recv_on_both", 2, "PL808 PL806", "recv", (0, 1), ()),
    _hang("schedule_counts", 2, "PL808", "recv", (0,), (1,), r"rank 0 has 4 and rank 1", r"n_microbatches"),
    _hang(
        "schedule_counts_in_the_middle", 3, "PL808", "recv", (0,), (1,), r"rank 1\s+has 6", r"n_microbatches"
    ),
    # The last stage takes what it needs, and ends.
    _dies(
        *("schedule_counts_first_stage", 2, "PL808", "recv", (0,), (1,), r"rank 0 has 8 and rank 1\s+has 4"),
        is_traceless=True,
    ),
    _hang("pipeline_microbatches", 2, "PL808 PL806", "recv", (1,), (0,), r"all_reduce"),
)

_JOIN = "init_process_group"
_START = (
    _start("init_world_size_argument", 2, "PL810", _JOIN, (0, 1), (), r"\b3\b|more ranks"),
    _start("init_world_size_environment", 2, "PL810", _JOIN, (0, 1), (), r"\b4\b|more ranks"),
    _start("init_free_port", 2, "PL810", _JOIN, (0, 1), (), r"port"),
    _start("init_other_address", 2, "PL810", _JOIN, (0, 1), (), r"address"),
    _start(
        "init_other_port",
        3,
        "PL810",
        _JOIN,
        (0, 2),
        (1,),
        r"rank 1 at address 127.0.0.1, port \d+, for 3 ranks",
    ),
    _start("init_rank_twice", 2, "PL810", _JOIN, (0, 1), (), r"ranks 0 and 1 join as rank 0"),
    _start("init_rank_of_scheduler_twice", 3, "PL810", _JOIN, (0, 1, 2), (), r"join as rank 1"),
    _start("init_rank_from_scheduler", 2, "PL810", _JOIN, (0, 1), ()),
    _start("init_after_download", 3, "PL810 PL800", _JOIN, (0,), (1, 2), r"fetch|sleep"),
)

_MEMORY = r"can't allocate memory"
_CRASHES = (
    _raises("loader_worker_error", 2, "PL330", "all_reduce", (0,), (1,), r"n/a", torch_says=r"ValueError"),
    _raises("backward_error", 2, "PL330", "all_reduce", (0,), (1,), torch_says=r"ZeroDivisionError"),
    _raises("hook_error", 3, "PL330", "all_reduce", (0, 1), (2,), torch_says=r"histc: range"),
    _raises("out_of_memory", 2, "PL330", "all_reduce", (0,), (1,), _MEMORY, torch_says=_MEMORY),
    # Paceline's own loops: the rank that leaves is named in its error.
    _raises("loop_break", 2, "PL649", "", (), (0,), r"break", torch_says=r"PL649"),
    _raises("loop_backward", 2, "PL644", "", (), (1,), r"weight 0", torch_says=r"PL644"),
    _raises("unpicklable_object", 2, "PL330", "all_gather", (0,), (1,), torch_says=r"cannot pickle"),
    _raises("unused_parameters", 2, "PL330", "all_reduce", (0,), (1,), torch_says=r"finished reduction"),
    # DDP compares the models itself; both ranks raise.
    _raises("different_models", 2, "PL330 PL803", "", (), (0, 1), torch_says=r"same model"),
    _dies("killed", 2, "PL331 PL801", "all_reduce", (0,), (1,), r"SIGKILL", is_traceless=True),
    _dies(
        "out_of_memory_killed", 2, "PL331 PL801", "all_reduce", (0,), (1,), is_traceless=True, memory_mb=1500
    ),
    _dies("native_crash", 2, "PL331 PL801", "all_reduce", (0,), (1,), r"SIGSEGV"),
    _dies("exit_in_library", 2, "PL331 PL330 PL801", "all_reduce", (0,), (1,), r"\b7\b"),
)

_SLOW = (
    _slow("slow_loader", 2, "PL820", "all_reduce", (0,), (1,), r"loader", lasts_s=18.0),
    _slow("slow_augmentation", 2, "PL820", "all_reduce", (0,), (1,), r"augment|rotate", lasts_s=15.0),
    _slow("gradient_not_finite", 2, "PL821", "", (), (1,), r"\bscale\b", lasts_s=10.0),
)

FAULTY: tuple[Case, ...] = (
    *_ELSEWHERE,
    *_DIFFERENT_OPERATIONS,
    *_SHARDED,
    *_DIFFERENT_ARGUMENTS,
    *_GROUPS,
    *_START,
    *_CRASHES,
    *_SLOW,
)
"""One fault each."""


def _healthy(script: str, nproc: int, lasts_s: float, *may_say: str) -> Case:
    return Case(script, nproc, "healthy", alone="passes", lasts_s=lasts_s, may_say=may_say)


# PL820 names a slow rank, which is right of a rank that others wait for during seconds; it is no verdict.
HEALTHY: tuple[Case, ...] = (
    _healthy("async_operations", 2, 3),
    _healthy("branches_by_rank", 2, 4, "PL820"),
    _healthy("checkpoint_rank0", 2, 5, "PL820"),
    _healthy("ends_apart", 3, 7),
    _healthy("first_step_compiles", 2, 8, "PL820"),
    _healthy("garbage_collection", 2, 9),
    _healthy("gather_scatter", 3, 2),
    _healthy("group_made_twice", 2, 3),
    _healthy("join_uneven", 2, 3),
    _healthy("joins_late", 2, 4),
    _healthy("loader_workers", 2, 4, "PL820"),
    _healthy("many_threads", 2, 2),
    _healthy("mesh_of_two_axes", 4, 4),
    _healthy("monitored_barrier", 3, 6, "PL820"),
    _healthy("no_group", 2, 4),
    _healthy("objects", 3, 2),
    _healthy("parameter_server", 4, 3),
    _healthy("pipeline", 3, 6),
    _healthy("prints_a_lot", 2, 3),
    _healthy("sharded_checkpoint", 2, 2),
    _healthy("sharded_uneven", 2, 12),
    _healthy("slow_in_turns", 2, 7),
    _healthy("slow_load", 2, 7, "PL820"),
    _healthy("subgroups_apart", 4, 4),
    _healthy("subprocess_works", 2, 8, "PL820"),
    _healthy("unequal_splits", 3, 2),
    _healthy("validation_on_rank0", 2, 9, "PL820"),
)
"""Merely slow or uneven: nothing may be said of them, but what `may_say` allows."""
