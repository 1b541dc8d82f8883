"""A constructed model gets its values and stays the model that the factory built."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from paceline.parallel.construct.build import construct
from paceline.parallel.construct.record import StorageWindow
from paceline.parallel.construct.values import place_values
from tests.parallel.test_construct import MODULES, Constants, Factory, build_several, build_tied, read_tensors


def seeded(factory: Factory) -> Factory:
    def build() -> nn.Module:
        torch.manual_seed(7)
        return factory()

    return build


@pytest.mark.parametrize("name", ["views", "lstm", "transformer", "weight_norm", "tied"])
def test_gives_the_eager_model(name: str) -> None:
    factory = seeded(MODULES[name])
    with torch.random.fork_rng():
        eager = factory()
    construction = construct(factory, 0)
    before = {key: id(tensor) for key, tensor in read_tensors(construction.model).items()}
    model = place_values(construction)
    tensors = read_tensors(model)
    for key, tensor in read_tensors(eager).items():
        assert torch.equal(tensor, tensors[key]), key
        assert (tensor.requires_grad, type(tensor)) == (tensors[key].requires_grad, type(tensors[key]))
        assert (id(tensors[key]) == before[key]) == (name != "lstm")  # which holds weak references


def test_ties_lists_attributes_and_hooks_stay() -> None:
    calls: list[str] = []

    def build() -> nn.Module:
        model = nn.ModuleDict({"tied": build_tied(), "lstm": nn.LSTM(4, 4)})
        weight = model["tied"][0].weight
        weight.no_decay = True
        weight.register_hook(lambda grad: calls.append("hook"))
        weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
        return model

    model = place_values(construct(build, 0))
    weight = model["tied"][0].weight
    assert weight is model["tied"][1].weight
    assert weight.no_decay
    assert all(a is b for a, b in zip(model["lstm"]._flat_weights, model["lstm"].parameters(), strict=True))
    model["tied"](torch.tensor([1])).sum().backward()
    assert calls == ["hook", "accumulated"]
    model["lstm"](torch.randn(2, 1, 4))[0].sum().backward()
    assert model["lstm"].weight_hh_l0.grad is not None


def test_parameters_over_the_same_bytes_share_them() -> None:
    def build() -> nn.Module:
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        model[1].weight = nn.Parameter(model[0].weight.data)
        return model

    model = place_values(construct(build, 0))
    assert model[0].weight is not model[1].weight
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()


def test_a_weak_reference_is_no_obstacle() -> None:
    construction = construct(build_tied, 0)
    weak = weakref.ref(construction.model[0].weight)
    model = place_values(construction)
    assert weak is not None
    assert model[0].weight.device.type == "cpu"
    assert model[0].weight is model[1].weight


def test_a_cut_keeps_only_its_part() -> None:
    construction = construct(build_several, 1)
    whole = {name: construction.fill(name) for name in construction.names}
    model = place_values(construction, cut=lambda name, value: value[:1] if value.dim() else value)
    for name, tensor in read_tensors(model).items():
        expected = whole[name][:1] if whole[name].dim() else whole[name]
        assert torch.equal(tensor, expected)
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_a_window_reports_bytes_apart() -> None:
    construction = construct(Constants, 1)
    window = construction.windows["steps"]
    assert isinstance(window, StorageWindow)
    assert window != construction.windows["full"]
    assert window.num_bytes == 20
