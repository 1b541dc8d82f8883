"""Places the files of a checkpoint on several disks, for nodes that share none.

Every file is written to the disk of its writer and copied to others, those that are least likely to fail with
it first. All ranks find the same places and the same transfers without communication. When a run resumes, the
disks report what they hold. The newest step counts whose files are each on some disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.checkpoint.hashed import FileRecord
from paceline.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class FileTransfer:
    """A file to be sent from one disk to another.

    Attributes:
        name: of the file.
        source: number of the disk that has it.
        target: number of the disk that gets it.
    """

    name: str
    source: int
    target: int


def place_copies(
    files: Mapping[str, FileRecord],
    holders: Mapping[str, Collection[int]],
    domains: Sequence[str],
    copies: int,
) -> dict[str, tuple[int, ...]]:
    """Choose the disks of every file: those that have it, and others until there are enough.

    The next ones are in other failure domains if possible, then those that have the fewest bytes so far.

    Args:
        files: of the checkpoint.
        holders: by file, the disks that have it, at least one.
        domains: what fails together with each disk, empty if unknown.
        copies: disks per file, at most as many as there are.
    """
    num_bytes: Counter[int] = Counter()
    for name, having in holders.items():
        for disk in having:
            num_bytes[disk] += files[name].num_bytes
    found = {}
    for name in sorted(files, key=lambda name: (-files[name].num_bytes, name)):
        chosen = sorted(holders[name])
        home = chosen[0]
        while len(chosen) < copies:
            taken = {domains[disk] for disk in chosen}
            others = [disk for disk in range(len(domains)) if disk not in chosen]
            # Neighbours come first among equals, so that every disk sends and receives equally much.
            nearest = min(
                others,
                key=lambda disk: (domains[disk] in taken, num_bytes[disk], (disk - home) % len(domains)),
            )
            chosen.append(nearest)
            num_bytes[nearest] += files[name].num_bytes
        found[name] = tuple(chosen)
    return found


def plan_transfers(
    files: Mapping[str, FileRecord],
    holders: Mapping[str, Collection[int]],
    wanted: Mapping[str, Collection[int]],
) -> list[FileTransfer]:
    """Return the transfers that bring files to the disks that want them, in an order without deadlock.

    A disk does one transfer at a time, in this order. Neighbours in the order use different disks as far as
    possible, so that several run at once.

    Args:
        files: of the checkpoint.
        holders: by file, the disks that have it.
        wanted: by file, the disks that are to have it; those that have it already count as served.
    """
    sent: Counter[int] = Counter()
    pending: list[FileTransfer] = []
    for name in sorted(wanted, key=lambda name: (-files[name].num_bytes, name)):
        for target in sorted(set(wanted[name]) - set(holders[name])):
            source = min(holders[name], key=lambda disk: (sent[disk], disk))
            sent[source] += files[name].num_bytes
            pending.append(FileTransfer(name, source, target))
    ordered: list[FileTransfer] = []
    while pending:
        busy: set[int] = set()
        later: list[FileTransfer] = []
        for each in pending:
            if each.source in busy or each.target in busy:
                later.append(each)
            else:
                busy |= {each.source, each.target}
                ordered.append(each)
        pending = later
    return ordered


@dataclass(frozen=True)
class Found:
    """A checkpoint as one disk has it.

    Attributes:
        manifest: of the checkpoint, the same on all disks.
        digest: of the manifest.
        files: those that are there with the right size.
    """

    manifest: Manifest
    digest: str
    files: frozenset[str]

    @property
    def generation(self) -> int:
        """The number of the start that saved it."""
        generation = self.manifest.identity.get("generation", 0)
        return generation if isinstance(generation, int) else 0


def list_candidates(disks: Iterable[Iterable[Found]]) -> list[tuple[Found, dict[str, set[int]]]]:
    """Return the checkpoints that some disk has, the newest first, with the disks that have each file.

    For one step, the checkpoint of the latest start comes first. An earlier one was left by a start that
    ended while it saved, or is on a disk that was away meanwhile.

    Args:
        disks: what each of them has.
    """
    found: dict[str, Found] = {}
    holders: dict[str, dict[str, set[int]]] = {}
    for number, checkpoints in enumerate(disks):
        for each in checkpoints:
            found.setdefault(each.digest, each)
            own = holders.setdefault(each.digest, {name: set() for name in each.manifest.files})
            for name in each.files:
                own[name].add(number)
    ordered = sorted(found.values(), key=lambda each: (each.manifest.step, each.generation), reverse=True)
    return [(each, holders[each.digest]) for each in ordered]
