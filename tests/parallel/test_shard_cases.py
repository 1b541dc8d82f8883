"""Features of models and loops that sharding could get wrong."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from tests.dist.pool import Pool, RankError
from tests.parallel.sharded import (
    Toy,
    build_shards,
    gradients_of_one_process,
    microbatch,
    run_step,
    sum_losses,
    whole,
    whole_gradients,
)


class Branching(Toy):
    """Uses one of two parameters, depending on the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.even = nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(7, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        chosen = self.odd if int(ids.sum()) % 2 else self.even
        return super().forward(ids) * chosen.sum()


def gradients_of_branches(world: Any, zero: int, exact: bool) -> Any:
    model = Branching()
    shards, mesh = build_shards(world, f"dp_shard=2 zero={zero}", model, exact=exact)
    result = []
    for step, num_owned in enumerate([(1, 1), (2, 1), (2, 2)]):
        run_step(shards, model, mesh.dp.rank, num_owned, step)
        used = {name for name, p in model.named_parameters() if id(p) in shards.used}
        result.append((used, whole_gradients(model)))
    return result


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("zero", [1, 3])
def test_ranks_may_use_different_parameters(ranks: Pool, zero: int, exact: bool) -> None:
    results = ranks.run(gradients_of_branches, 2, (zero, exact))
    seen = set()
    for step, num_microbatches in enumerate([2, 3, 4]):
        expected = gradients_of_one_process(Branching(), num_microbatches, step)
        used = results[0][step][0] | results[1][step][0]
        assert used == set(expected)
        seen |= {(name in of_rank[step][0]) for of_rank in results for name in ("odd", "even")}
        for of_rank in results:
            for name, gradient in of_rank[step][1].items():
                wanted = expected.get(name, torch.zeros_like(gradient))
                torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12, msg=name)
    assert seen == {True, False}, "the ranks should differ in what they use"


def step_of_a_part(world: Any, exact: bool) -> None:
    model = Toy()
    shards, _ = build_shards(world, "dp_shard=2", model, exact=exact)
    shards.begin((1, 1))
    with shards.synchronising(True, world.rank):
        loss = torch.ones((), requires_grad=True)
        shards.backward(loss)
    shards.check_reduced()


@pytest.mark.parametrize("exact", [False, True])
def test_a_loss_that_does_not_come_from_the_model_is_named(ranks: Pool, exact: bool) -> None:
    with pytest.raises(RankError, match="parameters got no gradient on rank") as caught:
        ranks.run(step_of_a_part, 2, (exact,))
    assert all(cause.code == "PL441" for cause in caught.value.causes.values())


def refusal(world: Any, kind: str) -> str:
    model = Toy()
    if kind == "strided":
        model.places.data = model.places.data.t().contiguous().t()
    if kind == "dtypes":
        model.blocks[1].up.float()
    with pytest.raises(PacelineError) as caught:
        build_shards(world, "dp_shard=2 zero=2", model)
    return str(caught.value)


def test_refusals_name_the_parameter(ranks: Pool) -> None:
    for kind, words in {
        "strided": ["places", "channels_last", "PL440"],
        "dtypes": ["blocks.1.gain is float64", "blocks.1.up.weight is float32", "PL442"],
    }.items():
        for message in ranks.run(refusal, 2, (kind,)):
            assert all(word in message for word in words), message


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class Skipping(Toy):
    """Runs blocks 0 and 1 or blocks 0 and 2."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(ids) + self.places)
        x = self.blocks[1 + _rank()](x)
        return self.head(self.norm(x))


def signature_of(world: Any, kind: str) -> int:
    model = Toy() if kind == "all" else Skipping()
    shards, _ = build_shards(world, "dp_shard=2", model, prefetch=0)
    shards.begin((1, 1))
    with shards.synchronising(True, world.rank):
        shards.backward(sum_losses(model, microbatch(0))[0])
    return shards.signature


class Backwards(Toy):
    """Runs its blocks from the last to the first; from the second call on without one of them if `drops`."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.drops = drops
        self.num_calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places
        self.num_calls += 1
        for number in (2, 1, 0):
            if not (self.drops and self.num_calls > 1 and number == 2 - _rank()):
                x = self.blocks[number](x)
        return self.head(self.norm(x))


def run_backwards(world: Any, drops: bool, exact: bool) -> Any:
    model = Backwards(drops)
    shards, mesh = build_shards(world, "dp_shard=2", model, exact=exact)
    result = []
    for step in range(3):
        run_step(shards, model, mesh.dp.rank, (1, 1), step)
        result.append((shards.signature, whole_gradients(model)))
    return result


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("drops", [False, True])
def test_blocks_may_be_called_in_another_order_than_they_are_defined(
    ranks: Pool, drops: bool, exact: bool
) -> None:
    one, other = ranks.run(run_backwards, 2, (drops, exact))
    for step, ((signature, gradients), (same, others)) in enumerate(zip(one, other, strict=True)):
        assert signature == same
        for name, gradient in gradients.items():
            assert torch.equal(gradient, others[name])
        if not drops:
            expected = gradients_of_one_process(Backwards(False), 2, step)
            for name, wanted in expected.items():
                torch.testing.assert_close(gradients[name], wanted, rtol=1e-11, atol=1e-11, msg=name)


def test_ranks_that_run_different_blocks_gather_and_sum_the_same(ranks: Pool) -> None:
    signatures = [ranks.run(signature_of, 2, (kind,)) for kind in ("all", "different")]
    assert signatures[0] == signatures[1]
    assert len({signature for pair in signatures for signature in pair}) == 1


def step_after_others(world: Any, zero: int, between: str) -> Any:
    """Take a step, do something, and take a second step; return its gradients, and the weights before it."""
    model = Toy()
    shards, mesh = build_shards(world, f"dp_shard=2 zero={zero}", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_step(shards, model, mesh.dp.rank, (2, 2))
    optimizer.step()
    if between == "evaluation":
        with torch.no_grad():
            sum_losses(model, microbatch(5))
        assert all(hasattr(p, "full_tensor") for p in model.parameters())
    if between == "failure":
        shards.begin((2, 2))
        with contextlib.suppress(ZeroDivisionError), shards.synchronising(False, 0):
            shards.backward(sum_losses(model, microbatch(9))[0])
            sum_losses(model, microbatch(9))
            raise ZeroDivisionError
        shards.reshard()
    if between == "silence":
        with shards.silenced():
            run_step(shards, model, mesh.dp.rank, (2, 2))
    run_step(shards, model, mesh.dp.rank, (2, 2), step=1)
    gradients = whole_gradients(model)
    optimizer.step()
    return gradients, {name: whole(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_nothing_stays_behind_between_steps(ranks: Pool, zero: int) -> None:
    expected = ranks.run(step_after_others, 2, (zero, ""))
    for between in ("evaluation", "failure", "silence"):
        found = ranks.run(step_after_others, 2, (zero, between))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=between)


def silent_collectives(world: Any, zero: int) -> int:
    from tests.dist.recorder import count_recorded

    model = Toy()
    shards, mesh = build_shards(world, f"dp_shard=2 zero={zero}", model)
    run_step(shards, model, mesh.dp.rank, (2, 2))
    before = count_recorded()
    with shards.silenced():
        run_step(shards, model, mesh.dp.rank, (2, 2))
    silent = count_recorded() - before
    run_step(shards, model, mesh.dp.rank, (2, 2))
    assert count_recorded() > before
    return silent


def test_silence_sends_nothing(ranks: Pool) -> None:
    from tests.dist.recorder import RECORD

    for zero in (1, 3):
        assert ranks.run(silent_collectives, 2, (zero,), env=RECORD) == [0, 0]


class Viewing(Toy):
    """Blocks that give views, changed in place afterwards."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return self.head(self.norm(x))


def gradients_through_views(world: Any) -> Any:
    model = Viewing()
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: output.transpose(0, 1).transpose(0, 1))
    shards, mesh = build_shards(world, "dp_shard=2", model)
    run_step(shards, model, mesh.dp.rank, (1, 1))
    return whole_gradients(model)


def test_outputs_that_are_views_may_change_in_place(ranks: Pool) -> None:
    expected = gradients_of_one_process(Viewing(), 2)
    for found in ranks.run(gradients_through_views, 2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def train_from_meta(world: Any) -> Any:
    with torch.device("meta"):
        model = Toy()
    shards, mesh = build_shards(world, "dp_shard=2", model)
    weights = dict(Toy().named_parameters())
    assert all(shard.is_meta for shard in model.parameters())
    model.to_empty(device="cpu")
    for name, shard in model.named_parameters():
        local = shard.to_local()
        rows = -(-shard.shape[0] // 2)
        first = mesh.dp_shard.rank * rows
        with torch.no_grad():
            local.copy_(weights[name][first : first + local.shape[0]])
    run_step(shards, model, mesh.dp.rank, (1, 1))
    return whole_gradients(model)


def test_a_model_on_meta_is_filled_by_shards(ranks: Pool) -> None:
    expected = gradients_of_one_process(Toy(), 2)
    for found in ranks.run(train_from_meta, 2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
