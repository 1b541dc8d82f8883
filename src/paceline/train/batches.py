"""Cuts batches that do not come from a Paceline loader into microbatches, and reads the weight of a loss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.one_tensor import gather_objects
from paceline.data.share import Share, split_microbatches
from paceline.errors import PacelineError
from paceline.mesh import Axis
from paceline.torch_seams.trees import (
    keystr,
    learn_mapping,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
)
from paceline.train.same_settings import different_data_error, is_comparing

# This many equal batches in a row are not a coincidence; and the number of batches that are compared.
_NUM_EQUAL, _NUM_COMPARED = 3, 16
# A batch with fewer different 8-byte numbers is not compared: a few flags can be equal on two ranks.
_NUM_DIFFERENT = 16
_TOO_PLAIN = 0


def count_samples(batch: Any) -> int:
    """Return the length of the first dimension of the first tensor in a nest of tensors."""
    learn_mapping(batch)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise PacelineError(
        "PL409",
        saw=f"a batch of type {type(batch).__name__} without a tensor that has a first dimension.",
        rule="Samples are counted along the first dimension of the first tensor.",
        fix="Make the batch a tensor, or a dict or tuple of tensors, with samples along dimension 0. For two "
        "data sets in one step, make one loader of a data set of pairs.",
    )


def weigh(loss: Any, batch: Any, *, by: str = "the loss function") -> tuple[Tensor, Tensor]:
    """Convert the result of a loss function to (sum of losses, weight).

    A pair is returned as it is. A scalar is taken as the mean over the microbatch's samples.

    Args:
        batch: the microbatch that it was computed on.
        by: the function that returned it, for the message.
    """
    if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], (Tensor, int, float)):
        total, weight = loss
        if not isinstance(weight, Tensor):
            weight = torch.tensor(float(weight))
    else:
        total = loss
        num_samples = float(count_samples(batch))
        weight = torch.tensor(num_samples)
        total = total * num_samples if isinstance(total, Tensor) else total
    if not isinstance(total, Tensor) or total.dim() != 0 or weight.dim() != 0:
        shape = f" of shape {tuple(total.shape)}" if isinstance(total, Tensor) else ""
        raise PacelineError(
            "PL410",
            saw=f"{by} returned a {type(total).__name__}{shape}.",
            rule="A loss or metric is a pair of scalars (sum, weight), or one scalar: the mean over samples.",
            fix="Return for example (losses.sum(), losses.numel()).",
        )
    return total, weight


class RankRows:
    """Gathers numbers of the batches that ranks bring themselves, and compares these batches.

    Ranks that share a model (by tp, cp or pp) must bring the same samples, and data ranks different ones.
    Data ranks that bring the same samples in several batches in a row read the same part of the data, and
    each sample would count several times.

    Args:
        dp: the ranks that have different samples; `None` in a world of one.
        device: where the collective runs.
    """

    def __init__(self, dp: Axis | None, device: torch.device) -> None:
        self._dp = dp
        self._device = device
        self._earlier: set[int] = set()
        self._num_equal: dict[int, int] = {}

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """Return the row of every data rank; collective over all ranks, with 8 bytes per number and rank.

        Args:
            row: numbers; the last ones are whether the samples are alike, and their digest.
        """
        if self._dp is None:
            return [list(row)]
        numbers = torch.zeros(dist.get_world_size(), 1 + len(row), dtype=torch.int64)
        numbers[dist.get_rank()] = torch.tensor([self._dp.rank, *row])
        numbers = numbers.to(self._device)
        dist.all_reduce(numbers)
        first: dict[int, tuple[int, list[int]]] = {}
        for rank, (place, *values) in enumerate(numbers.tolist()):
            peer, expected = first.setdefault(place, (rank, values))
            if values != expected and is_comparing():
                raise different_data_error(
                    f"ranks {peer} and {rank} brought different samples and share one copy of the model",
                    "Ranks of tp, cp and pp compute the same samples together.",
                )
        rows = [first[place][1] for place in range(self._dp.size)]
        self._compare([_TOO_PLAIN if alike else digest for *_, alike, digest in rows])
        return rows

    def _compare(self, digests: list[int]) -> None:
        """Count, per rank, how many new batches in a row were equal to another rank's.

        A batch that repeats an earlier one is ignored: benchmarks pass the same batch in every step.
        """
        for rank, digest in enumerate(digests):
            is_equal = digest != _TOO_PLAIN and digests.count(digest) > 1 and digest not in self._earlier
            self._num_equal[rank] = self._num_equal.get(rank, 0) + 1 if is_equal else 0
        self._earlier.update(digests)
        ranks = [rank for rank, number in self._num_equal.items() if number >= _NUM_EQUAL]
        if ranks and is_comparing():
            raise _same_samples_error(ranks)


class RawBatches:
    """Batches that the user's loop supplies: each rank's samples become its share of a global batch.

    The first batches are compared over the ranks.

    Args:
        dp: the ranks that have different samples; `None` in a world of one.
        device: where the collective runs.
    """

    def __init__(self, dp: Axis | None, device: torch.device) -> None:
        self._dp, self._rows = dp, RankRows(dp, device)
        self._num_seen = 0

    def share(self, batch: Any, microbatch_size: int | None) -> Share:
        """Cut this rank's samples into its share of a global batch; collective.

        Microbatches and samples are numbered consecutively in the order of ranks. Costs one all-reduce of
        32 bytes per rank.

        Args:
            batch: this rank's samples; ranks of tp pass the same ones.
            microbatch_size: samples per forward; `None` for all samples of a rank at once.

        Raises:
            PacelineError: as `RankRows.exchange`, on every rank.
        """
        num_samples, rank = count_samples(batch), 0 if self._dp is None else self._dp.rank
        self._num_seen += 1
        is_compared = self._num_seen <= _NUM_COMPARED
        if self._dp is None or (self._dp.size == 1 and not is_compared):
            return _cut_into_share(batch, [num_samples], 0, microbatch_size)
        rows = self._rows.exchange([num_samples, *(_digest_batch(batch) if is_compared else (1, 0))])
        return _cut_into_share(batch, [row[0] for row in rows], rank, microbatch_size)

    @contextmanager
    def drawn(self, models: Sequence[nn.Module], counts: Callable[[], bool]) -> Iterator[None]:
        """Compare the first inputs of models in a step whose samples the loop draws; collective at first.

        A `DataLoader` gives the same samples on every rank, and so would count each of them several times.

        Args:
            models: that the loop calls inside.
            counts: returns whether the microbatch that runs belongs to this rank's share.

        Raises:
            PacelineError: as `RankRows.exchange`, on every rank.
        """
        self._num_seen += 1
        if self._dp is None or self._num_seen > _NUM_COMPARED:
            yield
            return
        row: list[int] = []

        def see(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if not row and counts():
                row.extend(_digest_batch((args, kwargs)))

        with ExitStack() as stack:
            for each in models:
                hook = each.register_forward_pre_hook(see, prepend=True, with_kwargs=True)
                stack.callback(hook.remove)
            yield
        self._rows.exchange(row or (1, 0))


def check_same_batch(batch: Any, number: int) -> None:
    """Compare a batch that every rank has whole; raise PL668 if they differ. Collective.

    Args:
        number: how many such batches there were, with this one; only the first ones are compared.
    """
    _check_lengths(batch, count_samples(batch))
    if number > _NUM_COMPARED or not dist.is_initialized() or not is_comparing():
        return
    found = gather_objects(_digest_batch(batch)[1])
    others = [rank for rank, digest in enumerate(found) if digest != found[0]]
    if others:
        raise different_data_error(
            f"loop.split(batch): rank {others[0]} brought other samples than rank 0",
            "Every rank brings the same whole batch, of which each computes a part. Gather it on all ranks "
            "first, and draw orders from random numbers that are the same on every rank.",
        )


def _cut_into_share(batch: Any, counts: list[int], rank: int, microbatch_size: int | None) -> Share:
    num_samples = counts[rank]
    cuts = [split_microbatches(count, microbatch_size or max(1, count)) for count in counts]
    if len(cuts[rank]) > 1:
        _check_lengths(batch, num_samples)
    first = sum(len(cut) for cut in cuts[:rank])
    first_sample = sum(counts[:rank])
    return Share(
        epoch=0,
        number=0,
        num_samples=sum(counts),
        num_owned=tuple(map(len, cuts)),
        microbatches=[
            (first + number, cut_samples(batch, start, stop))
            for number, (start, stop) in enumerate(cuts[rank])
        ],
        samples=[range(first_sample + start, first_sample + stop) for start, stop in cuts[rank]],
    )


def _digest_batch(batch: Any) -> tuple[bool, int]:
    """Return whether all tensors hold few different numbers, and a 63-bit digest of their contents."""
    digest, words = hashlib.blake2b(digest_size=8), b""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.numel():
            content = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
            words += content.reshape(-1).view(torch.uint8).numpy().tobytes()
            digest.update(str(leaf.shape).encode())
    digest.update(words)
    is_plain = len(np.unique(np.frombuffer(words[: len(words) // 8 * 8], np.int64))) < _NUM_DIFFERENT
    return is_plain, int.from_bytes(digest.digest(), "little") >> 1


def _same_samples_error(ranks: list[int]) -> PacelineError:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return PacelineError(
        "PL419",
        saw=f"the last {_NUM_EQUAL} batches were the same on several ranks (places {shown} among the ranks "
        "that share the data).",
        rule="Ranks that bring batches of their own must bring different samples. Otherwise a step counts "
        "some samples several times.",
        fix='Use the loader of the trainer or loop, without shard="mine"; it divides the data. '
        "Or divide them by rank, as a DistributedSampler in a DataLoader does.",
        on_every_rank=True,
    )


def _check_lengths(batch: Any, num_samples: int) -> None:
    """Raise PL211 if a tensor cannot be cut into the same microbatches as the others."""
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) != num_samples:
            raise PacelineError(
                "PL211",
                saw=f"batch{keystr(path)} has {len(leaf)} rows, and the first tensor of the batch has "
                f"{num_samples}.",
                rule="Samples are along the first dimension of every tensor, and all tensors are divided "
                "into microbatches in the same way.",
                fix="Give every field one row per sample, or set microbatch_size to the size of the whole "
                "batch.",
            )


def cut_samples(batch: Any, start: int, stop: int) -> Any:
    """Return some samples of a batch."""
    return tree_map_only(Tensor, lambda tensor: tensor[start:stop] if tensor.dim() else tensor, batch)


def lend_batch(share: Share, dp: Axis) -> Any:
    """Return a microbatch for a rank to run idle when it has none left of this global batch.

    Collective over dp if some rank owns no microbatch: such a rank borrows one from another rank.
    """
    if share.microbatches and all(share.num_owned):
        return share.microbatches[0][1]
    lender = next(rank for rank, owned in enumerate(share.num_owned) if owned)
    lent = [share.microbatches[0][1] if dp.rank == lender else None]
    dist.broadcast_object_list(lent, group=dp.group, group_src=lender)
    return share.microbatches[0][1] if share.microbatches else lent[0]
