"""Hooks on parameters under dp_shard see the gradients that they see in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.parallel.parameter_hooks import check_hooks, has_hooks, move_hooks, run_hooks
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool, RankError
from tests.parallel.sharded import Toy, build_shards, microbatch, run_step, sum_losses, whole_gradients

HOOKED = ("places", "blocks.1.up.weight", "embed.weight")


def add_hooks(model: nn.Module, seen: list[tuple[str, Tensor]]) -> list[Any]:
    """Hooks that keep what they see and change it; their handles."""
    parameters = dict(model.named_parameters())

    def halve(name: str) -> Any:
        def hook(gradient: Tensor) -> Tensor:
            seen.append((name, gradient.detach().clone()))
            return gradient * 0.5

        return hook

    return [parameters[name].register_hook(halve(name)) for name in HOOKED]


def hooked_steps(world: Any, when: str, zero: int, exact: bool) -> Any:
    """Return what hooks saw in three steps, the last one without hooks, and the gradients."""
    model, seen = Toy(), list[tuple[str, Tensor]]()
    handles = add_hooks(model, seen) if when == "before" else []
    shards, mesh = build_shards(world, f"dp_shard=2 zero={zero}", model, exact=exact)
    if when == "between":
        run_step(shards, model, mesh.dp.rank, (1, 1))
    if when != "before":
        handles = add_hooks(model, seen)
    gradients = []
    for step, num_owned in enumerate([(2, 1), (1, 2), (1, 1)]):
        if step == 2:
            for handle in handles:
                handle.remove()
        run_step(shards, model, mesh.dp.rank, num_owned, step)
        gradients.append(whole_gradients(model))
    return seen, gradients


def hooked_steps_of_one_process() -> tuple[list[tuple[str, Tensor]], list[dict[str, Tensor]]]:
    model, seen = Toy(), list[tuple[str, Tensor]]()
    handles, gradients = add_hooks(model, seen), []
    for step, num_microbatches in enumerate([3, 3, 2]):
        if step == 2:
            for handle in handles:
                handle.remove()
        model.zero_grad()
        for index in range(num_microbatches):
            sum_losses(model, microbatch(index, step))[0].backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return seen, gradients


@pytest.mark.parametrize(
    ("when", "zero", "exact"),
    [
        ("before", 3, True),
        ("before", 1, False),
        ("after", 3, False),
        ("after", 2, True),
        ("between", 3, True),
    ],
)
def test_hooks_work_as_in_one_process(ranks: Pool, when: str, zero: int, exact: bool) -> None:
    results = ranks.run(hooked_steps, 2, (when, zero, exact))
    expected_seen, expected = hooked_steps_of_one_process()
    first, second = (result[0] for result in results)
    assert len(first) + len(second) == len(expected_seen), "once per microbatch, not in idle rounds"
    expected_bits = sorted((name, g.numpy().tobytes()) for name, g in expected_seen)
    assert sorted((name, g.numpy().tobytes()) for name, g in first + second) == expected_bits
    for step, gradients in enumerate(expected):
        for name, gradient in gradients.items():
            torch.testing.assert_close(results[0][1][step][name], gradient, msg=f"{name} in step {step}")


class Hooked(Toy):
    """Registers a hook where it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.places.register_hook(lambda gradient: gradient * 0.5)


def train_built(world: Any, layout: str, from_factory: bool) -> Any:
    trainer = Trainer(
        Hooked if from_factory else Hooked(),
        forward=lambda model, ids: model(ids[:, :-1]),
        loss=lambda logits, ids: nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named if p.requires_grad], lr=0.1),
        layout=layout,
        microbatch_size=2,
        dtype="fp64",
    )
    batch = torch.cat([microbatch(index) for index in range(4)])
    half = len(batch) // world.world_size
    trainer.step(batch[half * world.rank : half * (world.rank + 1)])
    return trainer.whole_state().get("places")  # rank 0 has it


@pytest.mark.parametrize("from_factory", [False, True])
def test_a_trainer_gives_the_bits_of_one_process(ranks: Pool, from_factory: bool) -> None:
    (alone,) = ranks.run(train_built, 1, ("", from_factory))
    sharded, _ = ranks.run(train_built, 2, ("dp_shard=2", from_factory))
    assert torch.equal(sharded, alone)


def refuse_late(world: Any) -> None:
    model = Toy()
    shards, mesh = build_shards(world, "dp_shard=2", model)
    run_step(shards, model, mesh.dp.rank, (1, 1))
    model.places.register_post_accumulate_grad_hook(lambda parameter: None)
    run_step(shards, model, mesh.dp.rank, (1, 1))


def refuse_early(world: Any) -> None:
    model = Toy()
    model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    build_shards(world, "dp_shard=2", model)


@pytest.mark.parametrize(("run", "name"), [(refuse_early, "blocks.1.up.weight"), (refuse_late, "places")])
def test_hooks_on_accumulated_gradients_are_refused(ranks: Pool, run: Any, name: str) -> None:
    with pytest.raises(RankError, match="PL434") as caught:
        ranks.run(run)
    assert name in str(caught.value)
    assert "register_hook" in str(caught.value)


def test_hooks_move_with_their_handles() -> None:
    old, model = nn.Linear(2, 2), nn.Linear(2, 2)
    handle = old.weight.register_hook(lambda gradient: gradient + 1)
    old.weight.register_hook(lambda gradient: None)
    move_hooks(dict(old.named_parameters()), model)
    assert has_hooks(model.weight)
    assert not has_hooks(model.bias)
    assert torch.equal(run_hooks(model.weight, torch.zeros(2)), torch.ones(2))
    handle.remove()
    assert torch.equal(run_hooks(model.weight, torch.zeros(2)), torch.zeros(2))
    assert torch.equal(run_hooks(model.bias, torch.zeros(2)), torch.zeros(2))


def test_a_long_list_is_cut() -> None:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(5))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]
    with pytest.raises(PacelineError, match="and 2 more") as caught:
        check_hooks(model.named_parameters())
    assert caught.value.code == "PL434"
