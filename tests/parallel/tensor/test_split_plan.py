"""The plan of tp, and models for which there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.models.gpt import Gpt
from paceline.parallel.tensor.split_plan import SplitPlan, find_plan
from paceline.recipe.schema import GptModel
from tests.parallel.tensor.models import build


def plan(num_ranks: int, **settings: Any) -> SplitPlan:
    section = GptModel(kind="gpt", layers=2, hidden=32, **{"heads": 4, **settings})
    ids = torch.zeros(2, 8, dtype=torch.int64)
    return find_plan(Gpt(section, 96, 8), lambda model: model(ids), num_ranks)


def test_a_plan_names_forwards_that_add_up_by_themselves() -> None:
    model = build("own-blocks")
    found = find_plan(model, lambda m: m(torch.zeros(2, 8, dtype=torch.int64)), 2)
    assert "summed inside its own forward: *.*.down (2)" in found.describe()


def test_heads_that_cannot_be_divided_stay_whole_and_are_reported() -> None:
    found = plan(num_ranks=4, heads=2)
    assert 0.5 < found.share < 1
    assert "its size of 2 is not divisible by 4" in found.whole["layers.0.self_attn.q_proj.weight"]


def test_nothing_to_split() -> None:
    with pytest.raises(PacelineError) as caught:
        find_plan(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), lambda m: m(torch.zeros(2, 3, 8, 8)), 2)
    assert caught.value.code == "PL461"


def test_no_example() -> None:
    with pytest.raises(PacelineError) as caught:
        find_plan(nn.Linear(2, 2), None, 2)
    assert caught.value.code == "PL463"


class Undecided(nn.Module):
    """Goes by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result * 2 if result.sum().item() > 0 else result


def test_a_forward_that_needs_numbers() -> None:
    with pytest.raises(PacelineError, match="Undecided failed in the model") as caught:
        find_plan(Undecided(), lambda m: m(torch.zeros(2, 4)), 2)
    assert caught.value.code == "PL460"


def test_a_wrong_example() -> None:
    with pytest.raises(PacelineError, match="failed in the model") as caught:
        find_plan(nn.Linear(4, 4), lambda m: m(torch.zeros(2, 5)), 2)
    assert caught.value.code == "PL460"


def test_planning_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Gpt(GptModel(kind="gpt", layers=1, hidden=32, heads=4), 96, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.arange(8).repeat(2, 1)
    expected = model(ids)
    find_plan(model, lambda m: m(ids), 2, sequence=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(ids), expected)


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        model = Gpt(GptModel(kind="gpt", layers=2, hidden=32, heads=4), 96, 8)
    found = find_plan(model, lambda m: m(torch.zeros(2, 8, dtype=torch.int64, device="cpu")), 2)
    assert found.share == 1
