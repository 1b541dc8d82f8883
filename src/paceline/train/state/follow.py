"""Keeps a run's metrics and evaluations on all disks, so that they follow rank 0 to another node.

Where nodes have disks of their own, rank 0 writes rows to its disk. Each save brings the new rows to the
other disks before the checkpoint counts. When the run resumes, the fullest file up to the resumed step goes
to the disks that have another one, so the history has every step once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint.copies import FileTransfer, plan_transfers
from paceline.checkpoint.hashed import FileRecord, hash_file
from paceline.errors import PacelineError
from paceline.train.belongings import EVALUATIONS, METRICS
from paceline.train.metrics import drop_rows_after, unwritable_error
from paceline.train.state.disks import Disks, name_rank, raise_any
from paceline.train.state.exchange import exchange
from paceline.train.state.transfer import gather
from paceline.train.state.write import caught
from paceline.world import World

_NAMES = (METRICS, EVALUATIONS)
_EMPTY = FileRecord(0, hash_file(Path(os.devnull)).sha256)


class SharedRows:
    """The rows of a run's metrics on all disks.

    Args:
        world: the ranks.
        disks: of the run's folder.
        folder: of the run, as this rank sees it.
    """

    def __init__(self, world: World, disks: Disks, folder: Path) -> None:
        self._world = world
        self._disks = disks
        self._folder = folder
        # Rank 0's: bytes of each file that all disks have.
        self._shared = dict.fromkeys(_NAMES, 0)

    def resume(self, step: int) -> None:
        """Copy the fullest history up to a step to all disks, and drop later rows; collective.

        Raises:
            PacelineError: PL523 where a disk cannot be written to.
        """
        own: dict[str, tuple[int, FileRecord]] = {}
        with caught() as found:
            if self._disks.leads:
                own = {name: self._keep_until(name, step) for name in _NAMES}
        gathered = gather(self._world, (found.error and name_rank(self._world, found.error), own))
        raise_any(error for error, _ in gathered)
        on_disks = [gathered[leader][1] for leader in self._disks.leaders]
        for name in _NAMES:
            fullest = max(range(len(on_disks)), key=lambda disk: (on_disks[disk][name][0], -disk))
            record = on_disks[fullest][name][1]
            having = {disk for disk, each in enumerate(on_disks) if each[name][1] == record}
            self._send(name, record, having)
            self._shared[name] = record.num_bytes

    def carry(self) -> None:
        """Copy rank 0's new rows to all disks; collective, before a checkpoint counts.

        Raises:
            PacelineError: PL523 where a disk cannot be written to.
        """
        tails: dict[str, tuple[int, bytes]] = {}
        with caught() as found:
            if self._world.is_main:
                tails = {name: (begin, self._read(name, begin)) for name, begin in self._shared.items()}
        error, tails = self._world.broadcast_object((found.error, tails))
        raise_any([error])
        fits = dict.fromkeys(_NAMES, True)
        with caught() as found:
            if self._disks.leads and not self._world.is_main:
                fits = {name: self._append(name, *tail) for name, tail in tails.items()}
        gathered = gather(self._world, (found.error and name_rank(self._world, found.error), fits))
        raise_any(error for error, _ in gathered)
        for name, (begin, tail) in tails.items():
            end = begin + len(tail)
            having = {disk for disk, leader in enumerate(self._disks.leaders) if gathered[leader][1][name]}
            if len(having) < len(self._disks.disks):
                record = hash_file(self._folder / name) if self._world.is_main and end else _EMPTY
                self._send(name, self._world.broadcast_object(record), having)
            self._shared[name] = end

    def _keep_until(self, name: str, step: int) -> tuple[int, FileRecord]:
        """Drop the rows after a step; return the number of those that stay, and the file's hash."""
        path = self._folder / name
        try:
            drop_rows_after(path, step)
            if not path.exists():
                return 0, _EMPTY
            with path.open("rb") as stream:
                return sum(1 for _ in stream), hash_file(path)
        except OSError as error:
            raise unwritable_error(path, error) from error

    def _read(self, name: str, begin: int) -> bytes:
        path = self._folder / name
        try:
            with path.open("rb") as stream:
                stream.seek(begin)
                return stream.read()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise unwritable_error(path, error) from error

    def _append(self, name: str, begin: int, tail: bytes) -> bool:
        """Append rows to a file that ends where they begin; return whether it does."""
        path = self._folder / name
        try:
            if (path.stat().st_size if path.exists() else 0) != begin:
                return False
            if tail:
                with path.open("ab") as stream:
                    stream.write(tail)
                    stream.flush()
                    os.fsync(stream.fileno())
        except OSError as error:
            raise unwritable_error(path, error) from error
        return True

    def _send(self, name: str, record: FileRecord, having: set[int]) -> None:
        """Send a whole file to the disks that do not have it; collective."""
        files: Mapping[str, FileRecord] = {name: record}
        plan = plan_transfers(files, {name: having}, {name: range(len(self._disks.disks))})
        if not plan:
            return
        partial = self._folder / f".{name}.partial"
        if self._disks.leads:
            with suppress(OSError):  # if it stays, the transfer fails, which all ranks learn
                partial.unlink(missing_ok=True)
        failed = exchange(
            self._world, self._disks, plan, files, lambda _: self._folder / name, lambda _: partial
        )
        if failed:
            raise_any([self._not_sent_error(failed)])
        with caught() as found:
            if any(each.target == self._disks.own for each in plan) and self._disks.leads:
                try:
                    os.replace(partial, self._folder / name)
                except OSError as error:
                    raise unwritable_error(self._folder / name, error) from error
        raise_any(gather(self._world, found.error and name_rank(self._world, found.error)))

    def _not_sent_error(self, failed: Mapping[FileTransfer, str]) -> PacelineError:
        each, problem = next(iter(failed.items()))
        return PacelineError(
            "PL523",
            saw=f"{each.name} could not be copied to {self._disks.disks[each.target].name}: {problem}.",
            rule="Every step of a run writes a row of metrics, and all nodes keep these rows.",
            fix="Free space or correct the disk there; the same command then continues from the last "
            "checkpoint.",
        )
