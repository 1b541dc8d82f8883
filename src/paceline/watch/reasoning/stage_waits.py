"""Explains waits between the stages of a pipeline, whose messages are known by stage and microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.watch.protocol.report import Call, SharedPlace, Verdict
from paceline.watch.protocol.words import own_frames
from paceline.watch.reasoning.verdict import build_verdict

RULE = "A stage waits for what its neighbours compute, in the order of one list of actions."
FIX = "Compare layout.schedule and the version of paceline on the nodes: all ranks need one list."


def find_stage_mismatch(calls: Mapping[int, Sequence[Call]]) -> Verdict | None:
    """Return the first message that a stage sends as another than the one that the receiver takes it for.

    Ranks of a pipeline match messages by their order alone.

    Args:
        calls: by rank, in any order.
    """
    found = []
    for rank, issued in calls.items():
        for recv in issued:
            send = _find_send(recv, rank, calls)
            if send is not None and send.purpose != recv.purpose:
                found.append((min(send.began_s, recv.began_s), rank, send, recv))
    if not found:
        return None
    _, rank, send, recv = min(found, key=lambda each: each[:2])
    sender = recv.peer
    assert sender is not None
    is_later = any(
        call.purpose == recv.purpose and call.number > send.number and call.peer == rank
        for call in calls[sender]
    )
    absence = "later" if is_later else "never"
    headline = (
        f"rank {sender} sent {recv.purpose} {absence}: what rank {rank} takes for it, number {send.number} "
        f"between them, is {send.purpose}"
    )
    places = [
        SharedPlace((rank,), f"takes message {recv.number} for {recv.purpose}", own_frames(recv.frames)),
        SharedPlace((sender,), f"sent {send.purpose} as message {send.number}", own_frames(send.frames)),
    ]
    return build_verdict("PL808", headline, places, rule=RULE, fix=FIX)


def _find_send(recv: Call, rank: int, calls: Mapping[int, Sequence[Call]]) -> Call | None:
    """Return the send that a receive of a pipeline is matched with, if it is known."""
    if not recv.purpose or recv.peer is None or not recv.operation.startswith("recv"):
        return None
    for send in calls.get(recv.peer, ()):
        is_same = (send.group, send.number, send.peer) == (recv.group, recv.number, rank)
        if is_same and send.purpose and send.operation.startswith("send"):
            return send
    return None
