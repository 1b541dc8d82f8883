"""Models that people write by hand, under layouts that have failed on them, against a plain loop."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.foreign_models.against_plain_loop import TOLERANCE, compare
from benchmarks.foreign_models.families import table
from benchmarks.foreign_models.families.table import FAMILIES, Family, call, make_text, score_tokens
from benchmarks.foreign_models.families.text import CausalAttention, Decoder, FeedForward, Layer
from benchmarks.foreign_models.families.training import build, make_batches, train_laid_out, train_plainly
from paceline import Trainer
from paceline.errors import PacelineError
from tests.dist.pool import Pool, RankError


class MaskedMixture(nn.Module):
    """Chooses the tokens of an expert by masks, and asks whether there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(table.text.WIDTH, 4)
        self.experts = nn.ModuleList(FeedForward() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, flat = torch.zeros_like(x), x.view(-1, x.shape[-1])
        weights, chosen = self.gate(x).topk(2, dim=-1)
        weights = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights.softmax(-1)).view(-1, 4)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(dim=-1)
            if mask.any():
                rows = mask.view(-1)
                out[mask] += expert(flat[rows]) * weights[rows, number, None]
        return out


class SortedMixture(MaskedMixture):
    """Sorts tokens by expert, and counts them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weight, chosen = self.gate(rows).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=4)
        parts = rows[order].split(counts.tolist())
        answers = [expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)]
        out = torch.zeros_like(rows).index_copy(0, order, torch.cat(answers))
        return (out * weight[:, None]).view(x.shape)


class SetsBuffer(nn.Module):
    """Sets a buffer in its forward: from its weights, from the batch, or by counting."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.feed, self.kind = FeedForward(), kind
        self.register_buffer("kept", torch.zeros(table.text.WIDTH if kind == "norm" else ()))
        self.register_buffer("spread", torch.ones(table.text.WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "new":
            self.kept = self.kept + 1
        elif self.kind == "count":
            self.kept += 1
        elif self.kind == "replaced":
            self.kept = self.feed[0].weight.detach().mean()
        elif self.kind == "norm":
            rows = x.flatten(0, 1)
            x = nn.functional.batch_norm(rows, self.kept, self.spread, training=True).view(x.shape)
        else:
            self.kept.data.copy_(self.feed[0].weight.detach().mean())
        return x + self.feed(x)


class Feedback(nn.Sequential):
    """Its first layer uses what its last one has set."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self[0](ids) + self[-2].kept.clone()
        for layer in self[1:]:
            x = layer(x)
        return x


def build_chain(*layers: nn.Module, kind: type[nn.Module] = nn.Sequential) -> nn.Module:
    width, vocabulary = table.text.WIDTH, table.text.VOCAB
    return kind(nn.Embedding(vocabulary, width), *layers, nn.Linear(width, vocabulary))


class AcrossSamples(nn.Module):
    """Attention of each position over the samples of the batch, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(table.text.WIDTH)
        self.qkv, self.out = (nn.Linear(table.text.WIDTH, n * table.text.WIDTH) for n in (3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, samples = x.shape[1], x.shape[0]
        parts = self.qkv(self.norm(x).transpose(0, 1)).chunk(3, -1)
        q, k, v = (part.view(length, samples, 2, -1).transpose(1, 2) for part in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2).transpose(1, 2)
        return x + self.out(y.reshape(length, samples, -1)).transpose(0, 1)


class NormedQueries(CausalAttention):
    """A norm over all heads keeps attention whole under tp."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(table.text.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        parts = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.norm(q), k, v))
        y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class InPlaceLayer(Layer):
    """Writes sums into the tensors that its parts return."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mixer(self.norm_1(x))
        y += x
        return self.feed(self.norm_2(y)).add_(y)


class KeepsAngles(CausalAttention):
    """Keeps a table that its first forward makes; a trial must not leave one without numbers."""

    angles: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.angles is None:
            self.angles = torch.outer(torch.arange(x.shape[1]), torch.arange(x.shape[2])).cos().to(x)
        return super().forward(x * self.angles)


class DepthByData(Decoder):
    """Leaves its last layer out for some batches."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers[: 2 - int(ids[0, 0]) % 2]:
            x = layer(x)
        return self.head(self.norm(x))


def build_tied_norms() -> nn.Module:
    """The last norm is one of a block, which sees a part of each sequence where the last one sees all."""
    model = FAMILIES["RetNet"].build()
    model.norm = model.layers[0].norm_1
    return model


def build_collecting() -> nn.Module:
    model = build_decoder(FeedForward)
    for layer in model.layers:
        layer.mixer.out.register_forward_hook(lambda _module, _args, output: COLLECTED.append(output))
    return model


def call_collecting(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    COLLECTED.clear()
    return model(batch["ids"])


def score_collected(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    loss, count = score_tokens(logits, batch)
    return loss + sum(each.abs().mean() for each in COLLECTED) * count, count


COLLECTED: list[torch.Tensor] = []


def build_decoder(mixture: type[nn.Module]) -> nn.Module:
    return Decoder([Layer(CausalAttention(), mixture()) for _ in range(2)])


MORE = {
    kind.__name__: Family(lambda kind=kind: build_decoder(kind), make_text, score_tokens, call("ids"))
    for kind in (MaskedMixture, SortedMixture)
}
BUFFERS = {
    f"buffer, {kind}": Family(
        lambda kind=kind: build_chain(FeedForward(), FeedForward(), SetsBuffer(kind)),
        *(make_text, score_tokens, call("ids")),
    )
    for kind in ("weights", "count", "new", "norm", "replaced")
}
OTHERS = dict(BUFFERS)
OTHERS["feedback"] = Family(
    lambda: build_chain(*(FeedForward() for _ in range(3)), SetsBuffer("weights"), kind=Feedback),
    *(make_text, score_tokens, call("ids")),
)
OTHERS["across samples"] = Family(
    lambda: build_chain(AcrossSamples(), FeedForward()), make_text, score_tokens, call("ids")
)
OTHERS["tied norms"] = Family(build_tied_norms, make_text, score_tokens, call("ids"))
OTHERS["collected"] = Family(build_collecting, make_text, score_collected, call_collecting)
MORE["normed queries"] = Family(
    lambda: Decoder([InPlaceLayer(NormedQueries(), FeedForward()) for _ in range(2)]),
    *(make_text, score_tokens, call("ids")),
)
MORE["angles"] = Family(
    lambda: Decoder([Layer(KeepsAngles(), FeedForward()) for _ in range(2)]),
    *(make_text, score_tokens, call("ids")),
)
OTHERS["depth by data"] = Family(
    lambda: DepthByData([Layer(CausalAttention(), FeedForward()) for _ in range(2)]),
    *(make_text, score_tokens, call("ids")),
)
BY_SEQUENCE = ("minGRU", "Mamba by hand", "RetNet", "LoRA, merged", "Mixtral, index_add_", "normed queries")
CASES = [
    *((name, "tp=2 sequence=true") for name in BY_SEQUENCE),
    *(("depth by data", layout) for layout in ("dp_replicate=2", "dp_shard=2")),
    *(("prompt tuning", layout) for layout in ("tp=2", "pp=2", "cp=2")),
    *(("shared expert", layout) for layout in ("tp=2", "pp=2", "cp=2")),
    *((name, layout) for name in MORE for layout in ("tp=2", "pp=2") if (name, layout) != ("angles", "pp=2")),
    *((name, "dp_shard=2") for name in ("DiT", "memory network", "RevNet")),
    *((name, "pp=2") for name in ("two towers", "VAE", "MobileNet", "GRU seq2seq, attention", "neural ODE")),
]
REFUSED = [
    *(("feedback", "pp=2", "PL483"), ("buffer, replaced", "pp=2", "PL484")),
    *(("across samples", "tp=2", "PL451"), ("Mixtral, index_add_", "ep=2", "PL658")),
    ("angles", "pp=2", "PL484"),
    *((name, "tp=2 sequence=true", "PL464") for name in ("DiT", "tied norms", "collected")),
    *(
        ("DLRM, sparse tables", layout, "PL425")
        for layout in ("dp_replicate=2", "dp_shard=2", "tp=2", "pp=2")
    ),
]


def train_all(world: Any, cases: list[tuple[str, str]], catches: bool = True) -> list[Any]:
    FAMILIES.update({**MORE, **OTHERS})
    found: list[Any] = []
    for name, layout in cases:
        try:
            found.append(train_laid_out(world, name, layout))
        except PacelineError as error:
            if not catches:
                raise
            found.append(error.code)
    return found


def test_numbers_are_those_of_a_plain_loop(ranks: Pool) -> None:
    found = ranks.run(train_all, 2, (CASES,), timeout_s=120)[0]
    truth = {
        name: train_plainly({**FAMILIES, **MORE, **OTHERS}[name])
        for name in dict.fromkeys(n for n, _ in CASES)
    }
    worst = {
        (name, layout): compare(each, truth[name]) if isinstance(each, tuple) else each
        for (name, layout), each in zip(CASES, found, strict=True)
    }
    assert all(isinstance(each, float) and each < TOLERANCE for each in worst.values()), worst


def test_a_block_that_is_left_out_by_data_is_refused_under_pp(ranks: Pool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(train_all, 2, ([("depth by data", "pp=2")], False), timeout_s=20)
    [error, *_] = caught.value.causes.values()
    assert isinstance(error, PacelineError)
    assert error.code == "PL482"
    assert "blocks, not" in str(error)


def test_what_is_not_the_same_is_refused(ranks: Pool) -> None:
    found = ranks.run(train_all, 2, ([(name, layout) for name, layout, _ in REFUSED],), timeout_s=60)[0]
    assert found == [code for _, _, code in REFUSED]


def test_a_checkpoint_has_the_buffers_of_the_stage_that_changes_them(ranks: Pool) -> None:
    names = [name for name in BUFFERS if "replaced" not in name]
    found = ranks.run(train_all, 2, ([(name, "pp=2") for name in names],), timeout_s=60)[0]
    truth = ranks.run(train_all, 1, ([(name, "dp_replicate=1") for name in names],), timeout_s=60)[0]
    worst = {name: compare(*pair) for name, *pair in zip(names, found, truth, strict=True)}
    assert max(worst.values()) < TOLERANCE, worst


def load_plain_weights(world: Any, layouts: list[str]) -> list[bool]:
    """Return by layout whether a laid-out model has the weights of a plain one, whose state it loads."""
    family = FAMILIES["Mixtral, index_add_"]
    plain = build(family)
    with torch.no_grad():
        for tensor in plain.parameters():
            tensor.add_(1.0)
    found = []
    for layout in layouts:
        example = {key: tensor[:2] for key, tensor in make_batches(family)[0].items()}
        settings = {"optimizer": family.optimizer, "layout": layout, "example": example, "dtype": "fp64"}
        model = build(family)
        for module in model.modules():  # no code reads it, so it says nothing of a router
            module.built_s = time.perf_counter()  # type: ignore[assignment]
        trainer = Trainer(model, forward=family.forward, loss=family.loss, microbatch_size=2, **settings)
        trainer.model.load_state_dict(plain.state_dict())
        whole = trainer.whole_state()
        found.append(all(torch.equal(whole[name], plain.state_dict()[name]) for name in whole))
    return found


def test_every_layout_loads_whole_weights(ranks: Pool) -> None:
    layouts = ["dp_shard=2", "tp=2", "pp=2", "cp=2"]
    assert ranks.run(load_plain_weights, 2, (layouts,), timeout_s=60)[0] == [True] * len(layouts)
