"""The second forward of recompute computes what the first one did, or an error says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.checkpoint import hash_tensors
from tests.dist.pool import Pool
from tests.train.test_layouts import Tokens

KINDS = ["block", "selective"]


def build_t5(use_cache: bool, attention: str = "sdpa") -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.2,
        decoder_start_token_id=0,
        use_cache=use_cache,
        attn_implementation=attention,
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


class Block(nn.Module):
    """Attention whose scores are changed in place in one of several ways."""

    def __init__(self, change: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.mixed = nn.Linear(16, 48)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)
        changed = self.change(scores)
        scores = scores if changed is None else changed
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Small(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Block(change) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.table.weight.T


def mask(scores: Tensor) -> None:
    scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)


def scale(scores: Tensor) -> None:
    scores *= 0.5


_LENGTHS = [1]


def count(scores: Tensor) -> Tensor:
    """Use state outside of the block, which grows with every forward."""
    _LENGTHS[0] += 1
    return scores + (scores.mean() * torch.ones(_LENGTHS[0])).exp().mean()


def train(layout: str, build: Callable[[], nn.Module]) -> tuple[list[float], str]:
    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        if hasattr(model, "generate"):
            return model(input_ids=ids, decoder_input_ids=ids[:, :-1]).logits
        return model(ids[:, :-1])

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> Any:
        losses = F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="sum")
        return losses, torch.tensor(8.0 * len(logits))

    trainer = paceline.Trainer(
        build,
        forward=forward,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        layout=layout,
        example={"ids": torch.zeros(2, 9, dtype=torch.int64)},
        microbatch_size=2,
    )
    losses = []
    try:
        for share in trainer.loader(Tokens(), global_batch_size=6):
            losses.append(trainer.step(share).loss)
            if len(losses) == 3:
                break
        weights = trainer.whole_state()
    finally:
        trainer.close()
    return losses, hash_tensors(weights) if weights else ""


def train_t5(world: Any, layouts: list[str]) -> list[tuple[list[float], str]]:
    found = []
    for layout in layouts:
        # Without recompute the cache stays, and changes last bits.
        found.append(train(layout, lambda layout=layout: build_t5(use_cache="recompute" in layout)))
    return found


def test_a_model_with_a_cache_and_dropout_in_attention(ranks: Pool) -> None:
    (one,) = ranks.run(train_t5, 1, (["", *[f"recompute={kind}" for kind in KINDS]],), timeout_s=90)
    assert one == [one[0]] * 3
    sharded = ranks.run(train_t5, 2, (["dp_shard=2 recompute=block", "dp_shard=2 recompute=selective"],))
    assert sharded[0] == [one[0]] * 2


def train_small(world: Any, change: Callable[[Tensor], Tensor | None], kinds: list[str]) -> list[Any]:
    return [train(kind and f"recompute={kind}", lambda: Small(change)) for kind in ["", *kinds]]


@pytest.mark.parametrize(("change", "kinds"), [(mask, KINDS), (scale, ["block"])])
def test_changes_in_place_that_stay_right(ranks: Pool, change: Any, kinds: list[str]) -> None:
    (found,) = ranks.run(train_small, 1, (change, kinds))
    assert found == [found[0]] * (1 + len(kinds))


def refuse(world: Any, change: Callable[[Tensor], Tensor | None], kind: str) -> str:
    with pytest.raises(paceline.PacelineError) as raised:
        train(f"recompute={kind}", lambda: Small(change))
    return str(raised.value)


def test_a_kept_result_that_is_changed_is_refused(ranks: Pool) -> None:
    (message,) = ranks.run(refuse, 1, (scale, "selective"))
    assert message.startswith("mul_ changes a tensor in place.")
    assert message.endswith("[PL438]")


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_does_something_else_the_second_time_is_refused(ranks: Pool, kind: str) -> None:
    (message,) = ranks.run(refuse, 1, (count, kind))
    assert message.startswith("a block ran differently when backward recomputed it: ")
    assert message.endswith("[PL439]")


_WITH_AND_WITHOUT = ["", *[f"recompute={kind}" for kind in KINDS]]


def penalize_inputs(model: nn.Module, ids: Tensor) -> Tensor:
    x = model.table(ids)
    y = x
    for block in model.blocks:
        y = block(y)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().sum() + gradient.square().sum()


def gradients_of_a_penalty(world: Any) -> list[str]:
    found = []
    for layout in _WITH_AND_WITHOUT:
        trainer = paceline.Trainer(
            lambda: Small(mask),
            forward=lambda model, batch: penalize_inputs(model, batch["ids"]),
            loss=lambda output, batch: output,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-2),
            layout=layout,
            microbatch_size=2,
        )
        trainer.step(next(iter(trainer.loader(Tokens(), global_batch_size=6))))
        found.append(hash_tensors(trainer.whole_state()))
        trainer.close()
    return found


def test_a_gradient_penalty_repeats_a_forward_twice(ranks: Pool) -> None:
    (found,) = ranks.run(gradients_of_a_penalty, 1)
    assert found == [found[0]] * 3
