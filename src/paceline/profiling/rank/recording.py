"""Records consecutive steps of a rank, and writes them as one file.

On CPU, torch's profiler sees collectives and annotations (optimizer steps, loaders) and no operator. On CUDA
it sees every operator, because NCCL's kernels name their groups only then. The loop's phases are noted by
hooks on the outermost modules and around backward, its lines are sampled, and the groups, numbers and lines
of collectives are read from the Flight Recorder.

A step passes between start and first recorded step, since ranks start at different times.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.own_code import is_own
from paceline.profiling.elements import count_bytes
from paceline.profiling.rank.loop_phases import METADATA, WAITING, LoopTimes
from paceline.profiling.rank.sampler import LineSampler, Place
from paceline.torch_seams.flight import FlightEntry, read_entries
from paceline.torch_seams.profiling import (
    build_profiler,
    is_profiling,
    list_members,
    start_light,
    start_profiler,
)
from paceline.torch_seams.watching import BUFFER_SIZES
from paceline.units import format_bytes

OWN = "the script runs torch.profiler itself, and a process can run one at a time"


class Recording:
    """A recording of a rank's steps, from the passing step on.

    Args:
        rank: global.
        num_steps: to record, at least 1.
        on_forward: called before each forward.

    Attributes:
        steps: number, begin and end of each recorded step.
    """

    def __init__(self, torch: Any, rank: int, num_steps: int, *, on_forward: Callable[[], None]) -> None:
        if is_profiling(torch):
            raise RuntimeError(OWN)
        self._torch = torch
        self._rank = rank
        self._asked = self._num_steps = num_steps
        self.steps: list[tuple[int, int, int]] = []
        self._profiler = build_profiler(torch, has_shapes=True)
        self._sampler = LineSampler(torch)
        if torch.cuda.is_initialized() or not start_light(torch, self._profiler):
            self._profiler = build_profiler(torch)
            start_profiler(self._profiler)
        self._loop = LoopTimes(torch, on_forward, self._sampler.note_scheduling)
        self._began_ns = time.time_ns()

    @property
    def is_complete(self) -> bool:
        """Whether all steps are recorded."""
        return len(self.steps) == self._num_steps

    def add(self, number: int, begin_ns: int, end_ns: int) -> None:
        """Add a step that has ended."""
        self.steps.append((number, begin_ns, end_ns))
        self._sampler.note_scheduling()

    def settle(self) -> None:
        """End the passing step."""
        self._loop.keep_outermost()
        self._num_steps = min(self._num_steps, count_steps_that_fit(len(self._read_calls())))

    def abandon(self) -> None:
        """Remove all hooks and end the profiler; nothing is written."""
        self._remove()
        with suppress(Exception):
            self._profiler.stop()

    def write(self, folder: Path, more: Callable[[], Mapping[str, Any]]) -> None:
        """End the recording, and write its file if it has a step.

        Args:
            folder: exists, or is made.
            more: returns what else the file's own table has; called after the last step.
        """
        self._remove()
        if is_profiling(self._torch) is False:
            raise RuntimeError(OWN)
        try:
            if self.steps:
                table = {**self._describe(), **more()}
                self._profiler.add_metadata_json(METADATA, json.dumps(table))
        finally:
            self._profiler.stop()  # a process that exits while it runs crashes
        if not self.steps:
            return
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".rank-{self._rank:04d}.part"
        try:
            self._profiler.export_chrome_trace(str(part))
            if not _is_whole(part):  # torch only logs that it cannot write
                raise OSError(f"torch cannot write to {folder}: {_describe_room(folder)}")
            os.replace(part, folder / f"rank-{self._rank:04d}.json")
        finally:
            for left in folder.glob(f"{part.name}*"):  # torch writes into yet another file first
                left.unlink(missing_ok=True)

    def _remove(self) -> None:
        self._sampler.end()
        self._loop.remove()

    def _read_calls(self) -> list[FlightEntry]:
        """Return the collectives of this recording in order of issue, without sends and receives."""
        return [call for call in read_entries(has_frames=True) if call.created_ns >= self._began_ns]

    def _describe_missing(self) -> str:
        """Return why fewer steps are recorded than were asked for; empty if none is missing."""
        if len(self.steps) >= self._asked:
            return ""
        reason = "the script ended, or was stopped, before the others"
        if self.is_complete:
            reason = (
                f"torch's Flight Recorder keeps the collectives of no more; {BUFFER_SIZES[0]} sets its size"
            )
        return f"The recording is partial, with {len(self.steps)} of {self._asked} steps: {reason}."

    def _describe(self) -> dict[str, Any]:
        """Return the table that `kineto.Recorded` reads."""
        calls = self._read_calls()
        places = self._sampler.name_places(self._loop.names)
        return {
            "steps": self.steps,
            "partial": self._describe_missing(),
            "members": list_members(),
            "calls": [
                (call.created_ns, call.group, call.number, call.operation, _count_bytes(call))
                for call in calls
            ],
            "call_places": [_find_place(call, places) for call in calls],
            "samples": self._sampler.samples,
            "collections": self._sampler.collections,
            "places": places,
            "scheduling": sorted(self._sampler.scheduling),
            "reducers": self._loop.list_reducers(),
            "loop": {
                "forward": self._loop.forwards,
                "backward": self._loop.backwards,
                "garbage collection": [(begin, end) for begin, end, _ in self._sampler.collections],
                WAITING: self._loop.waits,
            },
        }


def _is_whole(path: Path) -> bool:
    """Return whether a file is there, and ends as a table does: a full disk cuts it off."""
    with suppress(OSError), path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 16))
        return stream.read().rstrip().endswith(b"}")
    return False


def _describe_room(folder: Path) -> str:
    """Return how much room a folder's disk has, in words."""
    free = shutil.disk_usage(folder).free
    return f"its disk has {format_bytes(free)} left"


def count_steps_that_fit(num_calls: int) -> int:
    """Return of how many steps, at least one, the Flight Recorder keeps all collectives.

    Args:
        num_calls: of one step.
    """
    size = next((os.environ[name] for name in BUFFER_SIZES if name in os.environ), "")
    if not num_calls or not size.isdigit():
        return sys.maxsize
    return max(1, int(size) // num_calls - 1)


def _count_bytes(call: FlightEntry) -> int:
    sizes, dtypes = (call.raw.get(f"input_{name}", ()) for name in ("sizes", "dtypes"))
    return sum(count_bytes(*pair) or 0 for pair in zip(sizes, dtypes, strict=False))


def _find_place(call: FlightEntry, places: list[Place]) -> int:
    """Return the number of the user's line that issued a collective, added if it is new; -1 if unknown."""
    own = next((frame for frame in call.raw.get("frames", ()) if is_own(frame["filename"])), None)
    if own is None:
        return -1
    place = (str(own["filename"]), int(own["line"]), str(own["name"]), "")
    if place not in places:
        places.append(place)
    return places.index(place)
