"""Finds the shares of states that this node's memory keepers of an earlier start hold, and reads them.

Keepers are found by their command lines in /proc, and each has an index among its descriptors
(`keeper.py`). All nodes decide which state a run goes on from (`train/state/memory_restore.py`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint import files
from paceline.checkpoint.commit import Commits
from paceline.checkpoint.hashed import FileRecord, HashedFile
from paceline.checkpoint.manifest import BadManifestError, NewerFormatError, read_manifest
from paceline.checkpoint.memory.keeper import INDEX, MARKER, start_time, unpack_index
from paceline.checkpoint.names import FAILED, step_name
from paceline.checkpoint.same_copies import Digests
from paceline.errors import PacelineError

log = logging.getLogger(__name__)

# How long keepers may take to check what their ranks had copied before they ended.
_FINAL_S = 30.0
# Starts that may go on from one state of the memory without reaching a newer one.
MAX_LOADS = 2
_LOADS = ".memory-loads.json"
# In the identity of a checkpoint that was held in memory.
FROM_MEMORY = "from_memory"


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
        rows: of writer 0, the rows of metrics that not all disks have yet; see `train/follow.py`.
    """

    step: int
    token: str
    writer: int
    num_writers: int
    content: str
    identity: dict[str, Any]
    files: list[tuple[str, int, int]]
    digests: list[Digests]
    rows: dict[str, tuple[int, str]] = field(default_factory=dict)

    def dump(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class HeldPlace:
    """A share with its place on this node.

    Attributes:
        share: the share.
        path: of the keeper's descriptor.
        checksums: of the files.
        is_copy: whether the keeper's own rank was not the writer.
    """

    share: HeldShare
    path: str
    checksums: dict[str, int]
    is_copy: bool


def find_held(folder: Path, home_pid: int) -> dict[int, list[HeldPlace]]:
    """Return what each keeper on this node holds of a run, by process, once all have checked it.

    Args:
        folder: of the run, as its ranks have named it.
        home_pid: the process that starts this node's ranks.
    """
    end_s = time.monotonic() + _FINAL_S
    while True:
        found = dict(_list_keepers(folder, home_pid))
        if all(is_final for is_final, _ in found.values()) or time.monotonic() > end_s:
            return {pid: held for pid, (_, held) in found.items()}
        time.sleep(0.05)


def write_share(held: HeldPlace, folder: Path) -> dict[str, FileRecord]:
    """Write the files of a share into a folder, each durable on return; return their records by name.

    Raises:
        PacelineError: PL560 if the memory is not as it was when it was checked.
    """
    share, records = held.share, {}
    for name, start, size in share.files:
        with HashedFile(folder / name) as file:
            found = 0
            for data in _read(held, name, start, size):
                found = zlib.crc32(data, found)
                file.write(data)
        if found != held.checksums[name]:
            raise _altered_error(held, f"{name} of step {share.step} was altered")
        records[name] = file.record
    return records


def end_keepers(pids: Iterable[int]) -> None:
    """End keepers of earlier starts, which frees their memory."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


@dataclass(frozen=True)
class Loads:
    """The starts that went on from a folder's newest checkpoint.

    Attributes:
        step: of the checkpoint.
        is_from_memory: whether it came from memory.
        num_loads: starts that went on from it so far, without reaching a newer one.
    """

    step: int
    is_from_memory: bool
    num_loads: int


def read_loads(checkpoints: Commits) -> Loads | None:
    """Return the starts that went on from the newest checkpoint, or `None` if there is no readable one."""
    steps = checkpoints.steps()
    with suppress(BadManifestError, NewerFormatError, OSError, ValueError):
        step, path = max(steps.items())
        is_from_memory = bool(read_manifest(path).identity.get(FROM_MEMORY))
        num_loads = 0
        with suppress(OSError, ValueError, KeyError, TypeError):
            table = json.loads((checkpoints.path / _LOADS).read_bytes())
            num_loads = int(table["loads"]) if table["step"] == step else 0
        return Loads(step, is_from_memory, num_loads)
    return None


def note_load(checkpoints: Commits, loads: Loads) -> None:
    """Count one more start that goes on from the newest checkpoint."""
    table = {"step": loads.step, "loads": loads.num_loads + 1}
    with suppress(OSError):
        (checkpoints.path / _LOADS).write_text(json.dumps(table) + "\n", encoding="utf-8")


def put_aside(checkpoints: Commits, step: int) -> None:
    """Rename a checkpoint so that no start goes on from it."""
    with suppress(OSError):
        path = checkpoints.steps()[step]
        aside = path.with_name(f"{FAILED}{step_name(step)}")
        if aside.exists():
            files.remove(aside)
        files.rename(path, aside)
        (checkpoints.path / _LOADS).unlink(missing_ok=True)


def _read(held: HeldPlace, name: str, start: int, num_bytes: int) -> Iterator[bytes]:
    try:
        fd = os.open(held.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _altered_error(held, f"{name} is gone ({error.strerror})") from None
    try:
        end = start + num_bytes
        while start < end:
            data = os.pread(fd, min(files.CHUNK_BYTES, end - start), start)
            if not data:
                raise _altered_error(held, f"{name} ends too early")
            yield data
            start += len(data)
    finally:
        os.close(fd)


def _altered_error(held: HeldPlace, what: str) -> PacelineError:
    keeper = "another node's keeper, which holds a copy for" if held.is_copy else "the keeper of"
    return PacelineError(
        "PL560",
        saw=f"{what} in the memory of {keeper} rank {held.share.writer}.",
        rule="A state is used only if its files have the checksums that were computed when it was kept.",
        fix="If it happens again, check the memory of that machine.",
    )


def _list_keepers(folder: Path, home_pid: int) -> Iterator[tuple[int, tuple[bool, list[HeldPlace]]]]:
    home = [home_pid, start_time(home_pid)]
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not entry.isdigit():
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            ours = [str(home_pid).encode(), os.fsencode(folder)]
            if MARKER.encode() not in words[:4] or words[-3:-1] != ours:
                continue
            has_index, table = _read_index(entry)
            if table is None:  # a keeper without an index is still starting
                yield int(entry), (has_index, [])
                continue
            if table["home"] != home:
                continue
            held = []
            for each in table["held"]:
                path = f"/proc/{entry}/fd/{each.pop('fd')}"
                checksums, is_copy = each.pop("checksums"), each.pop("is_copy")
                held.append(HeldPlace(HeldShare(**each), path, checksums, is_copy))
            yield int(entry), (bool(table["final"]), held)


def _read_index(pid: str) -> tuple[bool, dict[str, Any] | None]:
    """Return whether a keeper has an index, and the index, or `None` if it was altered.

    While it is replaced there may be two, and one not yet whole.
    """
    has_index = False
    for _ in range(20):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            with suppress(OSError, ValueError):
                if not os.readlink(path).startswith(f"/memfd:{INDEX}"):
                    continue
                has_index = True
                found: dict[str, Any] = unpack_index(Path(path).read_bytes())
                return True, found
        time.sleep(0.02)
    if has_index:
        log.warning("The index of a memory keeper (process %s) was altered. It is not used. [PL560]", pid)
    return has_index, None
