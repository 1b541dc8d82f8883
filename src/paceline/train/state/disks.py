"""Finds which ranks see the same folder, so that a run knows how many disks hold its files.

Protocol, all ranks together, at each start:

1. Rank 0 makes the folder and a file with a random name in it. Every rank looks for that file. If all see
   it, the folder is common, and the file is removed.
2. Otherwise each rank that does not see it makes a file of its own in the folder that it sees. Ranks that
   then see the same files share a disk.

Files are compared and not mounts: containers mount one disk at several places, and different disks at one.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError
from paceline.phrases import name_ranks
from paceline.train.state.transfer import gather
from paceline.world import World

# How long a disk that several nodes share may take to show a new file.
_APPEARS_S = 2.0
_PREFIX = ".seen-by-"


@dataclass(frozen=True)
class SharedDisk:
    """A folder's disk, with the ranks that see it.

    Attributes:
        ranks: that see it, rising; the first one leads: it writes for all of them.
        name: for messages: the host names of its nodes, different for each disk.
        domain: what fails together with it, such as a rack or switch; empty if unknown.
    """

    ranks: tuple[int, ...]
    name: str
    domain: str = ""


@dataclass(frozen=True)
class Disks:
    """The disks that hold a run's folder, one for each set of nodes that share it.

    Attributes:
        disks: by rising first rank, so rank 0's is the first.
        rank: this one.
    """

    disks: tuple[SharedDisk, ...]
    rank: int

    @property
    def is_common(self) -> bool:
        """Whether all ranks see one folder."""
        return len(self.disks) == 1

    @property
    def own(self) -> int:
        """The number of this rank's disk."""
        return next(number for number, disk in enumerate(self.disks) if self.rank in disk.ranks)

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its disk."""
        return self.disks[self.own].ranks[0] == self.rank

    @property
    def leaders(self) -> list[int]:
        """The first ranks of all disks."""
        return [disk.ranks[0] for disk in self.disks]


def find_disks(world: World, folder: Path, make: Callable[[], None]) -> Disks:
    """Find out which ranks see the same `folder`; collective.

    Args:
        world: the ranks.
        folder: of the run, as this rank names it.
        make: makes the folder, or raises a `PacelineError` if this rank cannot use it; called on the first
            rank of each disk at least.

    Returns:
        The disks, the same on every rank except for `rank`.

    Raises:
        PacelineError: on every rank what `make` raised on one of them; PL532 for a folder in which no file
            can be made, PL553 for ranks that see each other's files in one direction only.
    """
    number = secrets.token_hex(8)
    own = folder / f"{_PREFIX}{world.rank}-{number}"
    error = _make(world, own, make) if world.is_main else None
    try:
        first = gather(world, (error, own.name if world.is_main else "", *_describe_node()))
        raise_any(each[0] for each in first)
        hosts, domains = [each[2] for each in first], [each[3] for each in first]
        sees = _await(folder / first[0][1])
        if all(gather(world, sees)):
            _clear(own, world.is_main)
            return Disks((SharedDisk(tuple(range(world.world_size)), _name(set(hosts)), ""),), world.rank)
        error = None if sees else _make(world, own, make)
        second = gather(world, (error, None if sees and not world.is_main else own.name))
        raise_any(each[0] for each in second)
        names = {rank: name for rank, (_, name) in enumerate(second) if name is not None}
        seen = gather(world, _list_seen(folder, names))
    finally:
        with suppress(OSError):
            own.unlink()
    _check_mutual(seen, hosts, folder)
    groups: dict[frozenset[int], list[int]] = {}
    for rank, each in enumerate(seen):
        groups.setdefault(each, []).append(rank)
    found = Disks(_name_disks(list(groups.values()), hosts, domains), world.rank)
    _clear(own, found.leads)
    return found


def raise_any(errors: Iterable[PacelineError | None]) -> None:
    """Raise the first error that is not `None`; all ranks call it with the same errors."""
    for error in errors:
        if error is not None:
            error.on_every_rank = True
            raise error


def name_rank(world: World, error: PacelineError) -> PacelineError:
    """Return an error whose message also has this rank and its host, for the other ranks."""
    if world.world_size == 1:
        return error
    saw = f"{error.saw} (rank {world.rank} on {socket.gethostname()})"
    return PacelineError(error.code, saw=saw, rule=error.rule, fix=error.fix)


def find_domain(host: str, environ: Mapping[str, str]) -> str:
    """Return what fails together with a node: SLURM's switch, else its host name without the last number.

    SLURM names the switches above a node and the node itself in `SLURM_TOPOLOGY_ADDR`, with dots between.
    """
    above, _, _ = environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")
    return above or host.partition(".")[0].rstrip("0123456789")


def _describe_node() -> tuple[str, str]:
    host = socket.gethostname()
    return host, find_domain(host, os.environ)


def _make(world: World, own: Path, make: Callable[[], None]) -> PacelineError | None:
    """Make the folder and this rank's file in it; return the error that prevents it."""
    try:
        make()
        own.touch()
    except PacelineError as error:
        return name_rank(world, error)
    except OSError as error:
        refused = PacelineError(
            "PL532",
            saw=f"{own.parent} cannot be written to: {error.strerror}.",
            rule="A run's folder holds its checkpoints and metrics.",
            fix="Choose another folder, or change its permissions.",
        )
        return name_rank(world, refused)
    return None


def _clear(own: Path, leads: bool) -> None:
    """Remove the files of all ranks, and those of processes that were killed here; on the first rank."""
    for path in own.parent.glob(f"{_PREFIX}*") if leads else ():
        with suppress(OSError):
            path.unlink()


def _await(path: Path) -> bool:
    """Return whether a file that another rank has made is here, or appears within a while."""
    begin_s = time.monotonic()
    while not path.exists():
        if time.monotonic() - begin_s > _APPEARS_S:
            return False
        time.sleep(0.02)
    return True


def _list_seen(folder: Path, names: Mapping[int, str]) -> frozenset[int]:
    """Return the ranks whose files are in the folder that this rank sees."""
    return frozenset(rank for rank, name in names.items() if (folder / name).exists())


def _check_mutual(seen: list[frozenset[int]], hosts: list[str], folder: Path) -> None:
    """Raise PL553 unless ranks that see a file also see all that its writer sees."""
    for rank, each in enumerate(seen):
        wrong = next((other for other in sorted(each) if seen[other] != each), None)
        if not each:
            saw = f"Rank {rank} on {hosts[rank]} sees no file in {folder}, not even its own."
        elif wrong is not None:
            saw = (
                f"Rank {rank} on {hosts[rank]} sees in {folder} the files of "
                f"{name_ranks(sorted(each))}, and rank {wrong} on {hosts[wrong]} sees there those of "
                f"{name_ranks(sorted(seen[wrong]))}."
            )
        else:
            continue
        error = PacelineError(
            "PL553",
            saw=saw,
            rule="Nodes must either share a folder or have folders of their own, so that each file of a "
            "checkpoint has a known place.",
            fix="Mount the disk in the same way on all of these nodes, or give the run a folder that each "
            "node has on a disk of its own.",
        )
        raise_any([error])


def _name_disks(groups: list[list[int]], hosts: list[str], domains: list[str]) -> tuple[SharedDisk, ...]:
    """Return the disks of groups of ranks, each with a name of its own."""
    names = [_name({hosts[rank] for rank in ranks}) for ranks in groups]
    count = Counter(names)
    found = []
    for ranks, name in zip(groups, names, strict=True):
        unique = name if count[name] == 1 else f"{name} (rank {ranks[0]})"
        own = {domains[rank] for rank in ranks}
        found.append(SharedDisk(tuple(ranks), unique, own.pop() if len(own) == 1 else ""))
    return tuple(sorted(found, key=lambda disk: disk.ranks[0]))


def _name(hosts: set[str]) -> str:
    shown = sorted(hosts)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
