"""Pipelines with few, short and uneven microbatches, divided backwards beside shards, and the bytes sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.models.gpt import Gpt
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool
from tests.dist.recorder import RECORD, count_recorded, recorded_collectives
from tests.parallel.stages.models import Outside, make_batch
from tests.train.test_pipeline import Ids
from tests.train.test_pipeline import build as build_small
from tests.train.test_pipeline_layouts import FAST, build, few
from tests.train.test_pipeline_layouts import train as train_layouts

DIVIDED = [
    "pp=2 dp_shard=2 schedule=zero_bubble",
    "pp=2 dp_shard=2 zero=1 schedule=zbv",
    "pp=2 dp_replicate=2 schedule=zbv",
]


def test_divided_backwards_beside_shards_keep_the_bits(ranks: Pool) -> None:
    [alone] = ranks.run(train_layouts, 1, ([("", {})],))[0]
    cases: list[Any] = [(layout, {}) for layout in DIVIDED]
    assert ranks.run(train_layouts, 4, (cases,), timeout_s=120)[0] == [alone] * len(cases)


def test_data_ranks_without_a_microbatch_take_part_in_divided_backwards(ranks: Pool) -> None:
    [alone] = ranks.run(few, 1, ([("", {})],))[0]
    assert ranks.run(few, 4, ([(DIVIDED[0], {})],), timeout_s=120)[0] == [alone]
    [quick] = ranks.run(few, 4, ([(DIVIDED[0], FAST)],), timeout_s=120)[0]
    [one] = ranks.run(few, 1, ([("", FAST)],))[0]
    assert quick[1] == pytest.approx(one[1], rel=1e-12)
    assert quick[0] == [pytest.approx(pair, rel=1e-10) for pair in one[0]]


class Uneven(torch.utils.data.Dataset[Any]):
    """Sequences of three lengths."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = (32, 17, 64)[index]
        return {"ids": torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(index))}


def long_gpt() -> nn.Module:
    section = GptModel(kind="gpt", layers=8, hidden=32, heads=4, kv_heads=2, dropout=0.2)
    return Gpt(section, 64, 64)


def uneven(world: Any, layouts: list[str]) -> list[Any]:
    """Steps of 3 lengths at once, of 1 microbatch and of 8 samples; then an evaluation on 7 samples."""
    found = []
    for layout in layouts:
        trainer = build(layout, model=long_gpt, microbatch_size=1)
        steps = [trainer.step(next(iter(trainer.loader(Uneven(), global_batch_size=3, shuffle=False))))]
        steps.append(trainer.step({"ids": torch.full((1, 6), 3)}))
        steps.append(trainer.step(next(iter(trainer.loader(Ids(), global_batch_size=8, name="eight")))))
        valid = torch.utils.data.Subset(Ids(), range(7))
        evaluated = trainer.evaluate(trainer.loader(valid, global_batch_size=8, shuffle=False, name="valid"))
        found.append(([(step.loss, step.grad_norm) for step in steps], evaluated.loss))
        trainer.close()
    return found


@pytest.mark.parametrize(
    "schedule",
    [
        "zero_bubble",
        pytest.param("1f1b", marks=pytest.mark.slow),
        pytest.param("zbv", marks=pytest.mark.slow),
    ],
)
def test_lengths_and_counts_may_differ_on_four_stages(ranks: Pool, schedule: str) -> None:
    [alone] = ranks.run(uneven, 1, ([""],), timeout_s=60)[0]
    assert ranks.run(uneven, 4, ([f"pp=4 schedule={schedule}"],), timeout_s=100)[0] == [alone]


def count_sent(world: Any, layout: str) -> list[int]:
    """Return the lengths of all messages between stages in the second step and in the third."""
    trainer = build_small(layout, Outside)
    trainer.step(make_batch(0))
    sent: list[int] = []
    send = dist.isend

    def counting(tensor: Tensor, *args: Any, **settings: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return send(tensor, *args, **settings)

    dist.isend = counting
    try:
        for _ in range(2):
            trainer.step(make_batch(1))
    finally:
        dist.isend = send
    trainer.close()
    return sent


def list_collectives(world: Any, layout: str) -> list[tuple[str, int]]:
    """Return all collectives of the second step, with their numbers of elements; sends are not among them."""
    trainer = build_small(layout, Outside)
    assert trainer.step(make_batch(0)).grad_norm > 0
    since = count_recorded()
    assert trainer.step(make_batch(1)).grad_norm > 0
    found = [(name.split()[0], numel) for name, (numel, *_) in recorded_collectives(since)]
    trainer.close()
    return found


@pytest.mark.slow
def test_ranks_agree_and_join_their_norms_and_send_nothing_else(ranks: Pool) -> None:
    """The length of the user's own batch, the agreement, and the norms of all rows in the model's order."""
    num_rows = sum(len(p) for p in Outside().parameters())
    for found in ranks.run(list_collectives, 2, ("pp=2",), env=RECORD):
        assert found == [("all_reduce", 2), ("all_reduce", 256), ("all_reduce", num_rows)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_a_step_sends_what_crosses_the_cut_and_nothing_else(ranks: Pool, schedule: str) -> None:
    """Per microbatch two tensors of [samples, 5, 8], and back their gradients.

    The first gradient of each shape after the step that counts operations has a byte more per dimension.
    """
    samples = [2, 2, 2, 2, 2, 1]  # 11 samples
    first, second = ranks.run(count_sent, 2, (f"pp=2 schedule={schedule}",))
    lengths = [4 * 5 * 8 * count for count in samples for _ in range(2)]
    assert first == 2 * lengths
    orders = [3 * (samples.index(count) == number) for number, count in enumerate(samples) for _ in range(2)]
    assert second == [length + order for length, order in zip(lengths, orders, strict=True)] + lengths
