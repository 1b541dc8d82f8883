"""Decides how ranks save that were asked to stop: on the disk, or in memory if the disk takes too long.

If the last save took longer than the ranks still have, another one would be cut off before it is committed.
Then the state goes to memory (`memory_saves.py`): ranks of nodes that leave send copies of their shares to
nodes that stay. Once these hold all shares, the ranks leave, and the next round goes on from that state
(`memory_restore.py`).

Ranks also get a signal if nodes join or leave and their own launcher starts them again. So each launcher
tells its ranks whether it leaves itself (`place.read_goes_on`).

The disk is tried anyway if no node stays, if nobody would start ranks again, or if the memory fails.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from paceline.place import read_goes_on, read_grace_s
from paceline.train.state.transfer import gather
from paceline.train.stopping import StopRequests
from paceline.units import format_seconds
from paceline.world import World


@dataclass(frozen=True)
class _StopMessage:
    """A rank's message before it leaves.

    Attributes:
        node: its number.
        rest_s: seconds until it is killed; infinite if it was not asked, or if that is unknown.
        save_s: of the last save, if known here.
        leaves: whether its launcher leaves.
        starts_again: whether its launcher starts ranks again if it stays.
    """

    node: int
    rest_s: float
    save_s: float | None
    leaves: bool
    starts_again: bool


@dataclass(frozen=True)
class Departure:
    """The nodes that leave, and the time that they have.

    Attributes:
        leaving: numbers of the nodes that leave the job.
        rest_s: seconds until the first rank is killed; infinite if unknown.
        save_s: of the last save; 0 if unknown.
        why_not: why no other node can hold the state, or "".
    """

    leaving: frozenset[int]
    rest_s: float
    save_s: float
    why_not: str

    @property
    def is_short(self) -> bool:
        """Whether a save takes longer than the ranks have."""
        return self.save_s > self.rest_s

    def __str__(self) -> str:
        return (
            f"The last save took {format_seconds(self.save_s)}, and ranks that were asked to stop are killed "
            f"within {format_seconds(max(0.0, self.rest_s))}"
        )


def plan_departure(world: World, requests: StopRequests, save_s: float | None) -> Departure:
    """Return which nodes leave and how long they have, the same on all ranks; collective.

    Args:
        world: the ranks.
        requests: the signals of this rank.
        save_s: of the last save, if known on this rank.
    """
    grace_s, waited_s, goes_on = read_grace_s(os.environ), requests.waited_s, read_goes_on(os.environ)
    own = _StopMessage(
        node=world.node_rank,
        rest_s=math.inf if grace_s is None or waited_s is None else grace_s - waited_s,
        save_s=save_s,
        leaves=waited_s is not None if goes_on is None else not goes_on,
        starts_again=goes_on is not None,
    )
    found = gather(world, own)
    leaving = frozenset(each.node for each in found if each.leaves)
    staying = [each for each in found if each.node not in leaving]
    why_not = ""
    if not staying:
        why_not = "no other node stays" if world.num_nodes > 1 else "there is no other node"
    elif not all(each.starts_again for each in staying):
        why_not = "the other nodes do not go on (--nnodes MIN:MAX or --max-restarts)"
    return Departure(
        leaving,
        min(each.rest_s for each in found),
        max((each.save_s for each in found if each.save_s is not None), default=0.0),
        why_not,
    )
