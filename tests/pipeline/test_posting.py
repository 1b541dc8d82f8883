"""Messages of pipelines under NCCL's rules for single sends and receives, on every schedule.

With a device bound to the group, all sends and receives of a rank run one after the other, in the order in
which they were posted. Without one, those of each pair of ranks do. A send ends when its receive runs
(rendezvous), or at once (buffered: small messages).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paceline.mesh import Axis
from paceline.parallel.stages.transfer import Form, StageTransfer
from paceline.pipeline.messages import list_needs, list_posted, list_results
from paceline.pipeline.orders import NAMES, make_schedule
from paceline.pipeline.schedule import Schedule
from paceline.recipe.layout import LOOPING
from paceline.train.runners.staged_forwards import _list_forwards

# A send or receive of a rank: which, with which other rank, and the message's tag.
Posted = tuple[str, int, int]
SHARED = {"none": {}, "first and last": (0, -1), "three": (0, 1, -1)}


@dataclass
class Work:
    """A message on its way; a mock in its place takes most of the time of all schedules."""

    wait: Callable[[], None]


class Post:
    """Records what a rank posts; its waits are waits for the messages."""

    def __init__(self) -> None:
        self.made: list[Posted] = []

    def send(self, tensor: Any, group: Any, group_dst: int, tag: int) -> Any:
        self.made.append(("send", group_dst, tag))
        return Work(lambda: None)

    def receive(self, tensor: Any, group: Any, group_src: int, tag: int) -> Any:
        self.made.append(("recv", group_src, tag))
        return Work(lambda: self.made.append(("wait", group_src, tag)))


def follow(schedule: Schedule, rank: int, shared: dict[str, tuple[int, ...]], kept: int) -> list[Posted]:
    """Return what a rank of a pipeline posts and waits for in a step, as the runner uses the transfer."""
    post, one = Post(), torch.zeros(1)
    axis = Axis("pp", schedule.num_ranks, rank, mock.Mock())
    form = [Form((1,), one.dtype, (1,))]
    with mock.patch.multiple(dist, isend=post.send, irecv=post.receive):
        transfer = StageTransfer(axis, schedule, kept, shared, lambda _: form, one.device, {})
        own = [action for action in schedule.actions[rank] if action.microbatch < kept]
        for action, following in pairwise([*own, None]):
            for ahead in (action, following):
                for message in [] if ahead is None else list_needs(ahead, schedule.num_stages, shared):
                    transfer.expect(message)
            for message in list_needs(action, schedule.num_stages, shared):
                transfer.take(message)
            for message in list_results(action, schedule.num_stages, shared):
                transfer.give(message, [one])
        transfer.finish()
    return post.made


def find_stuck(ranks: list[list[Posted]], *, is_bound: bool, is_buffered: bool, waits: bool) -> list[Posted]:
    """Run what all ranks post, and return the messages that wait for ever.

    Args:
        ranks: what each posts, in order.
        is_bound: whether all messages of a rank share a queue; else those with each other rank do.
        is_buffered: whether a send ends before its receive.
        waits: whether a rank posts nothing while it waits for a message; else only its device waits.
    """
    todo = [deque(own) for own in ranks]
    queues: dict[tuple[int, int | None], deque[Posted]] = {}
    left: set[tuple[int, int, int]] = set()  # buffered: sender, receiver, tag
    arrived: set[tuple[int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(todo):
            while own and (own[0][0] != "wait" or not waits or (rank, own[0][2]) in arrived):
                kind, peer, tag = own.popleft()
                moved = True
                if kind != "wait":
                    queues.setdefault((rank, None if is_bound else peer), deque()).append((kind, peer, tag))
        for (rank, _), queue in queues.items():
            while queue:
                kind, peer, tag = queue[0]
                if is_buffered:
                    if kind == "send":
                        left.add((rank, peer, tag))
                    elif (peer, rank, tag) not in left:
                        break
                else:
                    other = queues.get((peer, None if is_bound else rank))
                    if not other or other[0] != ("recv" if kind == "send" else "send", rank, tag):
                        break
                    other.popleft()
                    arrived.add((peer, tag))
                arrived.add((rank, tag))
                queue.popleft()
                moved = True
    return [each for own in todo for each in own] + [each for queue in queues.values() for each in queue]


def list_schedules() -> Iterator[Schedule]:
    for num_ranks in (2, 3, 4, 8):
        for count in (1, 3, 8, 32):
            yield _list_forwards(tuple(range(num_ranks)) * 2, num_ranks, count)
            for name in NAMES:
                for chunks in (2, 3) if name in LOOPING else (None,):
                    yield make_schedule(name, num_ranks, count, chunks)


@pytest.mark.parametrize("sharing", SHARED)
def test_no_schedule_deadlocks_under_the_rules_of_nccl(sharing: str) -> None:
    for schedule in list_schedules():
        if schedule.num_ranks == 8 and sharing != "first and last":
            continue  # they take as long as all others
        shared = {}
        if SHARED[sharing]:
            shared = {"weight": tuple(sorted({stage % schedule.num_stages for stage in SHARED[sharing]}))}
        whole = schedule.num_microbatches
        for kept in {whole, max(1, whole - 2)} if whole == 8 else {whole}:
            ranks = [follow(schedule, rank, shared, kept) for rank in range(schedule.num_ranks)]
            for is_bound in (True, False):
                for is_buffered in (True, False):
                    for waits in (True, False):
                        stuck = find_stuck(ranks, is_bound=is_bound, is_buffered=is_buffered, waits=waits)
                        assert not stuck, (schedule.name, schedule.num_ranks, kept, is_bound, is_buffered)


def test_receives_in_front_of_sends_do_deadlock_under_these_rules() -> None:
    """Rank 0 posts the receive of a gradient before it sends the output that the gradient needs."""
    first = [("recv", 1, 2), ("send", 1, 1), ("wait", 1, 2)]
    last = [("recv", 0, 1), ("wait", 0, 1), ("send", 0, 2)]
    for is_buffered in (True, False):
        assert find_stuck([first, last], is_bound=True, is_buffered=is_buffered, waits=False)


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_post_in_one_order(name: str) -> None:
    """There is one order of all messages of which every rank's own is a part."""
    schedule = make_schedule(name, 4, 8, 2 if name in LOOPING else None)
    own = [deque(list_posted(schedule, rank, ())) for rank in range(4)]
    assert all(own)
    while any(own):
        heads = [queue[0] for queue in own if queue]
        message = next(each for each in heads if heads.count(each) == 2)
        for queue in own:
            if queue and queue[0] == message:
                queue.popleft()
