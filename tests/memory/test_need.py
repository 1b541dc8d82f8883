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

from paceline.memory.account import Account, from_json, to_json
from paceline.memory.heap import Heap
from paceline.memory.need import Need, Setting, estimate_need, estimate_peak
from paceline.memory.operations import Forward, Operation, complete, find_blocks
from paceline.memory.report import account_for
from tests.memory.shortages import Net

WIDTH, DEPTH, ROWS = 32, 6, 8000
SHORT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."


class Recomputed(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def fall_short(outputs: int = 8, block: int = DEPTH // 2) -> Account:
    """Return the account of a forward that fails in one of its blocks."""
    net = Net(WIDTH, DEPTH, outputs)

    def fail(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise RuntimeError(SHORT)

    net.blocks[block].up.register_forward_pre_hook(fail)
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
    ("kind", "setting"),
    [
        (Net, Setting()),
        (Net, Setting(share=0.25)),
        (Recomputed, Setting(recomputes=True)),
        (Net, Setting(is_half=True)),
        (Net, Setting(has_graph=False)),
    ],
    ids=["as it is", "a quarter of the samples", "recomputed", "bf16", "no_grad"],
)
def test_the_estimated_peak_is_that_of_a_real_step(kind: type[Net], setting: Setting) -> None:
    account = from_json(to_json(fall_short()))
    peak = estimate_peak(account, setting)
    assert peak is not None
    net, x = kind(WIDTH, DEPTH), torch.ones(int(ROWS * setting.share), WIDTH)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if setting.is_half else nullcontext():
            loss = net(x).float().square().mean()
        if setting.has_graph:
            loss.backward()

    with nullcontext() if setting.has_graph else torch.no_grad():
        step()
        measured = measure(step)
    assert peak.num_bytes == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("has_graph", [True, False])
def test_a_first_block_that_reads_the_batch_stands_for_the_others(has_graph: bool) -> None:
    setting = Setting(has_graph=has_graph)
    early, later = (estimate_peak(fall_short(block=block), setting) for block in (1, 3))
    assert early is not None
    assert later is not None
    assert early.num_bytes == pytest.approx(later.num_bytes, rel=0.02)


def test_a_head_and_a_cross_entropy_that_were_not_reached_count() -> None:
    peak = estimate_peak(fall_short(outputs=500), Setting())
    assert peak is not None
    net, x, classes = Net(WIDTH, DEPTH, 500), torch.ones(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)

    def step() -> None:
        nn.functional.cross_entropy(net(x), classes).backward()

    step()
    assert peak.num_bytes == pytest.approx(measure(step), rel=0.05)


def test_a_block_that_is_half_through_is_completed_from_the_one_before() -> None:
    row = (Operation("Addmm", "blocks.0", 8, (), (0,)), Operation("Add", "blocks.0", 4, (0,)))
    first = Operation("Addmm", "blocks.1", 8, (1,), (1, 2))
    forward = Forward((*row, first))
    whole = complete(forward, "blocks", 3)
    assert whole is not None
    assert [one.num_bytes for one in whole.operations] == [8, 4] * 3
    assert find_blocks(whole, "blocks") == [(0, 1), (2, 3), (4, 5)]
    assert [one.inputs for one in whole.operations] == [(), (0,), (), (2,), (), (4,)]
    assert complete(Forward(row), "blocks", 3) is None


def test_a_heap_keeps_what_no_block_fits() -> None:
    heap = Heap()
    heap.allocate("raises the threshold", 1_000_000)
    heap.free("raises the threshold")
    assert heap.resident == 0
    for name in ("a", "b", "c"):
        heap.allocate(name, 300_000)
    heap.free("b")
    heap.allocate("larger", 400_000)
    assert heap.resident == 1_300_000
    heap.allocate("smaller", 200_000)
    assert heap.resident == 1_300_000
    for name in ("a", "c", "larger", "smaller"):
        heap.free(name)
    assert heap.resident < 2_000_000


def test_an_optimizer_step_that_needs_more_than_the_backward_is_the_peak() -> None:
    account = replace(fall_short(), keeps_pieces=False)
    model = replace(account.model, trained=10**9, optimizer="AdamW", largest_parameter=10**8)
    large = replace(
        account, model=model, kinds={**account.kinds, "parameters": 10**9}, total=account.total + 10**9
    )
    need = estimate_need(large)
    assert need.state == 2 * 10**9
    assert need.total - estimate_need(account).other == pytest.approx(2.2 * 10**9, rel=0.01)


def test_a_need_has_a_range() -> None:
    need = Need(activations=100, state=10, other=1, pieces=20, most_pieces=50, spread=5)
    assert (need.least, need.total, need.most) == (106, 131, 166)
    assert need.without_pieces().most == 116
