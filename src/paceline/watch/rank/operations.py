"""Records what torch's Flight Recorder leaves out: reduce operations, roots, sizes, sends and receives.

The methods of `torch.distributed.ProcessGroup` that take a reduce operation, a root or sizes for each rank,
that FSDP gathers by, or that send or receive, are wrapped on the class. For the former, a wrapper notes which
thread was in it and when. This identifies an entry of the Flight Recorder by its time of creation.
Collectives that C++ issues by itself (DDP's buckets, functional collectives) do not pass through here. The
time at which a group gets its name is noted too, because names are reused: what was recorded under a name
before belongs to another group. A wrapper costs about two microseconds, and raises nothing of its own.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.pipeline.messages import Message
from paceline.pipeline.under_way import UNDER_WAY
from paceline.torch_seams.watching import find_group_class, find_sharded_module, hide_from_compiler
from paceline.watch.rank.threads import Mark, mark_stack

# The operation's name as users call it: gloo implements a reduce-scatter by all-reduces.
_REDUCING = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
}
# The position of the options, or of the root itself, among the arguments.
_ROOTED = {"broadcast": 1, "reduce": 1, "gather": 2, "scatter": 2}
_GATHERING = {"_allgather_base": "all_gather", "all_gather_single": "all_gather"}
_EXCHANGING = {"alltoall_base": "all_to_all", "all_to_all_single": "all_to_all"}
_TRANSFERRING = {
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "monitored_barrier": "monitored_barrier",
}
# Each is called once per group: when the group is made, and when it is destroyed.
_NAMING = "_set_group_name"
_ENDING = "shutdown"
# At least as many as the Flight Recorder's entries.
_MAX_WINDOWS = 4096
_MAX_TRANSFERS = 512


class CallWindow:
    """The time during which a thread was in a method that takes a reduce operation or a root.

    Attributes:
        op: torch's reduce operation; None if there is none or it is unknown.
        root: its rank in the group; None if there is none or it is unknown.
        module: whose parameters FSDP gathers or reduces; empty otherwise.
        splits: the elements that it sends to each rank, and those that it expects from each.
        began_ns: since 1970.
        ended_ns: since 1970; 0 until the method returns.
    """

    __slots__ = ("began_ns", "ended_ns", "group", "module", "op", "operation", "root", "splits", "thread")

    def __init__(self, thread: int, group: str, operation: str, op: Any, root: int | None) -> None:
        self.thread = thread
        self.group = group
        self.operation = operation
        self.op = op
        self.root = root
        self.module = ""
        self.splits: tuple[tuple[int, ...], ...] = ()
        self.ended_ns = 0
        self.began_ns = time.time_ns()


@dataclass(eq=False, slots=True)
class Transfer:
    """A send, a receive or a monitored barrier, which gloo's Flight Recorder does not record.

    Attributes:
        operation: `send`, `recv` or `monitored_barrier`.
        number: from 1, per group, operation and peer.
        peer: its rank in the group; None for any, and for a barrier.
        sizes: shapes of its tensors.
        began_ns: since 1970.
        stack: who called it.
        purpose: the message of a pipeline that it carries; `None` for any other.
        work: torch's handle, as long as it is referenced.
        is_inside: whether the call has not returned yet.
    """

    group: str
    operation: str
    number: int
    peer: int | None
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    began_ns: int
    stack: tuple[Mark, ...]
    purpose: Message | None = None
    work: weakref.ref[Any] | None = None
    is_inside: bool = True

    @property
    def is_done(self) -> bool:
        """Whether it has completed; a handle that was released counts as completed."""
        if self.is_inside:
            return False
        work = self.work() if self.work is not None else None
        return work is None or bool(work.is_completed())


class Operations:
    """The wrapped methods, and the latest calls of them."""

    def __init__(self) -> None:
        self._windows: deque[CallWindow] = deque(maxlen=_MAX_WINDOWS)
        self._transfers: deque[Transfer] = deque(maxlen=_MAX_TRANSFERS)
        self._numbers: Counter[tuple[str, str, int | None]] = Counter()
        self._made_ns: dict[str, int] = {}
        self._made_at: dict[str, tuple[Mark, ...]] = {}
        self._originals: dict[str, Any] = {}
        self._kind: Any = None
        self.on_shutdown: Callable[[], None] | None = None
        """Called before a group is destroyed."""

    def install(self, torch: Any) -> None:
        """Wrap the methods; do nothing if torch has no `distributed` or they are wrapped already."""
        kind = find_group_class()
        if kind is None or self._originals:
            return
        self._kind = kind
        rooted = {name: name for name in _ROOTED}
        noting = rooted | _REDUCING | _GATHERING | _EXCHANGING
        for name, operation in (noting | _TRANSFERRING | {_NAMING: "", _ENDING: ""}).items():
            stored = vars(self._kind).get(name)
            if stored is None:  # This torch does not have it.
                continue
            wrapper = self._wrap(getattr(self._kind, name), operation)
            hide_from_compiler(torch, wrapper)
            # Not the result of `getattr`, which is the function without its binding to an instance.
            self._originals[name] = stored
            setattr(self._kind, name, wrapper)

    def remove(self) -> None:
        """Put torch's own methods back."""
        for name, original in self._originals.items():
            setattr(self._kind, name, original)
        self._originals.clear()

    def transfers(self) -> list[Transfer]:
        """Return the latest sends and receives."""
        return list(self._transfers.copy())

    def count_transfers(self) -> Counter[str]:
        """Return the number of sends, receives and monitored barriers, by group."""
        counts: Counter[str] = Counter()
        for (group, _, _), number in self._numbers.copy().items():
            counts[group] += number
        return counts

    def count_open(self) -> Counter[str]:
        """Return the number of these that have not completed, by group."""
        return Counter(transfer.group for transfer in self._transfers.copy() if not transfer.is_done)

    def windows(self) -> Windows:
        """Return the latest calls with a reduce operation or a root."""
        return Windows(self._windows.copy())

    def read_names(self) -> dict[str, int]:
        """Return when each group's name was last given, in nanoseconds since 1970, by name."""
        return self._made_ns.copy()

    def read_makers(self) -> dict[str, tuple[Mark, ...]]:
        """Return the stack that last made a group of each name."""
        return self._made_at.copy()

    # ---- wrappers

    def _wrap(self, original: Callable[..., Any], operation: str) -> Callable[..., Any]:
        if original.__name__ == _NAMING:
            return self._wrap_naming(original)
        if original.__name__ == _ENDING:
            return self._wrap_ending(original)
        if original.__name__ in _TRANSFERRING:
            return self._wrap_transferring(original, operation)
        return self._wrap_noting(original, operation)

    def _wrap_naming(self, original: Callable[..., Any]) -> Callable[..., Any]:
        made_ns, made_at = self._made_ns, self._made_at

        @functools.wraps(original)
        def call(group: Any, name: str) -> Any:
            made_ns[name] = time.time_ns()
            with suppress(Exception):
                made_at[name] = mark_stack(sys._getframe(1))
            return original(group, name)

        return call

    def _wrap_ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            with suppress(Exception):
                if self.on_shutdown is not None:
                    self.on_shutdown()
            return original(group, *args, **kwargs)

        return call

    def _wrap_noting(self, original: Callable[..., Any], operation: str) -> Callable[..., Any]:
        windows, thread_ident = self._windows, threading.get_ident
        reduces, root_at = original.__name__ in _REDUCING, _ROOTED.get(original.__name__)
        is_sharded = operation in ("all_gather", "reduce_scatter")

        @functools.wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            window = None
            with suppress(Exception):
                op = _find_reduce_op(args, kwargs) if reduces else None
                root = _find_root(args, kwargs, root_at) if root_at is not None else None
                window = CallWindow(thread_ident(), group.group_name, operation, op, root)
                windows.append(window)
                if is_sharded:
                    window.module = find_sharded_module(sys._getframe(1))
                elif operation == "all_to_all":
                    window.splits = _find_splits(group.size(), args, kwargs)
            try:
                return original(group, *args, **kwargs)
            finally:
                if window is not None:
                    window.ended_ns = time.time_ns()

        return call

    def _wrap_transferring(self, original: Callable[..., Any], operation: str) -> Callable[..., Any]:
        has_peer = operation != "monitored_barrier" and original.__name__ != "recv_anysource"

        @functools.wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            transfer = None
            with suppress(Exception):
                transfer = self._begin(group, operation, args, kwargs, has_peer)
            try:
                work = original(group, *args, **kwargs)
            except BaseException:
                if transfer is not None:
                    self._take_back(transfer)
                raise
            if transfer is not None:
                with suppress(TypeError):  # A barrier returns None.
                    transfer.work = weakref.ref(work)
                transfer.is_inside = False
            return work

        return call

    def _begin(
        self, group: Any, operation: str, args: Sequence[Any], kwargs: dict[str, Any], has_peer: bool
    ) -> Transfer:
        peer: int | None = None
        tensors: Sequence[Any] = ()
        if operation != "monitored_barrier":
            tensors = args[0] if args else kwargs["tensors"]
        if has_peer:
            peer = int(args[1] if len(args) > 1 else kwargs["dstRank" if operation == "send" else "srcRank"])
        name = group.group_name
        self._numbers[name, operation, peer] += 1
        transfer = Transfer(
            group=name,
            operation=operation,
            number=self._numbers[name, operation, peer],
            peer=peer,
            sizes=tuple(tuple(tensor.shape) for tensor in tensors),
            dtypes=tuple(tensor.dtype for tensor in tensors),
            began_ns=time.time_ns(),
            stack=mark_stack(sys._getframe(2)),
            purpose=UNDER_WAY.posted,
        )
        self._transfers.append(transfer)
        return transfer

    def _take_back(self, transfer: Transfer) -> None:
        """Forget a call that raised: it has sent nothing, and takes no number."""
        with suppress(ValueError):  # It has been pushed out meanwhile.
            self._transfers.remove(transfer)
        self._numbers[transfer.group, transfer.operation, transfer.peer] -= 1


class Windows:
    """Call windows, searchable by an instant within them."""

    def __init__(self, windows: Sequence[CallWindow]) -> None:
        self._by_place: dict[tuple[int, str], list[CallWindow]] = {}
        for window in windows:
            self._by_place.setdefault((window.thread, window.group), []).append(window)

    def find(self, thread: int, group: str, time_ns: int) -> CallWindow | None:
        """Return the window that a thread was in at an instant, or None."""
        windows = self._by_place.get((thread, group), [])
        at = bisect_right(windows, time_ns, key=lambda window: window.began_ns) - 1
        if at < 0 or 0 < windows[at].ended_ns < time_ns:
            return None
        return windows[at]


def _find_reduce_op(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the reduce operation of `(..., options)` or `(..., op)`; these come last."""
    for value in (*kwargs.values(), *reversed(args)):
        op = getattr(value, "reduceOp", None)
        if op is not None:
            return op
        if type(value).__name__ in ("ReduceOp", "RedOpType"):
            return value
    return None


def _find_root(args: Sequence[Any], kwargs: dict[str, Any], at: int) -> int:
    """Return the root of `(..., options)` or `(..., root)`; without both it is the first rank."""
    value = args[at] if len(args) > at else kwargs.get("opts", kwargs.get("root", 0))
    return int(getattr(value, "rootRank", value))


def _find_splits(size: int, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return how many elements `(output, input, output_split_sizes, input_split_sizes)` moves, by rank."""
    given = [
        *args[:4],
        *(kwargs[name] for name in ("output_split_sizes", "input_split_sizes") if name in kwargs),
    ]
    received, sent, *splits = given
    found = []
    for tensor, rows in zip((sent, received), reversed(splits), strict=True):
        length = tensor.shape[0]
        each = tensor.numel() // max(1, length)
        found.append(tuple(int(number) * each for number in (rows or [length // size] * size)))
    return tuple(found)


def name_reduce_op(op: Any) -> str | None:
    """Return the name of torch's reduce operation, such as `sum`."""
    kind = getattr(op, "op", op)  # a ReduceOp has a RedOpType
    name = getattr(kind, "name", None)
    return name.lower() if isinstance(name, str) else None
