"""An account covers all that lives in a process, each storage once, and unpacks nothing that is packed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.memory.account import Account
from paceline.memory.account_report import account_for, account_of_thread, read_account, write_account
from paceline.memory.holders import read_variables
from paceline.memory.limits import Use
from paceline.memory.torch_errors import find_request, is_out_of_memory
from tests.memory.shortages import Net

SHORT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"


class Ends(nn.Module):
    """The place where memory runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(f"[enforce fail at alloc_cpu.cpp:121] {SHORT}")


def take(run: Callable[[], Any]) -> Account:
    gc.collect()
    try:
        run()
    except RuntimeError as error:
        account = account_for(error, 3)
    assert account is not None
    return account


def test_each_saved_storage_counts_once() -> None:
    net, end = Net(width=32, depth=3), Ends()
    model = nn.Sequential(net, end)
    x = torch.ones(1000, 32)

    def run() -> None:
        model(x)

    account = take(run)
    # Per block: the input and the norm's output (32 each), two of the width of 128, and small statistics;
    # the input of the first block is the batch. Of the head: its input and its output.
    row = 4 * 1000
    wanted = row * (3 * (32 + 32 + 128 + 128 + 2) - 32 + 32)
    assert account.get("activations") == pytest.approx(wanted, rel=0.05)
    names = {module.name for module in account.modules}
    assert {"0.blocks.0.up", "0.blocks.1.down"} <= names, names
    assert account.progress.module == "1"
    assert account.progress.phase == "forward"
    assert account.kinds["parameters"] >= sum(p.numel() * 4 for p in model.parameters())
    assert account.get("request") == 4096
    assert account.rank == 3


def test_the_loss_of_the_step_before_is_not_the_running_forward() -> None:
    """Its graph uses all parameters, also those that the forward has not reached."""
    net = Net(width=32, depth=8)
    half = len(net.blocks) // 2

    def fail(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs[0]) > 10:
            raise RuntimeError(f"[enforce fail at alloc_cpu.cpp:121] {SHORT}")

    net.blocks[half].register_forward_pre_hook(fail)

    def run() -> None:
        for rows in (10, 1000):
            loss = net(torch.ones(rows, 32)).mean()
            loss.backward()

    account = take(run)
    assert account.progress.phase == "forward"
    assert account.progress.reached == pytest.approx(0.5, abs=0.05)


def test_nothing_is_computed_again_for_an_account() -> None:
    calls = []

    def block(x: Tensor) -> Tensor:
        calls.append(1)
        return (x * 2).exp()

    x = torch.ones(1000, requires_grad=True)

    def run() -> None:
        y = checkpoint(block, x, use_reentrant=False)
        Ends()(y)

    take(run)
    assert calls == [1]


def test_tensors_that_hooks_have_packed_are_counted_as_packed() -> None:
    x = torch.ones(1_000_000, requires_grad=True)

    def unpack(packed: tuple[str, Tensor]) -> Tensor:
        raise AssertionError("it was unpacked")

    def run() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: ("half", t.half()), unpack):
            y = x.exp()
            y = y * 2
        Ends()(y)

    account = take(run)
    # exp's result in fp16, and the product.
    assert account.get("activations") == pytest.approx(2_000_000 + 4_000_000, rel=0.05)
    assert sys.gettrace() is None or "coverage" in str(sys.gettrace())


def test_functions_of_ones_own_are_read() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x * 2)
            ctx.other = x * 3
            return x * 4

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    x = torch.ones(250_000, requires_grad=True)

    def run() -> None:
        Ends()(Keeps.apply(x))

    assert take(run).get("activations") == pytest.approx(3_000_000, rel=0.02)


def test_variables_are_read_without_keeping_them() -> None:
    tensor: Tensor | None = torch.ones(10)
    frame = sys._getframe()
    assert read_variables(frame)["tensor"] is tensor
    number = sys.getrefcount(tensor)
    read_variables(frame)
    assert sys.getrefcount(tensor) == number
    tensor = None
    assert read_variables(frame)["tensor"] is None


def test_what_a_forward_holds_without_a_graph_belongs_to_its_module() -> None:
    model = nn.Sequential(Net(width=32, depth=3), Ends())

    class Widens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            wide = x.repeat(1, 10)
            return self.inner(wide[:, :32])

    outer, x = Widens(), torch.ones(1000, 32)

    def run() -> None:
        with torch.no_grad():
            outer(x)

    account = take(run)
    assert account.get("activations") == pytest.approx(1_280_000 + 128_000, rel=0.1)
    assert account.modules[0].name == ""
    assert [one.shape for one in account.batch] == [(1000, 32)]
    assert not account.progress.has_graph


def test_an_account_survives_its_journey(tmp_path: Path) -> None:
    model, x = nn.Sequential(Net(), Ends()), torch.ones(100, 64)
    losses: list[Tensor] = []

    def run() -> None:
        losses.extend(model[0](x).mean() for _ in range(3))
        model(x)

    account = take(run)
    assert account.holders[0].graphs == 2
    write_account(tmp_path / "account", account)
    assert read_account(tmp_path / "account") == account


def test_an_account_of_a_thread_that_goes_on() -> None:
    import threading

    kept: list[Tensor] = []
    is_full, may_end = threading.Event(), threading.Event()

    def work() -> None:
        outputs = [torch.ones(500_000) for _ in range(4)]
        kept.extend(outputs[:0])
        is_full.set()
        may_end.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert is_full.wait(30)
    account = account_of_thread(thread.ident or 0, 1, Use("cgroup", 10**9, 9 * 10**8))
    may_end.set()
    thread.join()
    assert account is not None
    assert account.get("kept") == 8_000_000
    assert account.holders[0].variable == "outputs"
    assert "test_walk.py" in account.holders[0].place


@pytest.mark.parametrize(
    ("error", "request_bytes"),
    [
        (RuntimeError(SHORT), 4096),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), 2_684_354_560),
        (MemoryError("no"), 0),
    ],
)
def test_errors_are_recognised(error: Exception, request_bytes: int) -> None:
    assert is_out_of_memory(error)
    assert find_request(error) == request_bytes


def test_other_errors_have_no_account() -> None:
    assert account_for(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 0) is None


def test_an_error_of_a_gpu_that_is_not_there_is_explained_from_the_tensors() -> None:
    def run() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    assert take(run).get("request") == 2_684_354_560
