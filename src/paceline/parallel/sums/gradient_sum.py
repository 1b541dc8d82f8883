"""Sums gradients over the microbatches of a global batch, then over the data ranks.

A `GradientSum` has the gradients of some parameters: a bucket of DDP, a unit of FSDP, a stage, the experts of
a rank. Its `RankSum` decides the order of the additions, and which part of the sum a rank gets:

- *tree*: microbatches and ranks are added in the order of `comm/tree.py`, so the bits do not depend on which
  rank computed what. Up to log2(microbatches of the rank) + 1 gradients are kept besides the current one.
- *slots*: so are the microbatches of a slot; the slots' sums are encoded and added by `comm/slots.py`.
- *arrival*: as backwards end, then by the library's collectives.

Gradients travel as vectors, which the owner of the parameters packs and unpacks. With shards, a vector is
`num_shards` equal rows, and a rank gets the row of its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.codec import CODECS
from paceline.comm.one_tensor import reduce_scatter
from paceline.comm.slots import SlotSum
from paceline.comm.tree import OwnBlocks, TreeSum, plan_reduction
from paceline.comm.tree_exchange import Exchange
from paceline.mesh import Axis
from paceline.parallel.compress import Compression
from paceline.parallel.sums.gradients import Gradients, add_gradients, keep_for_stream, list_present

Pack = Callable[[Gradients], list[Tensor]]


class RankSum:
    """Sums vectors over the data ranks; collective.

    Args:
        group: the data ranks of an exact sum, used for nothing else; `None` for one rank, or a fast sum.
        shards: the ranks that share each vector; `None` if none do.
        replicas: the ranks that have the same shard, for a fast sum.
        is_exact: whether the order of additions is that of the tree.
        compression: of the gradients, with an exact sum without shards.
        sends_rows: whether an exact sum sends each microbatch's rows at once to the ranks that keep them.

    Attributes:
        exchange: sums in the order of the tree; `None` in a fast sum and on one rank.
        slots: sums compressed gradients, if there is a compression.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        is_exact: bool,
        shards: Axis | None = None,
        replicas: Axis | None = None,
        compression: Compression | None = None,
        sends_rows: bool = False,
    ) -> None:
        self.group, self.is_exact, self.compression = group, is_exact, compression
        self.sends_rows = sends_rows
        self.rank = 0 if group is None else group.rank()
        self.num_shards, self.shard = (1, 0) if shards is None else (shards.size, shards.rank)
        # An exchange sends each rank its rows only, if the ranks of one copy are neighbours.
        self._num_cut = self.num_shards
        if group is not None and shards is not None:
            order = dist.get_process_group_ranks(group)
            places = [order.index(rank) for rank in dist.get_process_group_ranks(shards.group)]
            self._num_cut = self.num_shards if places[-1] - places[0] < self.num_shards else 1
        self._shards = shards
        self._replicas = replicas
        self.exchange = None if group is None or not is_exact else Exchange(group, device)
        self._replica_exchange = None
        if sends_rows and replicas is not None and replicas.size > 1:
            self._replica_exchange = Exchange(replicas.group, device)
        self.slots = None
        if compression is not None:
            codec, residuals = CODECS[compression.settings.kind], compression.residuals
            self.slots = SlotSum(codec, compression.settings.slots, residuals, group)

    @property
    def has_replicas(self) -> bool:
        """Whether a fast sum goes on over replicas."""
        return self._replicas is not None and self._replicas.size > 1

    def cut(self, num_owned: tuple[int, ...], turns: int = 1) -> OwnBlocks:
        """Return the blocks of microbatches that this rank adds; see `GradientSum.begin`."""
        if self.compression is None:
            return OwnBlocks.whole(num_owned, turns)
        return self.compression.cut(num_owned, self.rank)

    def add_up(self, vectors: list[Tensor], own: OwnBlocks, scratch: Tensor) -> Tensor:
        """Return this rank's row of the sum of subtrees; may overwrite them.

        Args:
            scratch: as long; overwritten. May be the last of them.
        """
        if self.exchange is not None:
            assert own.plan is not None
            self.exchange.sum_subtrees(vectors, own.plan, scratch, self._num_cut)
        row = scratch.view(self.num_shards, -1)[self.shard]
        return row if self.num_shards == 1 else row.clone()  # not all rows are kept

    def scatter(self, vector: Tensor, row: Tensor | None = None) -> Tensor:
        """Return this rank's row of the sum of vectors over the shards."""
        if self._shards is None:
            return vector
        row = vector.new_empty(len(vector) // self.num_shards) if row is None else row
        sum_rows(row, vector, self._shards.group)
        return row

    def send_rows(self, vector: Tensor) -> Tensor:
        """Return what the ranks of the shards have of this rank's row [num_shards, length], from their
        vectors."""
        assert self._shards is not None
        arrived = torch.empty_like(vector)
        dist.all_to_all_single(arrived, vector, group=self._shards.group)
        return arrived.view(self.num_shards, -1)

    def join_subtrees(self, rows: list[Tensor], num_owned: tuple[int, ...], total: Tensor) -> None:
        """Sum the subtrees of a row over the replicas into `total`; may overwrite them.

        Args:
            num_owned: per data rank, how many microbatches it computes.
            total: as long as a row.
        """
        if self._replica_exchange is None:
            [row] = rows
            total.copy_(row)
            return
        starts = range(0, len(num_owned), self.num_shards)
        plan = plan_reduction(tuple(sum(num_owned[n : n + self.num_shards]) for n in starts))
        self._replica_exchange.sum_subtrees(rows, plan, total)

    def join(self, row: Tensor, *, async_op: bool = False) -> dist.Work | None:
        """Sum a row over the replicas, in place."""
        if self._replicas is None or not self.has_replicas:
            return None
        work: dist.Work | None = dist.all_reduce(row, group=self._replicas.group, async_op=async_op)
        return work


class GradientSum:
    """The gradients of some parameters in one global batch after another.

    Usage per step: `begin`; `add` for each microbatch of this rank, in any order; `start` once all of them
    are there; `finish`.

    Args:
        ranks: the order of additions, and the ranks.
        pack: from gradients to the vectors that travel, of the same lengths on every rank.
        cuts_each: whether a fast sum keeps nothing but this rank's rows of each microbatch. Then all ranks of
            the shards add equally many.
    """

    def __init__(self, ranks: RankSum, pack: Pack, *, cuts_each: bool = False) -> None:
        self.ranks = ranks
        self._pack = pack
        self._cuts_each = cuts_each and not ranks.is_exact
        self.own = OwnBlocks()
        self._trees: list[TreeSum[Gradients]] = []
        self._arrived: Gradients | None = None
        self._rows: list[Tensor] = []
        self._works: list[dist.Work | None] | None = None

    def begin(self, num_owned: tuple[int, ...], turns: int = 1) -> None:
        """Start a global batch.

        Args:
            num_owned: per data rank, the number of microbatches that it computes.
            turns: how many data ranks take microbatches in turns, see `data.share.list_numbers`.
        """
        self.own = self.ranks.cut(num_owned, turns)
        self._trees = [TreeSum(len(leaves), add_gradients) for leaves in self.own.leaves]
        self._arrived, self._rows, self._works = None, [], None

    def add(self, index: int, gradients: Gradients) -> None:
        """Add the gradients of a microbatch, by its number in the global batch; may keep them."""
        if self.ranks.is_exact:
            for leaves, tree in zip(self.own.leaves, self._trees, strict=True):
                if index in leaves:
                    at = index - leaves.start
                    tree.push((at, at + 1), gradients)
        elif self._cuts_each:
            rows = [self.ranks.scatter(vector) for vector in self._pack(gradients)]
            if self._rows:
                rows = [before.add_(row) for before, row in zip(self._rows, rows, strict=True)]
            self._rows = rows
        else:
            self._arrived = gradients if self._arrived is None else add_gradients(gradients, self._arrived)

    def has(self, place: int) -> bool:
        """Return whether a microbatch of this rank has given a parameter a gradient in this step."""
        return any(gradients is not None and gradients[place] is not None for gradients in self.list_values())

    def pick(self, places: Sequence[int], pack: Pack) -> GradientSum:
        """Return the sum of some of the parameters, with what this one has so far."""
        part = GradientSum(self.ranks, pack)
        part.own = self.own
        part._trees = [tree.pick(lambda values: [values[n] for n in places]) for tree in self._trees]
        return part

    def take(self) -> list[Gradients | None]:
        """Return what this rank has added, and drop it: its subtrees; of whole slots one sum or `None` each.

        The sum alone, if gradients are added as they arrive. On CUDA the current stream may read them until
        it has caught up.
        """
        found = self.list_values()
        for gradients in found:
            for gradient in list_present(gradients or []):
                keep_for_stream(gradient)
        self._trees, self._arrived = [], None
        return found

    def start(self, empty: Gradients) -> None:
        """Start the sum over the ranks, if it can run beside computations; all of them must call it.

        Args:
            empty: in place of gradients of microbatches that this rank does not have.
        """
        if self.ranks.is_exact or self.ranks.num_shards > 1:
            return
        self._send(empty)

    def finish(self, empty: Gradients) -> list[Tensor]:
        """Return this rank's row of the sum of each vector; collective. See `start`."""
        if self.ranks.is_exact:
            packed = [self._pack(gradients) for gradients in self.take() if gradients is not None]
            scratch = packed[-1] if packed else self._pack(empty)
            return [
                self.ranks.add_up([vectors[number] for vectors in packed], self.own, each)
                for number, each in enumerate(scratch)
            ]
        if self._works is None:
            self._send(empty)
        for work in self._works or ():
            if work is not None:
                work.wait()
        return self._rows

    def _send(self, empty: Gradients) -> None:
        if not self._cuts_each:
            [arrived] = self.take()
            vectors = self._pack(empty if arrived is None else arrived)
            self._rows = [self.ranks.scatter(vector) for vector in vectors]
        self._works = [self.ranks.join(row, async_op=True) for row in self._rows]

    def list_values(self) -> list[Gradients | None]:
        if not self.ranks.is_exact:
            return [self._arrived]
        if self.own.plan is not None:
            return [gradients for tree in self._trees for _, gradients in tree.subtrees]
        return [tree.subtrees[0][1] if tree.subtrees else None for tree in self._trees]


def sum_rows(row: Tensor, rows: Tensor, group: dist.ProcessGroup) -> None:
    """Sum row r of all ranks' `rows` [num_ranks * length] into the `row` of rank r.

    gloo's own reduce-scatter takes 2 to 3 times as long for the same bytes (1 to 24 MiB on 2 and 4 ranks).
    """
    if rows.is_cuda:
        reduce_scatter(row, rows, group=group)
        return
    arrived = torch.empty_like(rows)
    dist.all_to_all_single(arrived, rows, group=group)
    torch.sum(arrived.view(group.size(), -1), dim=0, out=row)
