"""The estimated peaks are those of real steps, from an account of a forward that was half through."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from paceline.memory.account import Account
from paceline.memory.account_report import account_for
from paceline.memory.advice import estimate_need, list_remedies
from tests.memory.shortages import Net

WIDTH, DEPTH, ROWS = 32, 6, 8000
SHORT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."


class Recomputed(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def fall_short() -> Account:
    """Return the account of a forward that fails in one of its blocks."""
    net = Net(WIDTH, DEPTH)

    def fail(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise RuntimeError(SHORT)

    net.blocks[DEPTH // 2].up.register_forward_pre_hook(fail)
    x = torch.ones(ROWS, WIDTH)
    try:
        net(x)
    except RuntimeError as error:
        account = account_for(error, 0)
    assert account is not None
    return account


class Meter(TorchDispatchMode):
    """Counts the bytes of the results of operations, as long as they live.

    Attributes:
        most: at once so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in tree_leaves(args) if isinstance(one, Tensor)}
        for one in tree_leaves(results):
            if not isinstance(one, Tensor):
                continue
            storage = one.untyped_storage()
            address = storage.data_ptr()
            if address not in given and address not in self._sizes:
                self._sizes[address] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, address)
        self.most = max(self.most, sum(self._sizes.values()))
        return results


def measure(run: Callable[[], object]) -> int:
    """Return the most bytes of new tensors that a function has at once."""
    with Meter() as meter:
        run()
    return meter.most


@pytest.mark.parametrize(
    ("kind", "name", "share"),
    [
        (Net, "", 1.0),
        (Net, "microbatch", 0.5),
        (Recomputed, "recompute", 1.0),
        (Net, "bf16", 1.0),
    ],
)
def test_a_real_step_is_within_the_estimated_range(kind: type[Net], name: str, share: float) -> None:
    account = replace(fall_short(), limit=1, limit_kind="device")
    net, x = kind(WIDTH, DEPTH), torch.ones(int(ROWS * share), WIDTH)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if name == "bf16" else nullcontext():
            loss = net(x).float().square().mean()
        loss.backward()

    step()
    measured, need = measure(step), estimate_need(account)
    saves = next((one.saves for one in list_remedies(account) if one.name == name), 0)
    # What passes by is a part of all activations.
    least, most = need.total - saves - need.other, need.most - saves - need.other
    assert 0.75 * least <= measured <= most


def test_an_optimizer_step_that_needs_more_than_the_backward_is_the_peak() -> None:
    account = replace(fall_short(), limit_kind="device")
    model = replace(account.model, trained=10**9)
    large = replace(
        account, model=model, kinds={**account.kinds, "parameters": 10**9}, total=account.total + 10**9
    )
    assert estimate_need(large).total - estimate_need(account).other == pytest.approx(2 * 10**9, rel=0.01)
