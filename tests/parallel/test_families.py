"""Models that people write by hand, under layouts that have failed on them, against a plain loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.foreign_models.against_plain_loop import TOLERANCE, compare
from benchmarks.foreign_models.families import table
from benchmarks.foreign_models.families.table import FAMILIES, Family, call, make_text, score_tokens
from benchmarks.foreign_models.families.text import CausalAttention, Decoder, FeedForward, Layer
from benchmarks.foreign_models.families.training import train_laid_out, train_plainly
from paceline.errors import PacelineError
from tests.dist.pool import Pool


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


def build_decoder(mixture: type[nn.Module]) -> nn.Module:
    return Decoder([Layer(CausalAttention(), mixture()) for _ in range(2)])


MORE = {
    kind.__name__: Family(lambda kind=kind: build_decoder(kind), make_text, score_tokens, call("ids"))
    for kind in (MaskedMixture, SortedMixture)
}
CASES = [
    *(("prompt tuning", layout) for layout in ("tp=2", "pp=2", "cp=2")),
    *(("shared expert", layout) for layout in ("tp=2", "pp=2", "cp=2")),
    *((name, layout) for name in MORE for layout in ("tp=2", "pp=2")),
    *((name, "dp_shard=2") for name in ("DiT", "memory network", "RevNet")),
    *((name, "pp=2") for name in ("two towers", "VAE", "MobileNet", "GRU seq2seq, attention", "neural ODE")),
]
REFUSED = [
    ("DiT", "tp=2 sequence=true", "PL464"),
    *(
        ("DLRM, sparse tables", layout, "PL425")
        for layout in ("dp_replicate=2", "dp_shard=2", "tp=2", "pp=2")
    ),
]


def train_all(world: Any, cases: list[tuple[str, str]]) -> list[Any]:
    FAMILIES.update(MORE)
    found: list[Any] = []
    for name, layout in cases:
        try:
            found.append(train_laid_out(world, name, layout))
        except PacelineError as error:
            found.append(error.code)
    return found


def test_numbers_are_those_of_a_plain_loop(ranks: Pool) -> None:
    found = ranks.run(train_all, 2, (CASES,), timeout_s=120)[0]
    truth = {name: train_plainly({**FAMILIES, **MORE}[name]) for name in dict.fromkeys(n for n, _ in CASES)}
    worst = {
        (name, layout): compare(each, truth[name]) if isinstance(each, tuple) else each
        for (name, layout), each in zip(CASES, found, strict=True)
    }
    assert all(isinstance(each, float) and each < TOLERANCE for each in worst.values()), worst


def test_what_is_not_the_same_is_refused(ranks: Pool) -> None:
    found = ranks.run(train_all, 2, ([(name, layout) for name, layout, _ in REFUSED],), timeout_s=60)[0]
    assert found == [code for _, _, code in REFUSED]
