"""Resumes from the newest state in the memory of all nodes, if it is newer than the disks' checkpoints.

Protocol, all ranks together, at each start:

1. On each node, the first rank lists what the keepers of earlier ranks hold
   (`checkpoint/memory/held_states.py`): the shares of its own ranks, and copies of another node's shares. All
   nodes report their lists.
2. The newest state for which every writer's share exists is written to the disk as a checkpoint, unless the
   disks have a whole one of that step or a later one. The ranks of a node share out what it holds.
3. A share that is not as it was is named, and another node's copy is used, or an older state.
4. The keepers of earlier starts end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint import CheckpointFolder
from paceline.checkpoint.hashed import FileRecord
from paceline.checkpoint.memory.held_states import (
    FROM_MEMORY,
    MAX_LOADS,
    HeldPlace,
    Loads,
    end_keepers,
    find_held,
    note_load,
    put_aside,
    read_loads,
    write_share,
)
from paceline.checkpoint.names import FAILED, step_name
from paceline.checkpoint.same_copies import find_difference
from paceline.errors import PacelineError
from paceline.phrases import name_ranks
from paceline.train.follow import SharedRows
from paceline.train.state.apart import commit_apart, has_whole
from paceline.train.state.disks import Disks
from paceline.train.state.transfer import gather
from paceline.train.state.verified import SharedVerification
from paceline.train.state.write import caught, commit_shares
from paceline.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Place:
    """A share on some node.

    Attributes:
        node: its number.
        leader: the node's first rank.
        held: the share, on other nodes without its details (`_strip`).
    """

    node: int
    leader: int
    held: HeldPlace

    @property
    def key(self) -> tuple[int, str]:
        """A name that no other place has."""
        return self.leader, self.held.path


class MemoryOfNodes:
    """The states that keepers of earlier starts hold on all nodes; all methods are collective.

    Args:
        world: the ranks.
        folder: of the run.
    """

    def __init__(self, world: World, folder: Path) -> None:
        self._world, self._folder = world, folder
        nodes = gather(world, world.node_rank)
        self._node_ranks = [rank for rank, node in enumerate(nodes) if node == world.node_rank]
        leads = world.rank == self._node_ranks[0]
        self._found = find_held(folder.absolute(), os.getppid()) if leads else {}
        self._own = {held.path: held for each in self._found.values() for held in each}
        gathered = gather(world, [_strip(held) for held in self._own.values()])
        self._states: dict[tuple[int, str], list[_Place]] = {}
        for leader, held_there in enumerate(gathered):
            for held in held_there:
                key = held.share.step, held.share.token
                self._states.setdefault(key, []).append(_Place(nodes[leader], leader, held))

    def restore(
        self,
        disks: Disks,
        checkpoints: CheckpointFolder,
        checks: SharedVerification,
        *,
        copies: int,
        rows: SharedRows | None,
    ) -> int | None:
        """Write the newest whole state to the disk, if it is newer than what is there; return its step.

        A state that cannot be used is named in a warning, and the next one is tried.

        Args:
            disks: of the run's folder.
            checkpoints: of the run, as this rank sees them.
            checks: of these checkpoints, if all ranks see them.
            copies: disks per file.
            rows: metrics, if nodes have disks of their own.

        Raises:
            PacelineError: PL510 where another process saves here, PL504 for a checkpoint of a newer format.
        """
        if not self._states:
            return None
        runs = set().union(*gather(self._world, set(checkpoints.list_runs().values())))
        for (step, _), places in sorted(self._states.items(), reverse=True):
            if disks.is_common:
                is_there = checks.has_valid(step)
            else:
                is_there = has_whole(self._world, disks, checkpoints, step)
            if is_there:
                return None
            share = places[0].held.share
            run = share.identity.get("run")
            if runs and run not in runs:
                self._warn("The memory holds step %d of another run (%s), which is not used.", step, run)
            elif self._restore(step, places, disks, checkpoints, copies, rows):
                return step
        return None

    def end(self) -> None:
        """End the keepers of earlier starts."""
        end_keepers(self._found)

    def _restore(
        self,
        step: int,
        places: Sequence[_Place],
        disks: Disks,
        checkpoints: CheckpointFolder,
        copies: int,
        rows: SharedRows | None,
    ) -> bool:
        """Write one state to the disk; return whether that succeeded."""
        altered: set[tuple[int, str]] = set()
        while True:
            chosen = _choose([place for place in places if place.key not in altered])
            if chosen is None:
                if altered:
                    self._warn("Step %d in memory is not whole. The run goes on from an older state.", step)
                return False
            details = self._gather_details(chosen)
            difference = find_difference({writer: share.digests for writer, share in details.items()})
            if difference is not None:
                self._warn("Step %d in memory cannot be used: %s [PL560]", step, difference.saw)
                return False
            own_altered: list[tuple[int, str]] = []
            write = partial(self._write, chosen, own_altered)
            num_bytes = sum(size for share in details.values() for _, _, size in share.files)
            identity, content = details[0].identity | {FROM_MEMORY: True}, details[0].content
            try:
                if rows is None:
                    path = commit_shares(self._world, checkpoints, step, identity, content, num_bytes, write)
                else:
                    carry = partial(rows.put, details[0].rows)
                    path = commit_apart(
                        self._world,
                        checkpoints,
                        step,
                        identity,
                        content,
                        num_bytes,
                        write,
                        disks=disks,
                        copies=copies,
                        carry=carry,
                    )
            except PacelineError as error:
                if error.code == "PL560":
                    self._warn("%s It is not used. [PL560]", error.saw)
                    altered.update(key for each in gather(self._world, own_altered) for key in each)
                    continue
                if error.code != "PL508":
                    raise
                self._warn(
                    "Step %d stays in memory only: %s The run goes on from an older state.", step, error
                )
                return False
            copied = sorted({w for w, place in chosen.items() if place.held.is_copy})
            source = f", with copies of what {name_ranks(copied)} held" if copied else ""
            self._warn("All ranks ended after step %d was copied%s; it is now %s.", step, source, path)
            return True

    def _gather_details(self, chosen: Mapping[int, _Place]) -> dict[int, Any]:
        """Return the whole shares, without their places; collective."""
        own = {
            writer: self._own[place.held.path].share
            for writer, place in chosen.items()
            if place.leader == self._world.rank
        }
        return {writer: share for each in gather(self._world, own) for writer, share in each.items()}

    def _write(
        self, chosen: Mapping[int, _Place], altered: list[tuple[int, str]], folder: Path
    ) -> dict[str, FileRecord]:
        """Write this rank's part of what its node holds."""
        world = self._world
        here = [place for _, place in sorted(chosen.items()) if place.node == world.node_rank]
        records: dict[str, FileRecord] = {}
        for place in here[self._node_ranks.index(world.rank) :: len(self._node_ranks)]:
            with caught() as found:
                records |= write_share(place.held, folder)
            if found.error is not None:
                if found.error.code == "PL560":
                    altered.append(place.key)
                raise found.error
        return records

    def _warn(self, text: str, *values: Any) -> None:
        if self._world.is_main:
            log.warning(text, *values)


def put_failed_aside(world: World, disks: Disks, checkpoints: CheckpointFolder) -> None:
    """Count the starts that go on from a state of the memory, and put it aside at the third; collective.

    A state after whose load two starts ended before they reached a newer one would end the third start too.
    """
    own = read_loads(checkpoints) if disks.leads else None
    found = [each for each in gather(world, own) if each is not None]
    step = max((each.step for each in found), default=0)
    newest = [each for each in found if each.step == step]
    if not any(each.is_from_memory for each in newest):
        return
    num_loads = max(each.num_loads for each in newest)
    if own is not None and own.step == step:
        if num_loads < MAX_LOADS:
            note_load(checkpoints, Loads(step, True, num_loads))
        else:
            put_aside(checkpoints, step)
    if num_loads >= MAX_LOADS and world.is_main:
        log.warning(
            "%d starts went on from step %d, which came from memory, and ended before they reached a newer "
            "state. It is not used again, and is now %s. [PL563]",
            num_loads,
            step,
            f"{FAILED}{step_name(step)}",
        )


def _choose(places: Sequence[_Place]) -> dict[int, _Place] | None:
    """Return a place for the share of each writer, or `None` if some share is nowhere.

    A writer's own keeper comes first.
    """
    found: dict[int, _Place] = {}
    for place in sorted(places, key=lambda place: (place.held.is_copy, place.key)):
        found.setdefault(place.held.share.writer, place)
    if not found or len(found) < places[0].held.share.num_writers:
        return None
    return found


def _strip(held: HeldPlace) -> HeldPlace:
    """Return a place without what only the writing of its state needs."""
    run = {"run": held.share.identity.get("run")}
    return replace(held, share=replace(held.share, identity=run, digests=[], rows={}))
