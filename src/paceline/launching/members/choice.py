"""Chooses the members of the next world."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.launching.members.records import Peer
from paceline.launching.members.world import NodeWorld


def has_finished(world: NodeWorld, here: Sequence[Peer]) -> bool:
    """Return whether the ranks of all members that are there have succeeded."""
    done = [peer.is_done for peer in here if world.find(peer.member.key) >= 0]
    return bool(done) and all(done)


def choose_peers(world: NodeWorld | None, here: Sequence[Peer], most: int) -> list[Peer] | None:
    """Return the members of the next world in order, or None while one of the last world is not ready.

    Those of the last world keep their order, and newcomers follow in the order in which they came.

    Args:
        world: the last one.
        here: this launcher and all that follow it.
        most: the most members; further ones wait as spares.
    """
    numbers = {} if world is None else {member.key: i for i, member in enumerate(world.members)}
    old = [peer for peer in here if peer.member.key in numbers and not peer.is_done]
    new = [peer for peer in here if peer.member.key not in numbers and peer.offer is not None]
    if any(peer.offer is None for peer in old):
        return None
    old.sort(key=lambda peer: numbers[peer.member.key])
    return [*old, *(peer for peer in new if not peer.is_done)][:most]
