"""Routers whose bias keeps experts equally full: it moves once per step, by the choices of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import hash_tensors
from paceline.data import build_data
from paceline.errors import PacelineError
from paceline.models.moe import Balance, count_choices
from paceline.parallel.experts.balance import Choices
from paceline.recipe import parse_recipe as parse
from paceline.recipe.load import parse_recipe
from paceline.train.run import build_loader, build_trainer
from tests.dist.pool import Pool
from tests.train.test_expert_parallel import list_settings
from tests.train.test_experts import recipe_table

LAYOUTS = {"dp_shard=2 ep=2": 2, "dp_replicate=4 ep=4": 4, "pp=2 dp_replicate=2 ep=2": 4, "pp=2": 2}


def biased_table(folder: Path, **keys: Any) -> dict[str, Any]:
    table = recipe_table(folder, "fp32")
    table["model"] |= {"balance": "bias", **keys}
    table["train"] |= {"microbatch_size": 3}
    return table


def train(world: Any, table: dict[str, Any], layout: str, num_steps: int) -> Any:
    """Return the share of the fullest expert per step, the hash of the weights, and all biases."""
    recipe = parse_recipe(table, list_settings(layout))
    data = build_data(recipe)
    trainer = build_trainer(recipe, data, num_steps)
    loader, shares = build_loader(recipe, trainer, data.train, train=True), []
    while trainer.step_number < num_steps:
        for share in loader:
            shares.append(trainer.step(share).fullest_expert)
            if trainer.step_number == num_steps:
                break
    state = trainer.whole_state()
    trainer.close()
    biases = {name: value.tolist() for name, value in state.items() if name.endswith("balance.bias")}
    return shares, hash_tensors(state) if world.is_main else "", biases


def test_every_layout_moves_the_bias_alike(ranks: Pool, tmp_path: Path) -> None:
    """Ranks have different numbers of microbatches; some have none."""
    table = biased_table(tmp_path, bias_rate=0.25)
    alone = ranks.run(train, 1, (table, "", 3))[0]
    (bias,) = alone[2].values()
    assert any(bias), "it has moved"
    assert all(number % 0.25 == 0 for number in bias), "by whole steps"
    for layout, num_ranks in LAYOUTS.items():
        found = ranks.run(train, num_ranks, (table, layout, 3))
        assert found[0] == alone, layout
        assert all(each[0] == alone[0] for each in found), "the share of the fullest, on every rank"


def test_a_bias_moves_by_the_sign_of_what_is_missing() -> None:
    balance = Balance(4, 0.5)
    balance.move(torch.tensor([2, 3, 5, 2]))  # the mean is 3
    assert balance.bias is not None
    assert balance.bias.tolist() == [0.5, 0.0, -0.5, 0.5]
    chances = torch.full((1, 4), 0.25)
    assert balance(chances).tolist() == [[0.75, 0.25, -0.25, 0.75]]
    balance.note(torch.tensor([1, 0, 0, 0]))
    balance.note(torch.tensor([0, 2, 0, 0]))
    choices = Choices([torch.nn.ModuleList([balance, Balance(2, 0.0)])])
    assert choices.read_microbatch().tolist() == [1, 2, 0, 0, 0, 0]
    choices.merge(torch.tensor([[1, 2, 0, 0, 3, 1], [0, 1, 0, 0, 4, 0]], dtype=torch.float64))
    assert choices.fullest == (3 / 4 + 7 / 8) / 2
    balance.eval().note(torch.tensor([9, 9, 9, 9]))
    assert choices.read_microbatch().tolist()[:4] == [1, 2, 0, 0], "evaluation does not count"


def test_the_bias_chooses_and_does_not_weigh() -> None:
    from tests.models.test_moe import build

    model = build(balance="bias", dense_layers=1).eval()
    mixture = model.layers[1].mlp
    x = torch.randn(1, 6, 32)
    with torch.no_grad():
        before = mixture(x)[0]
        mixture.balance.bias += 100.0  # the same for all changes no choice
        assert torch.equal(mixture(x)[0], before)
        mixture.balance.bias[:2] += 100.0
        *_, fullest = mixture(x)
    assert fullest.item() == 0.5, "all tokens choose the first two"


def test_a_bias_fills_experts_equally(ranks: Pool, tmp_path: Path) -> None:
    """From a router that sends most tokens to one expert; on every layout the same curve."""
    table = biased_table(tmp_path, bias_rate=0.005, experts_per_token=1, experts=8, init_std=0.1)
    table["optimizer"] = {"kind": "sgd", "lr": 0.0001}
    shares = ranks.run(train, 1, (table, "", 200))[0][0]
    assert shares[0] > 2 / 8
    # Of 512 choices per step, the fullest of equally likely experts gets about 1.2 / 8.
    assert sum(shares[-20:]) / 20 < 1.45 / 8
    assert ranks.run(train, 2, (table, "dp_replicate=2 ep=2", 200))[0][0] == shares


def test_a_rate_needs_a_bias() -> None:
    table = {"model": {"kind": "moe", "bias_rate": 0.1}, "data": {"kind": "text"}, "train": {"steps": 1}}
    with pytest.raises(PacelineError, match="PL660"):
        parse(table)


KEYS = {"balance": "global"}


def train_global(world: Any, table: dict[str, Any], layout: str) -> Any:
    recipe = parse_recipe(table, list_settings(layout))
    data = build_data(recipe)
    trainer = build_trainer(recipe, data, 4)
    steps = [trainer.step(share) for share in build_loader(recipe, trainer, data.train, train=True)]
    state = trainer.whole_state()
    trainer.close()
    numbers = [(step.loss, step.grad_norm) for step in steps]
    last = [value.tolist() for name, value in state.items() if name.endswith("balance.last")]
    return numbers, last, hash_tensors(state) if world.is_main else ""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_last_global_batch_is_the_same_on_every_layout(ranks: Pool, tmp_path: Path, dtype: str) -> None:
    table = biased_table(tmp_path, **KEYS)
    table["train"] |= {"dtype": dtype}
    alone = ranks.run(train_global, 1, (table, ""))[0]
    assert sum(alone[1][0]) % (32 * 2) == 0, "2 choices for each of 32 tokens of every sample"
    for layout, num_ranks in LAYOUTS.items():
        assert ranks.run(train_global, num_ranks, (table, layout))[0] == alone, layout


def test_the_loss_takes_the_shares_of_the_last_global_batch() -> None:
    from tests.models.test_moe import build

    mixture = build(balance="global", experts_per_token=1).layers[1].mlp
    x = torch.randn(1, 6, 32)
    chances = mixture.gate(x[0]).softmax(-1).detach()
    own = count_choices(chances.argmax(-1), 4) / 6
    assert mixture(x)[1].item() == pytest.approx(4 * float((own * chances.mean(0)).sum()))
    mixture.balance.move(torch.tensor([0, 30, 10, 0]))
    expected = 4 * float((torch.tensor([0, 0.75, 0.25, 0]) * chances.mean(0)).sum())
    assert mixture(x)[1].item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("keys", "code", "words"),
    [
        ({"balance": "global", "balance_loss": 0}, "PL664", "switches it off"),
        ({"balance": "batch"}, "PL1", "balance"),
        ({"experts_per_token": 9}, "PL650", "experts_per_token=9"),
        ({"dense_layers": 4}, "PL651", "dense_layers=4"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(keys: dict[str, Any], code: str, words: str) -> None:
    table = {"model": {"kind": "moe", **keys}, "data": {"kind": "text"}, "train": {"steps": 1}}
    with pytest.raises(PacelineError) as caught:
        parse(table)
    assert code in str(caught.value)
    assert words in str(caught.value)
