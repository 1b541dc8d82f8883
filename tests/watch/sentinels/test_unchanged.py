"""A script under observation keeps its numbers, its errors, its warnings and its collectives."""

from __future__ import annotations

import copy
import gc
import io
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_module
from torch.utils.data import DataLoader, Dataset, TensorDataset, dataloader

from paceline.watch.rank.first_not_finite import Gradients
from paceline.watch.rank.sentinels.passes import Passes
from paceline.watch.rank.sentinels.sentinels import Sentinels

TRAINED = 80


@contextmanager
def observed() -> Iterator[Sentinels]:
    gradients = Gradients()
    sentinels = Sentinels(gradients, lambda: 0)
    gradients.install(torch)
    sentinels.install(torch)
    try:
        yield sentinels
    finally:
        sentinels.end()
        gradients.remove()


def train(num_steps: int = TRAINED) -> nn.Module:
    torch.manual_seed(0)
    gc.collect()  # the parameters of models that are gone are followed no longer
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(num_steps, 8)), shuffle=True)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    return model


def test_weights_and_random_numbers_are_the_same() -> None:
    alone, state = train(), torch.get_rng_state()
    with observed() as sentinels:
        seen = train()
        assert torch.equal(torch.get_rng_state(), state)
    assert sentinels.error is None
    for one, other in zip(alone.parameters(), seen.parameters(), strict=True):
        assert torch.equal(one, other)


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise ValueError("no such sample")


def load_broken() -> None:
    for _ in DataLoader(Broken()):
        pass


def save_nowhere() -> None:
    torch.save({}, "/nowhere/at/all.pt")


def load_nothing() -> None:
    torch.load("/nowhere/at/all.pt")


def set_no_state() -> None:
    torch.set_rng_state("none")  # type: ignore[arg-type]


@pytest.mark.parametrize("fails", [load_broken, save_nowhere, load_nothing, set_no_state])
def test_tracebacks_are_the_same(fails: Callable[[], None]) -> None:
    def trace() -> list[str]:
        try:
            fails()
        except Exception:
            # Without the line of this function.
            return traceback.format_exc().splitlines()[3:]
        raise AssertionError

    alone = trace()
    with observed():
        assert trace() == alone


def test_warnings_have_the_same_line() -> None:
    def warn() -> list[tuple[str, int]]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in DataLoader([1.0], pin_memory=True):
                pass
        return [(one.filename, one.lineno) for one in found]

    alone = warn()
    with observed():
        assert warn() == alone


def test_a_model_is_copied_and_saved_without_hooks() -> None:
    alone = train(4)
    with observed():
        seen = train(4)
        copied = copy.deepcopy(seen)
        saved, plain = io.BytesIO(), io.BytesIO()
        torch.save(copied, saved)
        torch.save(alone, plain)
        assert len(saved.getvalue()) == len(plain.getvalue())


def test_between_looks_everything_is_off() -> None:
    whole = dataloader._BaseDataLoaderIter.__next__
    hooks = optimizer_module._global_optimizer_pre_hooks
    num_hooks = len(hooks)
    with observed():
        train(60)
        assert dataloader._BaseDataLoaderIter.__next__ is not whole
        train(10)
        assert dataloader._BaseDataLoaderIter.__next__ is whole
        train(512 - 70 + 1)
        assert dataloader._BaseDataLoaderIter.__next__ is not whole
        train(20)
        assert dataloader._BaseDataLoaderIter.__next__ is whole
    assert dataloader._BaseDataLoaderIter.__next__ is whole
    assert len(hooks) == num_hooks


def count_collectives(world: Any, is_observed: bool) -> int:
    from tests.watch.sentinels.healthy import HEALTHY

    with observed() if is_observed else warnings.catch_warnings():
        HEALTHY["plain"]()
    return int(torch.distributed.group.WORLD._get_sequence_number_for_group())


def test_collectives_are_the_same(ranks: Any) -> None:
    alone = ranks.run(count_collectives, nproc=2, args=(False,))
    assert ranks.run(count_collectives, nproc=2, args=(True,)) == alone


@pytest.mark.parametrize("method", ["note_gradient", "before_step", "after_step"])
def test_an_error_of_ours_ends_the_observation_alone(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(Passes, method, fail)
    whole = dataloader._BaseDataLoaderIter.__next__
    later: list[object] = []
    with observed() as sentinels:
        # torch goes through all hooks, so none may be taken off by another.
        hooks = [
            optimizer_module.register_optimizer_step_pre_hook(lambda *given: later.append(given)),
            optimizer_module.register_optimizer_step_post_hook(lambda *given: later.append(given)),
        ]
        try:
            train(4)
        finally:
            for hook in hooks:
                hook.remove()
        assert len(later) == 8
        assert str(sentinels.error) == "ours"
        assert dataloader._BaseDataLoaderIter.__next__ is whole
        assert sentinels.collect() == ()
