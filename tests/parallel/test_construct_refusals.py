"""The operations that a recorded construction refuses, each by its name."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.parallel.construct.build import construct

OUTSIDE = nn.Linear(4, 4)


class Reading(nn.Module):
    """Does something with a weight while it is built."""

    def __init__(self, do: Callable[[Reading], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        do(self)


def swallow(model: Reading) -> None:
    with suppress(Exception):
        model.weight.sum().item()


def build_partly_on_meta() -> nn.Module:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.tensor([1.0, 2.0]))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "item": (
        lambda: Reading(lambda m: m.weight.sum().item()),
        "PL455",
        "Reading at test_construct_refusals.py",
    ),
    "if": (lambda: Reading(lambda m: 1 if m.weight.sum() > 0 else 2), "PL455", "item()"),
    "numpy": (lambda: Reading(lambda m: m.weight.detach().numpy()), "PL455", "numpy()"),
    "tolist": (lambda: Reading(lambda m: m.weight.tolist()), "PL455", "tolist()"),
    "np.asarray": (lambda: Reading(lambda m: np.asarray(m.weight.detach())), "PL455", "__array__()"),
    "format": (lambda: Reading(lambda m: f"{m.weight.sum():.3f}"), "PL455", "__format__()"),
    "tensor of tensors": (
        lambda: Reading(lambda m: torch.tensor([m.weight[0, 0]])),
        "PL455",
        "torch.tensor()",
    ),
    "swallowed": (lambda: Reading(swallow), "PL455", "item()"),
    "nonzero": (lambda: Reading(lambda m: m.weight.nonzero()), "PL456", "nonzero"),
    "unique": (lambda: Reading(lambda m: m.weight.unique()), "PL456", "unique"),
    "boolean index": (lambda: Reading(lambda m: m.weight[m.weight > 0]), "PL456", "index"),
    "equal": (lambda: Reading(lambda m: torch.equal(m.weight, m.weight)), "PL456", "equal"),
    "allclose": (lambda: Reading(lambda m: torch.allclose(m.weight, m.weight)), "PL456", "allclose"),
    "orthogonal": (
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
        "PL456",
        "_Orthogonal",
    ),
    "apply": (lambda: Reading(lambda m: m.weight.data.apply_(abs)), "PL456", "apply_"),
    "sparse": (lambda: Reading(lambda m: m.weight.to_sparse()), "PL456", "to_sparse"),
    "raises": (lambda: Reading(lambda m: 1 / 0), "PL457", "ZeroDivisionError: division by zero"),  # type: ignore[arg-type, return-value]
    "no module": (lambda: None, "PL457", "NoneType"),  # type: ignore[arg-type, return-value]
    "built before": (lambda: OUTSIDE, "PL458", "weight, bias"),
    "kept from outside": (lambda: Reading(lambda m: setattr(m, "outer", OUTSIDE)), "PL458", "outer.weight"),
    "lazy": (lambda: nn.LazyLinear(3), "PL458", "weight, bias"),
    "data on meta": (build_partly_on_meta, "PL458", "table"),
    "pickled": (lambda: pickle.loads(pickle.dumps(nn.Linear(2, 2))), "PL459", "weight, bias"),
    "writes outside": (
        lambda: Reading(lambda m: OUTSIDE.weight.data.copy_(m.weight)),
        "PL458",
        "writes with copy_",
    ),
    "writes into numpy": (
        lambda: Reading(lambda m: torch.from_numpy(np.ones(3)).mul_(2)),
        "PL458",
        "numpy",
    ),
    "attribute in a tuple": (
        lambda: Reading(lambda m: setattr(m, "held", (torch.eye(2),))),
        "PL458",
        "held[0] is a tensor that is in a tuple",
    ),
    "attribute that is part of a parameter": (
        lambda: Reading(lambda m: setattr(m, "row", m.weight.data[0])),
        "PL458",
        "row is a tensor that shares",
    ),
    "never initialised": (
        lambda: Reading(lambda m: setattr(m, "bare", nn.Parameter(torch.empty(3)))),
        "PL459",
        "bare",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name: str) -> None:
    factory, code, named = REFUSED[name]
    untouched = copy.deepcopy(OUTSIDE.state_dict())
    with pytest.raises(PacelineError) as caught:
        construct(factory, 0)
    assert caught.value.code == code
    assert named in caught.value.saw
    for key, tensor in OUTSIDE.state_dict().items():
        assert torch.equal(tensor, untouched[key])


def test_a_parameter_that_is_partly_initialised_is_refused_when_it_is_filled() -> None:
    def fill_first_row(model: Reading) -> None:
        model.partly = nn.Parameter(torch.empty(3, 3))
        nn.init.zeros_(model.partly.data[0])

    construction = construct(lambda: Reading(fill_first_row), 0)
    construction.fill("weight")
    with pytest.raises(PacelineError) as caught:
        construction.fill("partly")
    assert (caught.value.code, "partly" in caught.value.saw) == ("PL459", True)


def test_a_scratch_buffer_starts_as_zeros(caplog: pytest.LogCaptureFixture) -> None:
    construction = construct(lambda: Reading(lambda m: m.register_buffer("scratch", torch.empty(5))), 0)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(construction.fill("scratch"), torch.zeros(5))
    assert "scratch" in caplog.text


def test_what_an_operation_refuses_to_do_again_is_named() -> None:
    construction = construct(lambda: Reading(lambda m: None), 0)
    last = construction._record.ops[-1]
    last.func = lambda *args, **kwargs: torch.linalg.inv(torch.zeros(2, 2))
    with pytest.raises(PacelineError, match="The parameter weight cannot be made") as caught:
        construction.fill("weight")
    assert caught.value.code == "PL456"


def test_weights_from_outside_are_taken_as_they_were() -> None:
    pretrained = torch.randn(4, 4)

    def copy_weights(model: Reading) -> None:
        model.weight.data.copy_(pretrained)
        model.part = nn.Parameter(pretrained[:2] * 0.5)

    construction = construct(lambda: Reading(copy_weights), 0)
    assert torch.equal(construction.fill("weight"), pretrained)
    assert torch.equal(construction.fill("part"), pretrained[:2] * 0.5)
    pretrained.zero_()
    with pytest.raises(PacelineError) as caught:
        construction.fill("weight")
    assert (caught.value.code, "changed" in caught.value.saw) == ("PL458", True)


def test_weights_from_outside_that_the_factory_changes_itself() -> None:
    pretrained = torch.ones(4, 4)

    def build() -> nn.Module:
        model = Reading(lambda m: m.weight.data.copy_(pretrained))
        pretrained.mul_(2)
        model.other = nn.Parameter(pretrained + torch.zeros(4, 4))
        return model

    construction = construct(build, 0)
    assert torch.equal(construction.fill("weight"), torch.ones(4, 4))
    assert torch.equal(construction.fill("other"), torch.full((4, 4), 2.0))


def test_an_array_that_changes_under_a_tensor_is_refused() -> None:
    array = np.ones(4, np.float32)

    def build() -> nn.Module:
        model = Reading(lambda m: m.register_buffer("scale", torch.from_numpy(array)))
        array[:] += 1
        return model

    with pytest.raises(PacelineError, match="changes a numpy array"):
        construct(build, 0)


def test_a_factory_may_load_a_file() -> None:
    file = io.BytesIO()
    torch.save(OUTSIDE.state_dict(), file)

    def build() -> nn.Module:
        file.seek(0)
        model = nn.Linear(4, 4)
        model.load_state_dict(torch.load(file))
        return model

    construction = construct(build, 0)
    for name, tensor in OUTSIDE.state_dict().items():
        assert torch.equal(construction.fill(name), tensor)


def test_torch_is_left_as_it_was() -> None:
    sampler = nn.init._no_grad_trunc_normal_
    with pytest.raises(PacelineError):
        construct(lambda: Reading(lambda m: 1 / 0), 0)
    assert nn.init._no_grad_trunc_normal_ is sampler
    assert torch.empty(1).device.type == "cpu"
    assert torch.empty(1, device="meta").is_meta
