"""Keeps a run from losing its history when it moves to a node with other disks.

Rank 0 writes and reads the checkpoints. If the nodes share no disk, the other nodes hold none, and a run
that continues without the node of rank 0 would start from step 1. Each node that does not see a checkpoint
after its commit therefore notes the step on its own disk. At resume every node reports what its folder
holds. A run that would go back behind a step that any node has recorded is refused.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from paceline.checkpoint import CheckpointFolder
from paceline.checkpoint.manifest import FILE_NAME
from paceline.checkpoint.names import CHECKPOINTS, step_name
from paceline.errors import PacelineError
from paceline.world import World

log = logging.getLogger(__name__)

_NOTE = ".committed-elsewhere"


@dataclass(frozen=True)
class _Held:
    """The newest checkpoint in one node's folder, and the newest one that it knows of.

    Attributes:
        rank: the rank that read the folder.
        host: its machine.
        step: of the newest committed checkpoint, 0 for none.
        digest: of that checkpoint's manifest.
        noted: the newest step that another node is known to have committed, 0 for none.
    """

    rank: int
    host: str
    step: int
    digest: str
    noted: int


class History:
    """This node's record of a run's checkpoints.

    Args:
        world: the ranks.
        folder: of the run, as this rank sees it.
    """

    def __init__(self, world: World, folder: Path) -> None:
        self._world = world
        self._folder = folder
        self._has_missed_one = False
        self._has_warned = False

    def check(self) -> None:
        """Compare the checkpoints of all nodes; collective, once per resume. Sends about 100 bytes per rank.

        Raises:
            PacelineError: PL318 if a node knows of a newer checkpoint than rank 0 has, PL319 if two nodes
                hold different checkpoints of one step.
        """
        own = self._look()
        held: list[_Held | None] = [own]
        if self._world.world_size > 1:
            held = [None] * self._world.world_size
            dist.all_gather_object(held, own)
        nodes = [entry for entry in held if entry is not None]
        main = nodes[0]
        newest = max(nodes, key=lambda entry: (max(entry.step, entry.noted), entry.step))
        if max(newest.step, newest.noted) > main.step:
            raise self._lost_error(main, newest)
        for other in nodes:
            can_compare = other.step == main.step and other.digest and main.digest
            if can_compare and other.digest != main.digest:
                raise self._two_error(main, other)

    def note_commit(self, step: int) -> None:
        """Note on this node's disk that rank 0 has committed a step, if this node cannot see it."""
        if self._world.is_main or self._world.local_rank != 0:
            return
        if (self._folder / CHECKPOINTS / step_name(step)).exists():
            self._has_missed_one = False
            return
        # A shared disk may show a new folder late: the warning waits for the next save.
        if self._has_missed_one and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s on %s does not hold the checkpoints that rank 0 writes: the nodes share no disk there. "
                "Without the node of rank 0, this run cannot continue. Use a folder on a shared disk. "
                "[PL318]",
                self._folder,
                socket.gethostname(),
            )
        self._has_missed_one = True
        with suppress(OSError):  # a read-only disk keeps no history
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / _NOTE).write_text(f"{step}\n", encoding="utf-8")

    def _look(self) -> _Held:
        step, digest, noted = 0, "", 0
        with suppress(OSError):
            steps = CheckpointFolder(self._folder, keep=1).steps()
            if steps:
                step = max(steps)
                digest = hashlib.sha256((steps[step] / FILE_NAME).read_bytes()).hexdigest()
        with suppress(OSError, ValueError):
            noted = int((self._folder / _NOTE).read_text(encoding="utf-8"))
        return _Held(self._world.rank, socket.gethostname(), step, digest, noted)

    def _lost_error(self, main: _Held, newest: _Held) -> PacelineError:
        has = f"its newest checkpoint there is of step {main.step}" if main.step else "there is no checkpoint"
        if newest.step >= newest.noted:
            knows = f"on {newest.host} (rank {newest.rank}) the folder holds step {newest.step}"
        else:
            knows = f"{newest.host} (rank {newest.rank}) recorded that step {newest.noted} was saved"
        return _on_every_rank(
            PacelineError(
                "PL318",
                saw=f"Rank 0, on {main.host}, would resume from {self._folder}, and {has}; but {knows}.",
                rule="Rank 0 reads the checkpoints. Without the newest one, it would repeat steps that are "
                "already done; without any, it would start from the beginning.",
                fix="Copy the checkpoints to the node of rank 0, start with their node as node 0, or use a "
                f"folder on a shared disk. To start over, remove {self._folder} on every node.",
            )
        )

    def _two_error(self, main: _Held, other: _Held) -> PacelineError:
        return _on_every_rank(
            PacelineError(
                "PL319",
                saw=f"{self._folder} holds different checkpoints of step {main.step} on {main.host} (rank 0) "
                f"and on {other.host} (rank {other.rank}).",
                rule="The nodes have trained two separate runs, and only one of them can continue.",
                fix="Decide which one is right, and remove the folder on the other node.",
            )
        )


def _on_every_rank(error: PacelineError) -> PacelineError:
    error.on_every_rank = True
    return error
