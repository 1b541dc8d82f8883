"""Mixtures of experts under cp: they get whole sequences, and ep also divides the ranks of cp."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import PacelineError
from paceline.recipe import parse_recipe
from paceline.verifying.check import resolve_layout
from tests.dist.pool import Pool
from tests.train.test_expert_lists import LOOPS, WIDTH, Ids, Model, build_trainer
from tests.train.test_experts import recipe_table, train_foreign
from tests.verifying.runs import PoolRunner, verify_recipe


@pytest.mark.parametrize(
    "texts",
    [
        ["cp=2 ep=2"],
        pytest.param(["cp=2 cp_by=gather", "cp=2 ep=2 recompute=block"], marks=pytest.mark.slow),
        pytest.param(["cp=2 dp_replicate=2 ep=4", "dp_shard=2 cp=2 ep=2"], marks=pytest.mark.slow),
        pytest.param(["pp=2 cp=2 ep=2", "cp=2 tp=2 ep=2 cp_by=gather"], marks=pytest.mark.slow),
        pytest.param(["dp_shard=2 cp=2 ep=4 cp_by=gather"], marks=pytest.mark.slow),
    ],
    ids=lambda texts: texts[0],
)
def test_a_mixture_gets_whole_sequences(ranks: Pool, tmp_path: Path, texts: list[str]) -> None:
    recipe = parse_recipe(recipe_table(tmp_path))
    layouts = [resolve_layout(text) for text in texts]
    verified = verify_recipe(recipe, layouts, steps=2, run=PoolRunner(ranks))
    assert {result.status for result in verified.results} == {"ok"}, list(map(str, verified.findings))
    assert max(result.worst for result in verified.results) < 0.1
    for text, result in zip(texts, verified.results, strict=True):
        # By gather, dropout in attention is computed by other products.
        assert result.forward_bits or "tp=" in text or "gather" in text, text


@pytest.mark.parametrize("text", ["cp=2 dp_replicate=2 ep=4", "cp=4 ep=2 cp_by=gather"])
@pytest.mark.slow
def test_ranks_may_be_without_tokens(ranks: Pool, tmp_path: Path, text: str) -> None:
    """6 microbatches on 2 data ranks or 1, with a bias that the counts move."""
    table = recipe_table(tmp_path)
    table["train"] |= {"microbatch_size": 3, "global_batch_size": 9}
    table["model"] |= {"balance": "bias"}
    verified = verify_recipe(parse_recipe(table), [resolve_layout(text)], steps=2, run=PoolRunner(ranks))
    assert verified.ok, list(map(str, verified.findings))


BY_HEADS = ("cp=2", "dp_replicate=2 cp=2 ep=4", "cp=2 tp=2 ep=2 cp_by=gather")
BY_GATHER = ("cp=2 ep=2 cp_by=gather", "dp_shard=2 cp=2 ep=4 cp_by=gather")
# OLMoE has a norm over all heads. cp does not divide the attention of DeepSeek-V3 and gpt-oss.
FOREIGN = {"Mixtral": BY_HEADS, "Qwen3Moe": BY_HEADS, "Olmoe": BY_GATHER}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOREIGN)
def test_mixtures_of_transformers_get_whole_sequences(ranks: Pool, kind: str) -> None:
    """Their norms and routers compute in fp32, so the numbers are those of fp64 up to that."""
    pytest.importorskip("transformers", reason="these models are those of transformers")
    [(alone, _)] = ranks.run(train_foreign, 1, (kind, "", torch.float64))
    for layout in FOREIGN[kind]:
        for found, _ in ranks.run(
            train_foreign, resolve_layout(layout).num_ranks, (kind, layout, torch.float64)
        ):
            for one, other in zip(alone, found, strict=True):
                assert other == pytest.approx(one, rel=1e-6), layout


class Block(nn.Module):
    """Attention and a mixture whose experts are in a list; scores for a loss leave it besides the stream."""

    def __init__(self, loop: str) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), LOOPS[loop]()
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        parts = self.inward(x).split(WIDTH, dim=-1)
        heads = [part.view(*x.shape[:2], 4, WIDTH // 4).transpose(1, 2) for part in parts]
        found = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.outward(found.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attend(x)
        mixed, scores = self.mixture(self.norm(x))
        return x + mixed, balance + scores.square().mean()


class Attending(Model):
    def __init__(self, loop: str, block: type[nn.Module] = Block) -> None:
        super().__init__(loop)
        self.blocks = nn.ModuleList(block(loop) for _ in range(2))
        del self.mixtures, self.norms

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.embed(ids), torch.zeros(())
        for block in self.blocks:
            x, balance = block(x, balance)
        return self.head(x), balance


def train_loop(world: Any, loop: str, layout: str) -> Any:
    example = {"ids": torch.stack([Ids()[n]["ids"] for n in range(2)])}
    model = Attending(loop)
    model.config = SimpleNamespace(use_cache=True)
    trainer = build_trainer(model, layout, "fp64", clip_norm=0.5, example=example)
    assert model.config.use_cache is (layout == ""), "a cache would hold the keys of some heads"
    steps = [trainer.step(share) for share in trainer.loader(Ids(), global_batch_size=8)]
    trainer.close()
    return [(step.loss, step.grad_norm) for step in steps]


@pytest.mark.parametrize("layout", ["cp=2", "cp=2 dp_replicate=2 cp_by=gather"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_gets_whole_sequences(ranks: Pool, loop: str, layout: str) -> None:
    """The inputs of the auxiliary loss stay whole, with or without a dimension of positions."""
    alone = ranks.run(train_loop, 1, (loop, ""))[0]
    for found in ranks.run(train_loop, resolve_layout(layout).num_ranks, (loop, layout)):
        for one, other in zip(alone, found, strict=True):
            # Two of the loops take the softmax in fp32.
            assert other == pytest.approx(one, rel=1e-6)


class InOne(Block):
    """The block itself has the router and the experts."""

    def __init__(self, loop: str) -> None:
        super().__init__(loop)
        self.gate, self.experts = self.mixture.gate, self.mixture.experts
        del self.mixture

    def forward(self, x: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attend(x)
        tokens = self.norm(x)
        weights, chosen = self.gate(tokens).softmax(-1).topk(1, dim=-1)
        found = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            found = found + torch.where(chosen == number, weights, 0.0) * expert(tokens)
        return x + found, balance


def refuse_block(world: Any) -> str:
    example = {"ids": torch.zeros(2, 8, dtype=torch.int64)}
    with pytest.raises(PacelineError) as caught:
        build_trainer(Attending("OnlyHit", InOne), "cp=2", "fp64", example=example)
    return str(caught.value)


def test_a_mixture_beside_attention_is_refused(ranks: Pool) -> None:
    for found in ranks.run(refuse_block, 2):
        assert "PL630" in found
        assert "blocks.0 itself, beside attention" in found
        assert "module of their own" in found
