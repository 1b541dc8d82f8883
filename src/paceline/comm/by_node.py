"""Sums over nodes with several ranks each in the order of a tree; a vector leaves each node about once.

The ranks of a node share memory. It consists of `_NUM_SLOTS` slots:

    slot: [ a place for the sum | a place for each subtree of the node's ranks ]

Protocol for a vector, which is cut into blocks. A block uses one slot:

1. Every rank copies its subtrees into their places. The ranks of the node meet.
2. The block is cut into slices, which are divided among the ranks of the node; in all nodes a slice has one
   such rank, and these are twins. Each adds its slices of the node's subtrees, as far as the tree allows.
3. Twins exchange their sums. A slice is cut into pieces, one per node; each twin receives its piece from all
   others, adds it up in the order of the tree and sends the result to all others. If this sends no more, or
   the vector is small, each twin sends its whole slice to all others instead and adds all of it, which takes
   one message instead of two.
4. The ranks of the node meet. Every rank copies the sum out.

Blocks overlap: while twins exchange one block, the ranks copy in and add the next and copy out an earlier
one. A slot is reused for the fourth block after, when every rank has passed a meeting that follows the last
use of the slot (see `_sum_blocks`). The meetings are messages between the ranks of the node.

Bytes that leave a node with k sums of its own, for S bytes and M nodes: (k + 1) (M - 1)/M S. k is 1 if the
ranks of a node own a power of two of consecutive microbatches, and the number of its ranks if ranks are
placed round-robin. Sent by ranks one by one, it would be the number of ranks of a node times as much.

All ranks of the group must make the same calls. Every message is sent and received in an order that follows
from the plan alone, so messages between two ranks cannot be mistaken for each other.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.exchange import (
    Exchange,
    MessageExchange,
    add_keeping,
    add_overwriting,
    as_real,
    cut_evenly,
)
from paceline.comm.node_plan import NodePlan, split_by_node
from paceline.comm.segment import find_machines, share_memory
from paceline.comm.tree import ReductionPlan

log = logging.getLogger(__name__)

# Places start at a multiple of this, so that no two ranks write to one cache line.
_ALIGN_BYTES = 64
_NUM_SLOTS = 4
# A vector up to this size takes one message between nodes instead of two, although it sends more bytes.
_SMALL_BYTES = 32 << 10
# Smaller blocks cost more meetings; larger ones leave the link idle at the first and the last block.
_LEAST_BLOCK_BYTES = 512 << 10
_MOST_BLOCK_BYTES = 4 << 20
_USUAL_BLOCKS = 8


@dataclass
class _Block:
    """A block under way on this rank.

    Attributes:
        part: of the vector.
        slot: the slot's places: that of the sum, then those of the node's subtrees.
        slices: of the block, all of them.
        rows: by this rank's slices, the places of the plan that are added between the nodes.
        arrivals: sums of other nodes that are being received.
        results: pieces of the whole sum that are being received.
        departures: messages that are being sent.
    """

    part: slice
    slot: list[Tensor]
    slices: list[slice]
    rows: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    arrivals: list[dist.Work] = field(default_factory=list)
    results: list[dist.Work] = field(default_factory=list)
    departures: list[dist.Work] = field(default_factory=list)


class NodeExchange:
    """An exchange for CPU ranks on several nodes, at least one of them with several ranks.

    Args:
        group: the ranks, with a backend for the CPU; no other code may use it.
        nodes: each rank's node, numbered in the order of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, nodes: Sequence[int]) -> None:
        self.sent_bytes = 0
        self._group = group
        self._rank = group.rank()
        self._nodes = tuple(nodes)
        self._node = nodes[self._rank]
        self._num_nodes = max(nodes) + 1
        self._members = [[r for r, at in enumerate(nodes) if at == node] for node in range(self._num_nodes)]
        own = self._members[self._node]
        self._local = own.index(self._rank)
        self._num_slices = max(map(len, self._members))
        self._slices = range(self._local, self._num_slices, len(own))
        self._others = [node for node in range(self._num_nodes) if node != self._node]
        self._byte = torch.zeros(1, dtype=torch.uint8)
        self._memory: Tensor | None = None
        self._place_bytes, self._num_places = _ALIGN_BYTES, 0
        self._next_slot = 0
        # What arrives from other nodes, for two blocks in turn.
        self._scratch = [torch.empty(0, dtype=torch.uint8)] * 2
        self._split: tuple[ReductionPlan, NodePlan] | None = None
        self._otherwise: Exchange | None = None

    def sum_subtrees(self, subtrees: list[list[Tensor]], plan: ReductionPlan, total: Tensor) -> None:
        subtrees, total = as_real(subtrees, total)
        blocks = _cut_into_blocks(total)
        self._reserve(max(_num_bytes(total[block]) for block in blocks), plan)
        if self._otherwise is not None:
            before = self._otherwise.sent_bytes
            self._otherwise.sum_subtrees(subtrees, plan, total)
            self.sent_bytes += self._otherwise.sent_bytes - before
            return
        if self._split is None or self._split[0] is not plan:
            self._split = (plan, split_by_node(plan, self._nodes))
        self._sum_blocks(blocks, [_Parts(subtree) for subtree in subtrees], plan, self._split[1], total)

    def _sum_blocks(
        self,
        blocks: list[slice],
        subtrees: list[_Parts],
        plan: ReductionPlan,
        split: NodePlan,
        total: Tensor,
    ) -> None:
        """Run the blocks through the steps, each block one turn behind the block before.

        Turn t: copy in block t; meet; add and send t; add what arrived of t - 1; wait for the rest of t - 2;
        copy out t - 3. So when t + 1 is copied in, every rank has passed the meeting of turn t, and had
        finished t - 3, whose slot it takes, before. The place of the sum in it may still be read then; it is
        written only after the next meeting.
        """
        is_direct = self._is_direct(split, total)
        # The place of this rank's first subtree among those of its node.
        members = self._members[self._node]
        first = 1 + sum(len(plan.subtrees[rank]) for rank in members[: self._local])
        places = self._list_places(plan)
        running: list[_Block] = []
        for turn in range(len(blocks) + 3):
            is_new, is_old = turn < len(blocks), turn >= 3
            if is_new:
                running.append(self._begin(blocks[turn], total.dtype))
                self._receive_sums(running[turn], split, turn, is_direct=is_direct)
                for number, subtree in enumerate(subtrees, start=first):
                    subtree.copy_range(blocks[turn], running[turn].slot[number])
            if is_new or is_old:
                self._meet()
            if is_new:
                self._add_own(running[turn], places, split, is_direct=is_direct)
            if 1 <= turn <= len(blocks):
                self._add_arrived(running[turn - 1], split, is_direct=is_direct)
            if 2 <= turn <= len(blocks) + 1:
                _wait_for([*running[turn - 2].results, *running[turn - 2].departures])
            if is_old:
                total[running[turn - 3].part].copy_(running[turn - 3].slot[0])

    # ---- steps of a block

    def _begin(self, part: slice, dtype: torch.dtype) -> _Block:
        """Return a block with the next slot."""
        assert self._memory is not None
        num_bytes = (part.stop - part.start) * dtype.itemsize
        slot_bytes = (1 + self._num_places) * self._place_bytes
        start = self._next_slot * slot_bytes
        self._next_slot = (self._next_slot + 1) % _NUM_SLOTS
        slot = [
            self._memory[at : at + num_bytes].view(dtype)
            for at in range(start, start + slot_bytes, self._place_bytes)
        ]
        return _Block(part, slot, cut_evenly(part.stop - part.start, self._num_slices))

    def _receive_sums(self, block: _Block, split: NodePlan, turn: int, *, is_direct: bool) -> None:
        """Begin to receive the sums of the other nodes: of this rank's pieces, or of its whole slices."""
        dtype = block.slot[0].dtype
        lengths = {}
        for number in self._slices:
            length = block.slices[number].stop - block.slices[number].start
            own = cut_evenly(length, self._num_nodes)[self._node]
            lengths[number] = length if is_direct else own.stop - own.start
        num_others = sum(len(kept) for node, kept in enumerate(split.kept) if node != self._node)
        num_bytes = num_others * sum(lengths.values()) * dtype.itemsize
        # The block before the last used the same memory, and has been added.
        if len(self._scratch[turn % 2]) < num_bytes:
            self._scratch[turn % 2] = torch.empty(num_bytes, dtype=torch.uint8)
        room = self._scratch[turn % 2][:num_bytes].view(dtype)
        for number in self._slices:
            rows = block.rows[number] = {}
            for node in self._others:
                for place in split.kept[node]:
                    rows[place], room = room[: lengths[number]], room[lengths[number] :]
                    self._receive(block.arrivals, self._find_twin(node, number), rows[place])

    def _add_own(self, block: _Block, places: list[int], split: NodePlan, *, is_direct: bool) -> None:
        """Add this rank's slices of the node's subtrees, and begin to send them to the twins."""
        for number in self._slices:
            part = block.slices[number]
            own = {place: memory[part] for place, memory in zip(places, block.slot[1:], strict=False)}
            for left, right in split.within[self._node]:
                own[left].add_(own[right])
            pieces = cut_evenly(part.stop - part.start, self._num_nodes)
            if is_direct:
                pieces = [slice(0, part.stop - part.start)] * self._num_nodes
            for place in split.kept[self._node]:
                block.rows[number][place] = own[place][pieces[self._node]]
            for node in self._others:
                for place in split.kept[self._node]:
                    self._send(block.departures, self._find_twin(node, number), own[place][pieces[node]])

    def _add_arrived(self, block: _Block, split: NodePlan, *, is_direct: bool) -> None:
        """Add the sums of all nodes. Without `is_direct`, begin to exchange the pieces of the result."""
        totals = {number: block.slot[0][block.slices[number]] for number in self._slices}
        if is_direct:
            _wait_for(block.arrivals)
            for number, total in totals.items():
                add_keeping(block.rows[number], split.between, total)
            return
        pieces = {number: cut_evenly(len(total), self._num_nodes) for number, total in totals.items()}
        for number, total in totals.items():
            for node in self._others:
                self._receive(block.results, self._find_twin(node, number), total[pieces[number][node]])
        _wait_for(block.arrivals)
        for number, total in totals.items():
            piece = total[pieces[number][self._node]]
            add_overwriting(block.rows[number], split.between, piece)
            for node in self._others:
                self._send(block.departures, self._find_twin(node, number), piece)

    def _is_direct(self, split: NodePlan, total: Tensor) -> bool:
        """Return whether twins send each other whole slices."""
        most = max(map(len, split.kept))
        return _num_bytes(total) <= _SMALL_BYTES or (self._num_nodes == 2 and most == 1)

    # ---- messages

    def _find_twin(self, node: int, number: int) -> int:
        """Return the rank of a node that has a slice."""
        return self._members[node][number % len(self._members[node])]

    def _send(self, works: list[dist.Work], rank: int, tensor: Tensor) -> None:
        if tensor.numel():
            work = dist.isend(tensor, group=self._group, group_dst=rank)
            assert work is not None
            works.append(work)
            self.sent_bytes += _num_bytes(tensor)

    def _receive(self, works: list[dist.Work], rank: int, tensor: Tensor) -> None:
        if tensor.numel():
            work = dist.irecv(tensor, group=self._group, group_src=rank)
            assert work is not None
            works.append(work)

    def _meet(self) -> None:
        """Wait until every rank of the node is here; what they wrote before can be read then.

        In round i each rank hears from the one 2**i before it, and so of 2**(i + 1) ranks.
        """
        members, distance = self._members[self._node], 1
        while distance < len(members):
            after = members[(self._local + distance) % len(members)]
            before = members[self._local - distance]
            works: list[dist.Work] = []
            self._receive(works, before, torch.empty_like(self._byte))
            self._send(works, after, self._byte)
            _wait_for(works)
            distance *= 2

    # ---- memory

    def _list_places(self, plan: ReductionPlan) -> list[int]:
        """Return the places of the plan that this node's ranks contribute, in the order of its memory."""
        starts = list(accumulate(map(len, plan.subtrees), initial=0))
        return [
            place for rank in self._members[self._node] for place in range(starts[rank], starts[rank + 1])
        ]

    def _reserve(self, block_bytes: int, plan: ReductionPlan) -> None:
        """Make the slots at least this large; the same call on all ranks decides the same."""
        num_places = max(sum(len(plan.subtrees[rank]) for rank in ranks) for ranks in self._members)
        place_bytes = max(self._place_bytes, -(-block_bytes // _ALIGN_BYTES) * _ALIGN_BYTES)
        is_enough = place_bytes == self._place_bytes and num_places <= self._num_places
        if self._otherwise is not None or (is_enough and self._memory is not None):
            return
        self._place_bytes, self._num_places = place_bytes, max(num_places, self._num_places)
        self._memory = None
        owners = [self._members[node][0] for node in self._nodes]
        num_bytes = _NUM_SLOTS * (1 + self._num_places) * self._place_bytes
        self._memory = share_memory(self._group, num_bytes, owners)
        if self._memory is None:
            log.info("exact reduction: shared memory is not available on every node, so ranks send messages")
            self._otherwise = MessageExchange(self._group)


def choose_between_nodes(group: dist.ProcessGroup) -> Exchange | None:
    """Return an exchange for a group on several nodes, or `None` if it is on one; collective.

    Args:
        group: the ranks, with a backend for the CPU; no other code may use it.
    """
    nodes = find_machines(group)
    num_ranks = [nodes.count(node) for node in range(max(nodes) + 1)]
    if len(num_ranks) == 1:
        return None
    if max(num_ranks) == 1:
        log.info("exact reduction: %d nodes with one rank each, which send messages", len(nodes))
        return MessageExchange(group)
    if group.rank() == 0:
        counts = " and ".join(map(str, num_ranks))
        log.info(
            "exact reduction: %d nodes with %s ranks, which add in shared memory", len(num_ranks), counts
        )
        if list(nodes) != sorted(nodes):
            log.warning(
                "the ranks of a node are not consecutive (their nodes are %s), so up to %d vectors "
                "leave a node instead of one. Start consecutive ranks on each node. [PL957]",
                ", ".join(map(str, nodes[:16])),
                max(num_ranks),
            )
    return NodeExchange(group, nodes)


class _Parts:
    """Vectors that are one when they are laid end to end."""

    def __init__(self, parts: list[Tensor]) -> None:
        self._parts = parts
        self._starts = list(accumulate(map(len, parts), initial=0))

    def copy_range(self, wanted: slice, target: Tensor) -> None:
        """Copy a range of the elements into `target`."""
        number = bisect_right(self._starts, wanted.start) - 1
        while number < len(self._parts) and self._starts[number] < wanted.stop:
            low, high = (
                max(wanted.start, self._starts[number]),
                min(wanted.stop, self._starts[number + 1]),
            )
            part = self._parts[number][low - self._starts[number] : high - self._starts[number]]
            target[low - wanted.start : high - wanted.start].copy_(part)
            number += 1


def _cut_into_blocks(total: Tensor) -> list[slice]:
    """Return the blocks of a vector; one, which may be empty, at least."""
    size = min(max(_num_bytes(total) // _USUAL_BLOCKS, _LEAST_BLOCK_BYTES), _MOST_BLOCK_BYTES)
    num_blocks = max(1, -(-_num_bytes(total) // size))
    return cut_evenly(total.numel(), num_blocks)


def _wait_for(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
