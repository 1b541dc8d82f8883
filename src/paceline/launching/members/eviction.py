"""Decides whether a slow node is put out of its job.

The leader decides, and all launchers remember it, because any of them may lead later.

A node is put out only while the others are enough for the job, and one per round: the times of the next round
show whether it was the cause. If a rank is slow that was slow on a node put out before, its own work is slow
and not the node: ranks are numbered anew in each round, and the work of a number moves with it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.launching.members.world import Member, NodeWorld


@dataclass
class Evictions:
    """The nodes that were put out so far.

    Attributes:
        round: the number of the last round that a node was put out of.
        slow_ranks: ranks that were slow, each with the name of the node that was put out for it.
    """

    round: int = 0
    slow_ranks: dict[int, str] = field(default_factory=dict)

    def refuse(
        self, member: Member, ranks: Collection[int], world: NodeWorld, present: Collection[str], least: int
    ) -> str | None:
        """Return why a slow node stays, as a clause; `None` if it is to be put out.

        Args:
            member: the node.
            ranks: its slow ranks.
            world: that of the round.
            present: keys of all launchers that are there, spares included.
            least: nodes that the job needs.
        """
        if self.round == world.round:
            return "another node is being put out"
        others = set(present) - {member.key}
        if len(others) < least:
            return f"the job needs {least} nodes, and {len(others)} would be left"
        if before := [rank for rank in ranks if rank in self.slow_ranks]:
            rank = before[0]
            return (
                f"rank {rank} was the slow one on {self.slow_ranks[rank]} too, which was put out: the work "
                "of that rank is slow, not the node"
            )
        return None

    def note(self, member: Member, ranks: Collection[int], number: int) -> None:
        """Take note that a node is put out of a round."""
        self.round = number
        self.slow_ranks |= dict.fromkeys(ranks, str(member))
