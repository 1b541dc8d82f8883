"""Records what this rank has issued, from torch's Flight Recorder and the wrappers of `operations`.

A beat asks the Flight Recorder for two numbers per group. Reading the entries takes 15 us each, up to 25 ms
in all, so a beat reads them only if a group is new, or once the rank stands still, and then for at most
`_SHARE` of the time. A report always contains the entries, with frames.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from paceline.torch_seams.flight import FlightEntry, Key, Status, read_entries, read_status
from paceline.torch_seams.watching import BUFFER_SIZES
from paceline.watch.protocol.report import Call, Frame, Group
from paceline.watch.protocol.words import own_frames
from paceline.watch.rank.entries import Groups, build_call, count_named, read_groups
from paceline.watch.rank.operations import Operations, Transfer
from paceline.watch.rank.threads import resolve

# A step of FSDP over 80 layers issues 240. Reading 1000 takes 12 ms where caches are warm, and they are 1 MB.
_BUFFER_SIZE = "1000"
_SHARE = 0.02
_MAX_CALLS_PER_GROUP = 100
_MONITORED = "monitored_barrier"
_TRANSFERS = "transfers"


def choose_buffer_size() -> None:
    """Turn the Flight Recorder on, unless the user has set its size.

    Call it before the first process group is made, because torch reads the size then.
    """
    if not any(name in os.environ for name in BUFFER_SIZES):
        os.environ[BUFFER_SIZES[0]] = _BUFFER_SIZE


@dataclass(frozen=True)
class CollectiveProgress:
    """The collectives that a beat reports.

    Attributes:
        issued: by group, the number of the latest; sends and receives, which are numbered separately, are
          counted as `GROUP:transfers`.
        completed: by group, how many of these have completed.
    """

    issued: dict[str, int]
    completed: dict[str, int]


@dataclass(frozen=True)
class _Level:
    """A sequence's progress when entries were read: the status then, and the numbers that it stands for."""

    name: str
    group: str
    status: Status
    issued: int
    completed: int
    num_transfers: int


class CollectiveRecorder:
    """A reader of the Flight Recorder; only the watching thread may call its methods."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        operations.on_shutdown = self._keep_groups
        self._destroyed = Groups({}, {})
        self._levels: dict[Key, _Level] = {}
        self._status: dict[Key, Status] = {}
        self._read_s = self._cost_s = 0.0

    def read_progress(self) -> CollectiveProgress:
        """Return the progress so far."""
        status = read_status()
        if self._is_due(status):
            # CPU time of this thread alone: waiting for Python's lock costs the script nothing.
            began_s = time.thread_time()
            self._note_levels(status, read_entries(has_frames=False), read_groups())
            self._cost_s, self._read_s = time.thread_time() - began_s, time.monotonic()
        self._status = status
        issued, completed = self._count(status)
        num_open = self._operations.count_open()
        for group, number in self._operations.count_transfers().items():
            issued[f"{group}:{_TRANSFERS}"] = number
            completed[f"{group}:{_TRANSFERS}"] = number - num_open[group]
        return CollectiveProgress(issued, completed)

    def read_calls(
        self, *, is_full: bool = False, has_destroyed: bool = False
    ) -> tuple[dict[str, Group], tuple[Call, ...]]:
        """Return the groups, and the calls in the order of issue: the latest of each group and all incomplete
        ones.

        Args:
            is_full: whether to return all calls that are still recorded.
            has_destroyed: whether to include groups that the script has destroyed.
        """
        groups = read_groups()
        if has_destroyed:
            groups = self._destroyed.join(groups)
        entries = self._keep_current(read_entries(has_frames=True))
        windows = self._operations.windows()
        chosen = entries if is_full else _choose(entries)
        calls = [build_call(entry, groups, windows) for entry in chosen]
        for transfer in self._operations.transfers():
            number = self._find_number(transfer, entries)
            calls.append(_build_transfer(transfer, number, groups, resolve(transfer.stack)))
        calls.sort(key=lambda call: call.began_s)
        return _with_sequences(groups, calls), tuple(calls)

    def read_names(self) -> tuple[int, dict[str, Frame]]:
        """Return the number of groups named by counting, and the user's line that made each of this rank's
        groups."""
        made_at = {}
        for name, stack in self._operations.read_makers().items():
            own = own_frames(resolve(stack))
            if own:
                made_at[name] = own[0]
        return count_named(), made_at

    def _keep_groups(self) -> None:
        """Keep the current groups before one of them is destroyed; the script's thread calls it."""
        self._destroyed = self._destroyed.join(read_groups())

    def _find_number(self, transfer: Transfer, entries: list[FlightEntry]) -> int:
        """Return a transfer's number; a monitored barrier's follows the collectives issued before it."""
        if transfer.operation != _MONITORED:
            return transfer.number
        same = [entry for entry in entries if entry.group == transfer.group]
        before = [entry.number for entry in same if entry.created_ns < transfer.began_ns]
        if not same:  # They were pushed out of the buffer by other groups.
            before = [level.issued for level in self._levels.values() if level.group == transfer.group]
        return max(before, default=0) + 1

    # ---- a beat

    def _is_due(self, status: dict[Key, Status]) -> bool:
        if status == {key: level.status for key, level in self._levels.items() if key in status}:
            return False
        if status.keys() - self._levels.keys():
            return True
        return status == self._status and time.monotonic() - self._read_s >= self._cost_s / _SHARE

    def _keep_current(self, entries: list[FlightEntry]) -> list[FlightEntry]:
        """Return the entries without those of deleted groups whose name has been reused."""
        made_ns = self._operations.read_names()
        return _latest_of_names([e for e in entries if e.created_ns >= made_ns.get(e.group, 0)])

    def _note_levels(self, status: dict[Key, Status], entries: list[FlightEntry], groups: Groups) -> None:
        num_transfers = self._operations.count_transfers()
        latest = {entry.key: entry for entry in entries}
        num_open = Counter(entry.key for entry in entries if not entry.is_done)
        for key, now in status.items():
            if key in latest:
                last = latest[key]
                self._levels[key] = _Level(
                    groups.name_sequence(last),
                    last.group,
                    now,
                    last.number,
                    last.number - num_open[key],
                    num_transfers[last.group],
                )
            elif key in self._levels:  # Pushed out of the buffer by other groups since.
                level = self._levels[key]
                num = num_transfers[level.group]
                issued, completed = _count_level(level, now, num)
                self._levels[key] = replace(
                    level, status=now, issued=issued, completed=completed, num_transfers=num
                )

    def _count(self, status: dict[Key, Status]) -> tuple[dict[str, int], dict[str, int]]:
        """Return the progress of each sequence: what was read, plus what the status has counted since."""
        num_transfers = self._operations.count_transfers()
        issued: dict[str, int] = {}
        completed: dict[str, int] = {}
        # A reused name has a higher key, which comes later.
        for key, level in sorted(self._levels.items()):
            now = status.get(key, level.status)
            issued[level.name], completed[level.name] = _count_level(level, now, num_transfers[level.group])
        return issued, completed


def _count_level(level: _Level, now: Status, num_transfers: int) -> tuple[int, int]:
    """Return how many collectives of a sequence were issued and have completed, by its group's status now."""
    if now == level.status:
        return level.issued, level.completed
    num_new = max(0, now.issued - level.status.issued - (num_transfers - level.num_transfers))
    issued = level.issued + num_new
    return issued, max(level.completed, issued - max(0, now.issued - now.completed))


def _latest_of_names(entries: list[FlightEntry]) -> list[FlightEntry]:
    """Return, among entries of groups with the same name, those of the latest group."""
    latest: dict[tuple[int, str], Key] = {}
    for entry in entries:
        name = (entry.key[0], entry.group)
        latest[name] = max(latest.get(name, entry.key), entry.key)
    return [entry for entry in entries if latest[entry.key[0], entry.group] == entry.key]


def _choose(entries: Iterable[FlightEntry]) -> list[FlightEntry]:
    """Return the latest of each group, and those that have not completed."""
    num_seen: Counter[Key] = Counter()
    chosen = []
    for entry in reversed(list(entries)):
        num_seen[entry.key] += 1
        if num_seen[entry.key] <= _MAX_CALLS_PER_GROUP or not entry.is_done:
            chosen.append(entry)
    chosen.reverse()
    return chosen


def _build_transfer(transfer: Transfer, number: int, groups: Groups, frames: tuple[Frame, ...]) -> Call:
    return Call(
        group=transfer.group,
        number=number,
        operation=transfer.operation,
        sizes=transfer.sizes,
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in transfer.dtypes),
        reduce_op=None,
        peer=groups.find_rank(transfer.group, transfer.peer),
        done=transfer.is_done,
        began_s=transfer.began_ns / 1e9,
        frames=frames,
        purpose="" if transfer.purpose is None else str(transfer.purpose),
    )


def _with_sequences(groups: Groups, calls: Iterable[Call]) -> dict[str, Group]:
    """Return the groups, and those with a second backend under that sequence's name too."""
    found: dict[str, Any] = dict(groups.by_name)
    for call in calls:
        base = found.get(call.group.rpartition(":")[0])
        if call.group not in found and base is not None:
            found[call.group] = replace(base, name=call.group)
    return found
