"""Compiled blocks draw the same masks as eager ones, without a graph break or compiling each anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.parallel.dropout.replacements import Masks, apply_dropout
from paceline.parallel.dropout.scope import compiled
from paceline.parallel.recompute import apply_recompute

# The compiler looks at the .grad of its inputs, and hides torch's warning in a way that "error" defeats.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

BATCH, SEQ, HIDDEN = 4, 6, 16


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        p = 0.3 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.dropout(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.ffn = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.ffn(x + self.attention(x)), 0.1, self.training)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.layers = nn.ModuleList(Block() for _ in range(10))  # more than torch compiles one function for
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def take_step(model: Model, masks: Masks) -> list[Tensor]:
    x = torch.randn(BATCH, SEQ, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model.zero_grad()
    with masks.drawing(3, range(BATCH)):
        y = model(x.requires_grad_())
        y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


def compile_blocks(model: Model, backend: object, fullgraph: bool = True) -> None:
    for layer in model.layers:
        call = layer._call_impl

        def forward(*args: object, call: object = call) -> object:
            return call(*args)  # type: ignore[operator]

        function = torch.compile(forward, backend=backend, fullgraph=fullgraph)
        layer._compiled_call_impl = compiled(layer, function)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_draw_as_eager_ones(recompute: bool) -> None:
    torch.manual_seed(0)
    model = Model().double()
    masks = apply_dropout(model)
    eager = take_step(model, masks)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compile_blocks(model, counter)
    model.recompute = recompute
    for _ in range(2):
        for a, b in zip(take_step(model, masks), eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert counter.frame_count == 1
    model.eval()
    with torch.no_grad():
        model(torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64))  # no masks are drawn, none are needed


@pytest.mark.parametrize("kind", ["block", "selective"])
def test_recompute_by_hooks_within_compiled_blocks(kind: str) -> None:
    """As `parallel/order.py` does it: recompute first, then compiling; torch's hooks break the graph."""
    torch.manual_seed(0)
    model = Model().double()
    model.layers = model.layers[:3]
    masks = apply_dropout(model)
    eager = take_step(model, masks)
    apply_recompute(model, [(f"layers.{i}", block) for i, block in enumerate(model.layers)], kind)
    compile_blocks(model, "aot_eager", fullgraph=False)
    for a, b in zip(take_step(model, masks), eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_blocks_that_run_eagerly_after_all_draw_the_same() -> None:
    """As while operations are counted, and past the compiler's limit of compilations."""
    model = Model().double()
    masks = apply_dropout(model)
    eager = take_step(model, masks)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compile_blocks(model, counter, fullgraph=False)  # torch 2.12 warns where nothing is compiled
    keys: list[str] = []
    masks.on_draw = lambda key, _x, _y: keys.append(key)
    with torch.compiler.set_stance("force_eager"):
        for a, b in zip(take_step(model, masks), eager, strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 0
    assert keys[-1] == "layers.9/dropout#0"


@pytest.mark.parametrize("recompute", [False, True])
def test_a_whole_compiled_model(recompute: bool) -> None:
    torch.manual_seed(0)
    model = Model().double()
    model.layers = model.layers[:2]
    masks = apply_dropout(model)
    eager = take_step(model, masks)
    model.recompute = recompute
    # A block to recompute inside of a graph may have no effects, such as counts: there the graph ends.
    model.compile(backend="aot_eager", fullgraph=not recompute)
    for a, b in zip(take_step(model, masks), eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_channel_dropout_breaks_the_graph_and_is_right() -> None:
    model = nn.Sequential(nn.Conv1d(3, 8, 1), nn.Dropout1d(0.5), nn.AlphaDropout(0.3)).double()
    masks = apply_dropout(model)
    x = torch.randn(BATCH, 3, 5, dtype=torch.float64)
    with masks.drawing(1, range(BATCH)):
        eager = model(x)
    function = torch.compile(lambda x: model(x), backend="aot_eager")
    with masks.drawing(1, range(BATCH)):
        torch.testing.assert_close(function(x), eager)
    with (
        masks.drawing(1, range(BATCH)),
        pytest.raises(torch._dynamo.exc.Unsupported),
    ):
        torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)(x)
