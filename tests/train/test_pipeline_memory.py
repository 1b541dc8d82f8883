"""Activations that ranks of a pipeline keep, counted from storages, against the simulated schedule."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from paceline.parallel.stages.transfer import StageTransfer
from paceline.pipeline.orders import make_schedule
from paceline.pipeline.simulate import Costs, simulate
from paceline.train.runners.staged import StagedRunner
from tests.dist.pool import Pool
from tests.train.test_pipeline_layouts import build


class SavedBytes:
    """Counts the storages that autograd keeps for backward, without those of parameters.

    Attributes:
        now, most: bytes.
    """

    def __init__(self, parameters: Any) -> None:
        self.now = self.most = 0
        self._excluded = {p.untyped_storage().data_ptr() for p in parameters if not p.is_meta}
        self._uses: Counter[int] = Counter()

    def pack(self, tensor: Tensor) -> Any:
        # Parts of a batch of integers share the storage of the batch.
        return _Holder(self, tensor.detach()) if tensor.numel() and tensor.is_floating_point() else tensor

    @staticmethod
    def unpack(kept: Any) -> Tensor:
        return kept.tensor if isinstance(kept, _Holder) else kept

    def change(self, storage: torch.UntypedStorage, count: int) -> None:
        if storage.data_ptr() in self._excluded:
            return
        before = self._uses[storage.data_ptr()]
        self._uses[storage.data_ptr()] += count
        if before == 0 or before + count == 0:
            self.now += count * storage.nbytes()
            self.most = max(self.most, self.now)


class _Holder:
    """A saved tensor, until autograd lets go of it."""

    def __init__(self, counter: SavedBytes, tensor: Tensor) -> None:
        self.tensor, self._counter = tensor, counter
        counter.change(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self._counter.change(self.tensor.untyped_storage(), -1)


def count_kept(world: Any, layout: str, counts: list[int]) -> list[tuple[dict[int, int], int, int]]:
    """By number of microbatches: the bytes of a microbatch by own stage, the most at once, and the most that
    was sent and is kept."""
    trainer = build(layout, dtype="fp32")
    for _ in range(2):  # counts operations, then sends the order of gradients
        trainer.step({"ids": torch.zeros(4, 9, dtype=torch.int64)})
    right, give, found = StagedRunner._run_forward, StageTransfer.give, []
    for count in counts:
        saved = SavedBytes(trainer.model.parameters())
        by_stage: dict[int, int] = {}
        sent = [0]

        def send(self: Any, message: Any, tensors: Any, sent: list[int] = sent) -> None:
            give(self, message, tensors)
            sent.append(sum(tensor.nbytes for each in self._sent.values() for _, tensor in each))

        def run(
            self: Any,
            state: Any,
            action: Any,
            needs: Any,
            saved: SavedBytes = saved,
            by_stage: dict[int, int] = by_stage,
        ) -> Any:
            before = saved.now
            result = right(self, state, action, needs)
            by_stage.setdefault(action.stage, saved.now - before)
            return result

        with (
            mock.patch.object(StagedRunner, "_run_forward", run),
            mock.patch.object(StageTransfer, "give", send),
            torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack),
        ):
            trainer.step({"ids": torch.zeros(2 * count, 9, dtype=torch.int64)})
        found.append((by_stage, saved.most, max(sent)))
    trainer.close()
    return found


def simulate_kept(name: str, count: int, by_stage: dict[int, int]) -> tuple[float, ...]:
    chunks = len(by_stage) // 2 if name in ("interleaved", "bfs") else None
    activations = [float(by_stage[stage]) for stage in range(len(by_stage))]
    return simulate(make_schedule(name, 2, count, chunks), Costs(activations=activations)).most_kept


# The divided ones release what only the first half needs, so the simulation is an upper bound of theirs.
WHOLE = {"1f1b": "", "gpipe": "", "interleaved": " chunks=2", "bfs": " chunks=2"}
DIVIDED = ("zero_bubble", "zbv")


def count_on_two(
    ranks: Pool, name: str, counts: list[int]
) -> list[tuple[tuple[float, ...], list[int], list[int]]]:
    """By number of microbatches: the most bytes of each rank, simulated and measured, and those sent."""
    layout = f"pp=2 schedule={name}{WHOLE.get(name, '')}"
    first, second = ranks.run(count_kept, 2, (layout, counts), timeout_s=90)
    return [
        (simulate_kept(name, count, own[0] | other[0]), [own[1], other[1]], [own[2], other[2]])
        for count, own, other in zip(counts, first, second, strict=True)
    ]


def test_1f1b_keeps_no_more_with_more_microbatches(ranks: Pool) -> None:
    (simulated, few, sent), (_, many, sent_of_many) = count_on_two(ranks, "1f1b", [8, 32])
    assert few == many
    assert sent == sent_of_many, "what a stage has sent is released once the other one has it"
    assert few == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "bfs"])
def test_a_rank_keeps_what_the_simulation_says(ranks: Pool, name: str) -> None:
    [(simulated, measured, _)] = count_on_two(ranks, name, [8])
    assert measured == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize("name", DIVIDED)
def test_divided_backwards_keep_at_most_what_the_simulation_says(ranks: Pool, name: str) -> None:
    [(simulated, measured, _)] = count_on_two(ranks, name, [8])
    for most, bound in zip(measured, simulated, strict=True):
        assert bound / 2 < most <= 1.05 * bound
