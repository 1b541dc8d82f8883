"""Right layouts raise no alarm, whatever they do to last bits; what can't be compared is refused."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import paceline
from paceline.errors import PacelineError
from paceline.recipe import parse_recipe
from paceline.verifying.check import build_default_optimizer, resolve_layout, verify_subject
from paceline.verifying.subject import UserSubject
from tests.dist.pool import Pool
from tests.verifying.runs import PoolRunner, verify_recipe
from tests.verifying.test_faults import recipe_table
from tests.verifying.two_steps import TWO_STEPS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize("kind", ["gpt", "encoder", "resnet"])
def test_right_layouts_are_within_tolerance(ranks: Pool, tmp_path: Path, kind: str, dtype: str) -> None:
    recipe = parse_recipe(recipe_table(kind, tmp_path, dtype=dtype))
    layouts = [resolve_layout("dp_replicate=2"), resolve_layout("dp_replicate=4")]
    told: list[str] = []
    verified = verify_recipe(
        recipe, layouts, run=PoolRunner(ranks), on_result=lambda result: told.append(result.layout)
    )
    assert verified.ok
    assert told == ["dp_replicate=2", "dp_replicate=4"]
    assert [result.layout for result in verified.results] == told
    assert any(not result.same_bits for result in verified.results), "a sum over ranks rounds otherwise"
    for result in verified.results:
        assert result.worst_noise < 10, "the measured margin of the tolerance is gone"
        assert result.num_compared == result.num_ranks * (verified.num_tensors + 3 * 3)
    # Every kind of tensor has a tolerance above 0, but for the start and what counts steps.
    assert {key.split("/")[1] for key in verified.tolerances} >= {"gradient", "weight", "optimizer", "norm"}
    assert all(tolerance > 0 for key, (_, _, tolerance) in verified.tolerances.items() if "/gradient/" in key)


def test_gradients_are_clipped_while_compared(ranks: Pool, tmp_path: Path) -> None:
    table = recipe_table("gpt", tmp_path)
    table["train"]["clip_norm"] = 1e6
    verified = verify_recipe(parse_recipe(table), [resolve_layout("dp_replicate=1")], run=PoolRunner(ranks))
    assert 0 < verified.clip_norm < 10
    table["train"]["clip_norm"] = 0.0
    verified = verify_recipe(parse_recipe(table), [resolve_layout("dp_replicate=1")], run=PoolRunner(ranks))
    assert verified.clip_norm == 0
    assert verified.results[0].same_bits


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize("variation", ["products_in_2_parts", "products_in_8_parts"])
def test_split_products_are_no_fault(ranks: Pool, tmp_path: Path, variation: str, dtype: str) -> None:
    recipe = parse_recipe(recipe_table("encoder", tmp_path, dtype=dtype))
    (result,) = verify_recipe(
        recipe, [resolve_layout("dp_replicate=2")], run=PoolRunner(ranks, variation)
    ).results
    assert result.status == "ok", result.findings
    assert not result.same_bits
    assert result.worst_noise < 10


def test_the_exact_reduction_is_held_to_its_bits(ranks: Pool, tmp_path: Path) -> None:
    recipe = parse_recipe(recipe_table("gpt", tmp_path, reduction="exact"))
    right = verify_recipe(recipe, [resolve_layout("dp_replicate=4")], run=PoolRunner(ranks)).results[0]
    assert (right.status, right.same_bits) == ("ok", True)
    wrong = verify_recipe(
        recipe, [resolve_layout("dp_replicate=2")], run=PoolRunner(ranks, "products_in_2_parts")
    )
    (finding,) = wrong.findings
    assert finding.code == "PL715"
    assert not wrong.ok


class KeyBias(nn.Module):
    """Attention whose key bias has a true gradient of 0: it moves all scores of a query alike."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (2, 8)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = functional.scaled_dot_product_attention(q, k, v)
        output: Tensor = self.head(attended.transpose(1, 2).flatten(2).mean(1))
        return output


def make_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, 6, 16, generator=generator),
        "y": torch.randint(0, 4, (16,), generator=generator),
    }


def call(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(batch["x"])


def mean_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output, batch["y"])


def subject(model_fn: Any, **changes: Any) -> UserSubject:
    settings = {
        "model_fn": model_fn,
        "batch_fn": make_batch,
        "loss": mean_loss,
        "forward": call,
        "optimizer": build_default_optimizer,
        **TWO_STEPS,
    }
    return UserSubject(**(settings | changes))


def test_a_gradient_that_is_nothing_but_rounding_is_no_alarm(ranks: Pool) -> None:
    """findings: a relative bound would take k_proj.bias for wrong."""
    verified = verify_subject(
        subject(KeyBias), [resolve_layout("dp_replicate=2")], run=PoolRunner(ranks, "products_in_2_parts")
    )
    assert verified.ok, verified.findings
    floor, largest, tolerance = verified.tolerances["1/gradient/k_proj.bias"]
    assert largest < 1e-16, "its true value is 0"
    assert floor > 1e-3 * largest, "all of it is rounding"
    assert tolerance < 1e-13
    floor, largest, _ = verified.tolerances["1/gradient/q_proj.bias"]
    assert floor < 1e-12 * largest


class Idle(nn.Module):
    """Has a parameter whose gradient is 0 to the bit."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(96, 4), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.used(x.flatten(1)) + 0 * self.idle.sum()
        return output


def test_an_exact_zero_takes_the_scale_of_its_kind(ranks: Pool) -> None:
    verified = verify_subject(subject(Idle), [resolve_layout("dp_replicate=2")], run=PoolRunner(ranks))
    assert verified.ok, verified.findings
    assert verified.tolerances["1/gradient/idle"][2] > 0


class Restless(nn.Module):
    """Draws from a generator that nobody seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(96, 4)
        self.generator = np.random.default_rng()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.flatten(1)) * (1 + self.generator.random())
        return output


def test_a_reference_that_can_not_be_repeated_is_refused(ranks: Pool) -> None:
    with pytest.raises(PacelineError, match=r"another loss at step 1.*\[PL722\]"):
        verify_subject(subject(Restless), [resolve_layout("dp_replicate=2")], run=PoolRunner(ranks))


class FailsOnRank1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(96, 4)

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.get_world_size() == 4 and torch.distributed.get_rank() == 1:
            raise ValueError("the cat is on the keyboard")
        output: Tensor = self.layer(x.flatten(1))
        return output


def test_a_layout_that_fails_is_reported_and_the_others_go_on(ranks: Pool) -> None:
    layouts = [resolve_layout("dp_replicate=4"), resolve_layout("dp_replicate=2")]
    verified = verify_subject(subject(FailsOnRank1), layouts, run=PoolRunner(ranks))
    assert [result.status for result in verified.results] == ["failed", "ok"]
    (finding,) = verified.findings
    assert finding.code == "PL717"
    assert "the cat is on the keyboard" in finding.saw
    assert not verified.ok


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(place)
        return {"x": torch.randn(96, generator=generator), "y": torch.tensor(place % 4)}


def test_a_data_set_goes_through_the_trainers_loader(ranks: Pool) -> None:
    """40 samples in batches of 16: the third is ragged, with one microbatch fewer than ranks."""
    settings = {"batch_fn": Numbers(), "global_batch_size": 16, "num_steps": 4, "microbatch_size": 3}
    verified = verify_subject(
        subject(Idle, **settings), [resolve_layout("dp_replicate=4")], run=PoolRunner(ranks)
    )
    assert verified.ok, verified.findings
    assert verified.num_microbatches == [6, 6, 3, 6]
    with pytest.raises(PacelineError, match=r"with global_batch_size=None.*\[PL721\]"):
        verify_subject(
            subject(Idle, batch_fn=Numbers()), [resolve_layout("dp_replicate=2")], run=PoolRunner(ranks)
        )


@pytest.mark.parametrize(("changes", "layouts"), [({"num_steps": 0}, ["dp_replicate=2"]), ({}, [])])
def test_nothing_to_compare_is_refused(ranks: Pool, changes: dict[str, Any], layouts: list[str]) -> None:
    with pytest.raises(PacelineError, match="PL720"):
        verify_subject(subject(Idle, **changes), [resolve_layout(x) for x in layouts], run=PoolRunner(ranks))


def test_the_example_in_the_guide(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ROOT / "examples" / "verify" / "own_model.py"
    monkeypatch.syspath_prepend(str(path.parent))
    importlib.import_module(path.stem).main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[:2] for line in lines] == [["dp_replicate=2", "ok"], ["dp_replicate=4", "ok"]]
    region = path.read_text(encoding="utf-8").split("# region verify\n")[1].split("# endregion")[0]
    assert region in (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
    assert callable(paceline.verify)


class Viewed(nn.Module):
    """Attention between views with numbers, which tp divides."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.joined = (nn.Linear(16, 16) for _ in range(4))
        self.output = nn.Linear(96, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        queries, keys, values = (
            layer(x).view(batch, length, 4, width // 4).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        weights = (queries @ keys.transpose(-2, -1)).softmax(-1)
        attended = (weights @ values).transpose(1, 2).reshape(batch, length, width)
        output: Tensor = self.output(self.joined(attended).flatten(1))
        return output


def test_a_difference_among_divided_views_is_put_to_its_place(ranks: Pool) -> None:
    """The second run, with all modules watched, calls what tp counts and divides."""
    layouts = [resolve_layout("tp=2"), resolve_layout("dp_replicate=2")]
    verified = verify_subject(subject(Viewed), layouts, run=PoolRunner(ranks, "row_sum_missing"))
    assert [result.status for result in verified.results] == ["differs", "ok"]
    (finding,) = verified.findings
    assert "joined" in finding.where
