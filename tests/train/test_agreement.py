"""The agreement of ranks per step: exact, and in the same order whichever rank computed it."""

from __future__ import annotations

import math
import signal
from typing import Any

import pytest
import torch

from paceline.train.agreement import Agreed, Agreement, RankMessage
from tests.dist.pool import Pool, RankError


def agree(world: Any, num_microbatches: int, num_statistics: int, signums: list[int]) -> tuple[Agreed, float]:
    """Microbatches go round the ranks; each has sums that would not add up the same in another order."""
    group = torch.distributed.group.WORLD if world.world_size > 1 else None
    agreement = Agreement(num_microbatches, num_statistics, 3, torch.device("cpu"), group)
    for index in range(world.rank, num_microbatches, world.world_size):
        statistics = torch.arange(num_statistics, dtype=torch.float64) * 0.1 + index
        loss = torch.tensor(math.nan if index == 2 else 0.1 * 3**index, dtype=torch.float64)
        agreement.put_microbatch(index, loss, torch.tensor(float(index)))
        agreement.add_statistics(index, statistics)
    agreement.put_used([True, world.rank == 1, False])
    agreement.launch(RankMessage(signums[world.rank], 7, settings=2**63 + world.rank, copies=[5, 0, 6, 0]))
    return agreement.wait(torch.tensor(0.5 + world.rank))


# Small vectors are exchanged in another way than large ones.
@pytest.mark.parametrize(("num_microbatches", "num_statistics"), [(5, 0), (5, 4), (5, 2000)])
def test_all_ranks_read_the_same_bits(ranks: Pool, num_microbatches: int, num_statistics: int) -> None:
    expected = None
    for nproc in (1, 2, 4):
        results = ranks.run(agree, nproc=nproc, args=(num_microbatches, num_statistics, [0] * nproc))
        for rank, (agreed, extra) in enumerate(results):
            assert extra == 0.5 + rank, "its own"
            losses = [0.1 * 3**index for index in range(num_microbatches)]
            assert [a for a in agreed.losses if not math.isnan(a)] == [*losses[:2], *losses[3:]]
            assert math.isnan(agreed.losses[2]), "one that is not finite spoils no other"
            assert agreed.weights == [float(index) for index in range(num_microbatches)]
            assert agreed.statistics.shape == (num_microbatches, num_statistics)
            expected = agreed.statistics if expected is None else expected
            assert torch.equal(agreed.statistics, expected)
            assert agreed.used == [True, nproc > 1, False]
            assert agreed.stop_signum == 0
            assert agreed.settings.tolist() == [[other, 2**31] for other in range(nproc)], "low half first"
            assert agreed.copies.tolist() == [[5, 0, 0, 0, 6, 0, 0, 0]] * nproc


@pytest.mark.parametrize(
    ("signums", "told"),
    [
        ([0, signal.SIGINT], signal.SIGINT),
        ([signal.SIGTERM, 0], signal.SIGTERM),
        ([signal.SIGTERM, signal.SIGINT], signal.SIGTERM),
        ([0, signal.SIGUSR1], signal.SIGUSR1),
        ([signal.SIGUSR2, signal.SIGINT], signal.SIGUSR2),
    ],
)
def test_a_signal_at_one_rank_is_known_to_all(ranks: Pool, signums: list[int], told: int) -> None:
    for agreed, _ in ranks.run(agree, args=(2, 0, signums)):
        assert agreed.stop_signum == told


def agree_at(world: Any, positions: list[int]) -> None:
    agreement = Agreement(1, 0, 0, torch.device("cpu"), torch.distributed.group.WORLD)
    agreement.launch(RankMessage(0, positions[world.rank]))
    agreement.wait()


@pytest.mark.parametrize("positions", [[5, 6], [1, 3, 2], [4, 4, 5]])
def test_another_position_of_any_rank_is_reported_on_all(ranks: Pool, positions: list[int]) -> None:
    """Also where the mean is right."""
    with pytest.raises(RankError) as caught:
        ranks.run(agree_at, nproc=len(positions), args=(positions,))
    assert {error.code for error in caught.value.causes.values()} == {"PL430"}
    assert sorted(caught.value.causes) == list(range(len(positions)))


def agree_on(world: Any, num_microbatches: list[int]) -> None:
    group = torch.distributed.group.WORLD
    agreement = Agreement(num_microbatches[world.rank], 0, 0, torch.device("cpu"), group)
    agreement.launch(RankMessage(0, 1))
    agreement.wait()


@pytest.mark.parametrize("num_microbatches", [[8, 4], [1, 16, 1]])
def test_another_batch_of_any_rank_is_reported_on_all(ranks: Pool, num_microbatches: list[int]) -> None:
    """The library would add vectors of two lengths without a word, at wrong places."""
    with pytest.raises(RankError) as caught:
        ranks.run(agree_on, nproc=len(num_microbatches), args=(num_microbatches,))
    assert {error.code for error in caught.value.causes.values()} == {"PL430"}
    assert sorted(caught.value.causes) == list(range(len(num_microbatches)))
