"""Tensors that several blocks take: their gradient is added up in one order, on any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.checkpoint import hash_tensors
from tests.dist.pool import Pool

WIDTH = 16
STEPS = 3


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random sequences of 5 ids, to be read and to be written."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(place)
        source, target = torch.randint(2, 31, (2, 5), generator=generator)
        return {"source": source, "target": target}


class Block(nn.Module):
    """Reads a memory, which it uses twice, as it does a bias; hands the bias on, or all it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor, passes: bool = False) -> tuple[Tensor, Tensor]:
        if passes:
            return x, bias
        scores = self.query(x) @ self.key(memory).transpose(1, 2) + bias + bias.square()
        return x + scores.softmax(-1) @ self.value(memory), bias


class Hidden:
    """An output that torch doesn't look into."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


class Readers(nn.Module):
    """Blocks that all read one memory and share one bias, and whose outputs are used at the end too.

    Args:
        drop: the probability that a microbatch leaves a block out.
        hides: whether the output is an object that torch doesn't look into.
        again: whether the model has its blocks computed again in backward, each by a backward of its own.
    """

    def __init__(self, drop: float = 0.0, hides: bool = False, again: bool = False) -> None:
        super().__init__()
        self.drop = drop
        self.hides = hides
        self.again = again
        self.embed = nn.Embedding(31, WIDTH)
        self.bias = nn.Parameter(torch.randn(5, 5))
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 31)

    def forward(self, source: Tensor, target: Tensor) -> Any:
        x, memory, bias = self.embed(target), self.embed(source).tanh(), self.bias.tanh()
        seen = [x]
        for block in self.blocks:
            passes = self.drop > 0.0 and bool(torch.rand(()) < self.drop)
            if self.again:
                x, bias = checkpoint(block, x, memory, bias, passes, use_reentrant=True)
            elif not passes or torch.rand(()) < 0.5:
                x, bias = block(x, memory, bias=bias, passes=passes)
            seen.append(x)
        hidden = x + seen[0] + seen[2].tanh() * seen[3]
        output = {"logits": self.head(hidden), "seen": [*seen, hidden, memory]}
        return Hidden(output) if self.hides else output


def readers_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    output = output.fields if isinstance(output, Hidden) else output
    extra = sum(each.square().mean() for each in output["seen"])
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), batch["target"].flatten()) + extra


def build_bart(drop: float) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=31,
            d_model=WIDTH,
            encoder_layers=2,
            decoder_layers=3,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=12,
            encoder_layerdrop=drop,
            decoder_layerdrop=drop,
        )
    )


def build_t5(drop: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=WIDTH, num_layers=3, num_heads=2, d_ff=24, d_kv=8, vocab_size=31)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


BUILDERS: dict[str, Callable[[float], nn.Module]] = {
    "readers": Readers,
    "hiding readers": lambda drop: Readers(drop, hides=True),
    "readers, again": lambda drop: Readers(drop, again=True),
    "bart": build_bart,
    "t5": build_t5,
}


def train(world: Any, layouts: list[str], kind: str, drop: float) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [train_in(layout, kind, drop) for layout in layouts]


def train_in(layout: str, kind: str, drop: float) -> dict[str, Any]:
    torch.manual_seed(0)
    own = "readers" in kind
    trainer = paceline.Trainer(
        BUILDERS[kind](drop),
        forward=(
            (lambda model, batch: model(**batch))
            if own
            else lambda model, batch: model(input_ids=batch["source"], labels=batch["target"]).loss
        ),
        loss=readers_loss if own else lambda output, batch: output,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        layout=layout,
        example={name: torch.ones(2, 5, dtype=torch.int64) for name in ("source", "target")},
        microbatch_size=2,
        reduction="exact",
    )
    found: dict[str, Any] = {"layout": layout, "losses": [], "norms": []}
    for share in trainer.loader(Samples(), global_batch_size=10):
        step = trainer.step(share)
        found["losses"].append(step.loss)
        found["norms"].append(step.grad_norm)
        if step.number == STEPS:
            break
    weights = trainer.whole_state()
    found["weights"] = hash_tensors(weights) if weights else ""
    trainer.close()
    return found


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in ("losses", "norms", "weights"):
        assert other[key] == one[key], (other["layout"], key, other[key], one[key])


@pytest.mark.parametrize("kind", ["readers", "hiding readers"])
@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_blocks_that_read_one_memory(ranks: Pool, kind: str, drop: float) -> None:
    ((one,),) = ranks.run(train, 1, ([""], kind, drop))
    layouts = ["dp_replicate=2", "dp_shard=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2"]
    layouts += ["dp_shard=2 recompute=block", "dp_shard=2 recompute=selective"]
    for other in ranks.run(train, 2, (layouts, kind, drop), timeout_s=120)[0]:
        assert_same_bits(one, other)


def test_a_backward_inside_of_backward(ranks: Pool) -> None:
    ((one,),) = ranks.run(train, 1, ([""], "readers, again", 0.0))
    for other in ranks.run(train, 2, (["dp_shard=2", "dp_shard=2 zero=1"], "readers, again", 0.0))[0]:
        assert_same_bits(one, other)


def test_beside_tp(ranks: Pool) -> None:
    ((one,), _) = ranks.run(train, 2, (["tp=2"], "readers", 0.0))
    layouts = ["dp_replicate=2 tp=2", "dp_shard=2 tp=2", "dp_shard=2 tp=2 recompute=block"]
    for other in ranks.run(train, 4, (layouts, "readers", 0.0), timeout_s=120)[0]:
        assert_same_bits(one, other)


@pytest.mark.parametrize(("kind", "drop"), [("bart", 0.0), ("bart", 0.4), ("t5", 0.0)])
def test_encoder_decoders_of_others(ranks: Pool, kind: str, drop: float) -> None:
    ((one,),) = ranks.run(train, 1, ([""], kind, drop), timeout_s=120)
    layouts = ["dp_shard=2", "dp_shard=2 zero=1"]
    layouts += ["dp_shard=2 recompute=block"] if kind == "bart" else []
    for other in ranks.run(train, 2, (layouts, kind, drop), timeout_s=120)[0]:
        assert_same_bits(one, other)
