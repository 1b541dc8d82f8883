"""Models whose sequences cp cannot divide are refused by name, and what they compute elsewhere is not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.parallel.context.find import find_context_plan
from paceline.recipe import Layout, parse_recipe
from paceline.recipe.legal import Rules

LENGTH = 12


class Attend(nn.Module):
    """Attention of four heads, written plainly."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (y.view(batch, length, 4, 8).transpose(1, 2) for y in self.qkv(x).split(32, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, 32))
        return result


class Block(nn.Module):
    """Attention and what a test puts behind it."""

    def __init__(self, then: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend, self.norm = Attend(), nn.LayerNorm(32)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(32))
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        return self.then(self, x)


class Model(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, then: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.blocks = nn.ModuleList(Block(then) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def _plain(_block: Block, x: Tensor) -> Tensor:
    return x


def _convolve(block: Block, x: Tensor) -> Tensor:
    return x + block.conv(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


def _positions(_block: Block, x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1])[None, :, None]


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "convolution along the sequence": (_convolve, "convolution in blocks.0.conv"),
    "scan along the sequence": (lambda _, x: x.cumsum(1), "cumsum in blocks.0"),
    "pooling inside a block": (lambda _, x: x + x.mean(1, keepdim=True), "mean in blocks.0"),
    "a norm over positions": (lambda _, x: x.softmax(1), "_softmax in blocks.0"),
    "a shift by one position": (lambda _, x: x + x.roll(1, 1), "roll in blocks.0"),
    "the last position alone": (lambda _, x: x + x[:, -1:], "slice in blocks.0"),
    "a shorter sequence": (lambda _, x: x[:, ::2], "slice in blocks.0"),
    "positions mixed by a product": (lambda _, x: x + (x @ x.transpose(1, 2)) @ x, "heads"),
    "positions counted on the rank": (_positions, "add in blocks.0 does not run"),
    "sequence mixed with the batch": (
        lambda _, x: x + x.flatten(0, 1).flip(0).view_as(x),
        "flip in blocks.0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_combines_positions_is_refused_by_name(name: str) -> None:
    then, word = REFUSED[name]
    model, ids = Model(then), torch.zeros(2, LENGTH, dtype=torch.int64)
    with pytest.raises(PacelineError) as caught:
        find_context_plan(model, lambda m: m(ids), 2)
    assert caught.value.code == "PL630"
    assert word in str(caught.value), str(caught.value)


def test_the_plain_model_is_divided() -> None:
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    plan = find_context_plan(Model(_plain), lambda m: m(ids), 2)
    assert [(s.first, s.last) for s in plan.stretches] == [("blocks.0", "blocks.1")]
    assert [(c.module, c.kind) for c in plan.crossings[:2]] == [
        ("blocks.0.attend.qkv", "to_heads"),
        ("blocks.0.attend.out", "to_rows"),
    ]
    assert "blocks.0.norm.weight" in plan.partial
    assert "head.weight" not in plan.partial


class ReturnsHidden(Model):
    """Returns what its first block returned."""

    def forward(self, ids: Tensor) -> Tensor:
        first = self.blocks[0](self.embed(ids))
        return (self.head(self.blocks[1](first)), first)  # type: ignore[return-value]


class SharesWeight(Model):
    """Uses a weight of its blocks outside of them."""

    def forward(self, ids: Tensor) -> Tensor:
        block = self.blocks[0]
        assert isinstance(block, Block)
        x = self.embed(ids)
        for each in self.blocks:
            x = each(x)
        result: Tensor = block.norm(self.head.weight[0] + x)
        return result


class SharesAttention(Model):
    """Calls one attention in two blocks, between which the sequence is whole."""

    def forward(self, ids: Tensor) -> Tensor:
        self.blocks[1].attend = self.blocks[0].attend
        x = self.blocks[0](self.embed(ids)).cumsum(1)
        result: Tensor = self.head(self.blocks[1](x))
        return result


@pytest.mark.parametrize(
    ("kind", "num_ranks", "word"),
    [
        (SharesAttention, 2, "blocks.0.attend"),
        (ReturnsHidden, 2, "returns a tensor from inside of its blocks"),
        (SharesWeight, 2, "blocks.0.norm.weight is used on parts of the sequence and"),
        (Model, 3, "heads 4"),
    ],
)
def test_what_leaves_the_blocks_is_refused(kind: type[Model], num_ranks: int, word: str) -> None:
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    with pytest.raises(PacelineError) as caught:
        find_context_plan(kind(_plain), lambda m: m(ids), num_ranks)
    assert caught.value.code == "PL630"
    assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention"])
@pytest.mark.parametrize("by", ["heads", "gather"])
def test_kernels_that_cannot_be_traced_are_refused(kernel: str, by: str) -> None:
    model, ids = Model(_plain), torch.zeros(2, LENGTH, dtype=torch.int64)
    model.config = SimpleNamespace(_attn_implementation=kernel)  # as models of transformers have it
    with pytest.raises(PacelineError) as caught:
        find_context_plan(model, lambda m: m(ids), 2, by=by)
    assert caught.value.code == "PL640"
    assert f'attn_implementation="{kernel}"' in str(caught.value)
    assert 'attn_implementation="sdpa"' in caught.value.fix


RECIPE = {
    "model": {"kind": "gpt", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2},
    "data": {"kind": "text", "files": ["python-stdlib"], "seq_len": 16},
    "train": {"steps": 1, "global_batch_size": 8, "microbatch_size": 2},
}


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        ("cp=4 cp_by=heads", "PL632", "model.kv_heads=2"),
        ("cp=32", "PL631", "data.seq_len=16"),
        ("cp=2 tp=2 cp_by=heads", "PL632", "layout.cp=2 with layout.tp=2"),
        ("cp=2 sequence=true", "PL492", "layout.sequence=true"),
    ],
)
def test_layouts_are_refused_before_ranks_start(text: str, code: str, word: str) -> None:
    layout = Layout.parse(text).close()
    problems = Rules.of(parse_recipe(RECIPE)).check(layout, layout.num_ranks)
    found = [problem for problem in problems if problem.code == code]
    assert any(word in problem.saw for problem in found), problems
