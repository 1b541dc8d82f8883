"""Finds the states that memory keepers of an earlier start hold, and writes the newest one to the disk.

Keepers are found by their command lines in /proc, and each has an index among its descriptors
(`memory_keeper.py`). A state is whole if the keepers of all its writers hold their shares.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import files
from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.hashed import FileRecord, HashedFile
from paceline.checkpoint.manifest import BadManifestError, NewerFormatError, read_manifest
from paceline.checkpoint.memory_keeper import INDEX, MARKER, start_time
from paceline.checkpoint.names import FAILED
from paceline.checkpoint.same_copies import Digests, find_difference
from paceline.errors import PacelineError

log = logging.getLogger(__name__)

# How long keepers may take to check what their ranks had copied before they ended.
_FINAL_S = 30.0
# Starts that may go on from one state of the memory without reaching a newer one.
_MAX_LOADS = 2
_LOADS = ".memory-loads.json"
# In the identity of a checkpoint that was held in memory.
_FROM_MEMORY = "from_memory"


@dataclass(frozen=True)
class HeldShare:
    """One writer's share of a state in memory; JSON-able.

    Attributes:
        step: optimizer steps taken.
        token: of this state; the same for all writers.
        writer: its number.
        num_writers: of all.
        content: name of the content.
        identity: for the manifest.
        files: name, first byte in the memory and number of bytes.
        digests: of tensors that other ranks hold too.
    """

    step: int
    token: str
    writer: int
    num_writers: int
    content: str
    identity: dict[str, Any]
    files: list[tuple[str, int, int]]
    digests: list[Digests]

    def dump(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Held:
    """A share with its place: a descriptor of a keeper, and the checksums of its files."""

    share: HeldShare
    path: str
    checksums: dict[str, int]


class _AlteredError(Exception):
    """The error of memory that is not as it was when it was checked."""


def restore_newest(checkpoints: CheckpointFolder, folder: Path, home_pid: int) -> None:
    """Write the newest whole state of the memory to the disk, if it is newer than what is there.

    Then end the keepers of earlier starts. A state that cannot be used is named in a warning, and the next
    one is tried.

    Args:
        checkpoints: of the run.
        folder: of the run, as its ranks have named it.
        home_pid: the process that starts this run's ranks.

    Raises:
        PacelineError: PL510 where another process saves here.
    """
    keepers = _await_keepers(folder, home_pid)
    states: dict[tuple[int, str], list[_Held]] = {}
    for held in (each for found in keepers.values() for each in found):
        states.setdefault((held.share.step, held.share.token), []).append(held)
    on_disk = checkpoints.steps()
    runs = set(checkpoints.list_runs().values())
    for (step, _), shares in sorted(states.items(), key=lambda item: item[0], reverse=True):
        if step <= max(on_disk, default=0):
            break
        run = shares[0].share.identity.get("run")
        if len({held.share.writer for held in shares}) < shares[0].share.num_writers:
            continue  # its ranks ended before all of them had copied it
        if runs and run not in runs:
            log.warning("The memory holds step %d of another run (%s), which is not used.", step, run)
            continue
        try:
            path = _write(checkpoints, step, shares)
        except _AlteredError as error:
            log.warning("%s The run goes on from an older state. [PL560]", error)
        except PacelineError as error:
            if error.code != "PL508":
                raise
            log.warning("Step %d stays in memory only: %s The run goes on from an older state.", step, error)
        else:
            log.warning("All ranks ended after step %d was copied; it is now %s.", step, path)
            break
    for pid in keepers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def put_failed_aside(checkpoints: CheckpointFolder) -> None:
    """Count the starts that go on from a state of the memory, and put it aside at the third.

    A state after whose load two starts ended before they reached a newer one would end the third start too.
    """
    steps = checkpoints.steps()
    if not steps:
        return
    step, path = max(steps.items())
    note = checkpoints.path / _LOADS
    with suppress(BadManifestError, NewerFormatError, OSError):
        if not read_manifest(path).identity.get(_FROM_MEMORY):
            return
        loads = 0
        with suppress(OSError, ValueError, KeyError, TypeError):
            table = json.loads(note.read_bytes())
            loads = int(table["loads"]) if table["step"] == step else 0
        if loads < _MAX_LOADS:
            note.write_text(json.dumps({"step": step, "loads": loads + 1}) + "\n", encoding="utf-8")
            return
        aside = path.with_name(f"{FAILED}{path.name}")
        files.rename(path, aside)
        note.unlink(missing_ok=True)
        log.warning(
            "%d starts went on from step %d, which came from memory, and ended before they reached a newer "
            "state. It is not used again, and is now %s. [PL563]",
            loads,
            step,
            aside.name,
        )


def _write(checkpoints: CheckpointFolder, step: int, shares: list[_Held]) -> Path:
    """Write a state to the disk as a checkpoint, and return its folder."""
    first = shares[0].share
    difference = find_difference({held.share.writer: held.share.digests for held in shares})
    if difference is not None:
        raise _AlteredError(f"Step {step} in memory cannot be used: {difference.saw}")
    num_bytes = sum(size for held in shares for _, _, size in held.share.files)
    identity = first.identity | {_FROM_MEMORY: True}
    records: dict[str, FileRecord] = {}
    with checkpoints.begin(step, num_bytes=num_bytes, identity=identity) as save:
        for held in shares:
            for name, start, size in held.share.files:
                with HashedFile(save.folder / name) as file:
                    found = 0
                    for data in _read(held, name, start, size):
                        found = zlib.crc32(data, found)
                        file.write(data)
                if found != held.checksums[name]:
                    raise _AlteredError(
                        f"{name} of step {step} was altered in the memory of the keeper of rank "
                        f"{held.share.writer}."
                    )
                records[name] = file.record
        return save.commit(first.content, records)


def _read(held: _Held, name: str, start: int, num_bytes: int) -> Iterator[bytes]:
    try:
        fd = os.open(held.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _AlteredError(f"{name} is no longer in memory: {error.strerror}.") from None
    try:
        end = start + num_bytes
        while start < end:
            data = os.pread(fd, min(files.CHUNK_BYTES, end - start), start)
            if not data:
                raise _AlteredError(f"{name} ends too early in the memory of rank {held.share.writer}.")
            yield data
            start += len(data)
    finally:
        os.close(fd)


def _await_keepers(folder: Path, home_pid: int) -> dict[int, list[_Held]]:
    """Return what each keeper of this run holds, once all have checked it."""
    end_s = time.monotonic() + _FINAL_S
    while True:
        found = dict(_list_keepers(folder, home_pid))
        if all(is_final for is_final, _ in found.values()) or time.monotonic() > end_s:
            return {pid: held for pid, (_, held) in found.items()}
        time.sleep(0.05)


def _list_keepers(folder: Path, home_pid: int) -> Iterator[tuple[int, tuple[bool, list[_Held]]]]:
    home = [home_pid, start_time(home_pid)]
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not entry.isdigit():
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            if MARKER.encode() not in words[:4]:
                continue
            table = _read_index(entry)
            if table is None or table["folder"] != str(folder) or table["home"] != home:
                continue
            held = []
            for each in table["held"]:
                path = f"/proc/{entry}/fd/{each.pop('fd')}"
                checksums = each.pop("checksums")
                held.append(_Held(HeldShare(**each), path, checksums))
            yield int(entry), (bool(table["final"]), held)


def _read_index(pid: str) -> dict[str, Any] | None:
    """Return a keeper's index; while it is replaced there may be two, and one not yet whole."""
    for _ in range(20):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            with suppress(OSError, ValueError):
                if not os.readlink(path).startswith(f"/memfd:{INDEX}"):
                    continue
                data = Path(path).read_bytes()
                if len(data) - 8 == int.from_bytes(data[:8], "little"):
                    found: dict[str, Any] = json.loads(data[8:])
                    return found
        time.sleep(0.02)
    return None
