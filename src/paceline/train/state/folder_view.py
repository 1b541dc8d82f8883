"""Finds which ranks see the run's folder as rank 0 does.

Rank 0 makes a file with a random name in the folder, and every rank looks for it. Files are compared and not
mounts: containers mount one disk at several places, and different disks at one.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError
from paceline.phrases import name_some
from paceline.train.belongings import EVALUATIONS, METRICS, check_belongings, folder_error
from paceline.train.state.transfer import gather, run_on_main
from paceline.world import World

log = logging.getLogger(__name__)

# How long a disk that several nodes share may take to show a new file.
_APPEARS_S = 2.0
_PREFIX = ".seen-by-"


@dataclass(frozen=True)
class FolderView:
    """A rank's view of a run's folder.

    Attributes:
        sees: whether this rank sees rank 0's folder.
        blind: hosts of the ranks that do not, the same on every rank; none if nodes share the folder.
    """

    sees: bool
    blind: tuple[str, ...] = ()


def find_view(world: World, folder: Path) -> FolderView:
    """Make the run's folder on rank 0, and find out which ranks see it; collective.

    Args:
        folder: of the run, as this rank names it.
    """

    def show() -> str:
        check_belongings(folder, (METRICS, EVALUATIONS))
        name = f"{_PREFIX}0-{secrets.token_hex(8)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob(f"{_PREFIX}*"):  # of processes that were killed here
                path.unlink(missing_ok=True)
            (folder / name).touch()
        except OSError as error:
            raise folder_error(f"{folder} cannot be written to: {error.strerror}.") from None
        return name

    shown = folder / run_on_main(world, show)
    try:
        sees = _await(shown)
        found = gather(world, (sees, socket.gethostname()))
    finally:
        if world.is_main:
            with suppress(OSError):
                shown.unlink()
    return FolderView(sees, tuple(sorted({host for each, host in found if not each})))


def check_view(world: World, view: FolderView, folder: Path, *, is_sharded: bool) -> None:
    """Warn if rank 0's disk alone has the checkpoints; refuse it if every rank is to write its share."""
    if not view.blind:
        return
    hosts = name_some(list(view.blind))
    if is_sharded:
        raise PacelineError(
            "PL553",
            saw=f'checkpoint.mode = "sharded", and ranks on {hosts} do not see {folder} as rank 0 does.',
            rule="Every rank writes its share into one folder.",
            fix='Give the run a folder that all nodes share, or set checkpoint.mode = "full": rank 0 then '
            "writes everything to its own disk.",
            on_every_rank=True,
        )
    if world.is_main:
        log.warning(
            "Ranks on %s do not see %s: only the disk of %s has the run's checkpoints and metrics. If it is "
            "lost, the run does not continue (PL550). Use a folder that all nodes share. [PL558]",
            hosts,
            folder,
            socket.gethostname(),
        )


def _await(path: Path) -> bool:
    """Return whether a file that another rank has made is here, or appears within a while."""
    begin_s = time.monotonic()
    while not path.exists():
        if time.monotonic() - begin_s > _APPEARS_S:
            return False
        time.sleep(0.02)
    return True
