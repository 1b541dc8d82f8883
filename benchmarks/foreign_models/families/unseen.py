"""Families of a third visit: recurrences of images, complex scans, choice of tokens by experts, penalties of
weights, results in classes of one's own, modules at two places, prefixes, equilibria, depth by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.foreign_models.families.text import LENGTH, VOCAB, WIDTH, Decoder, FeedForward, Layer


class ConvLstm(nn.Module):
    """A recurrence over the rows of an image, whose cell is a convolution."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.channels = channels
        self.cell = nn.Conv1d(3 + channels, 4 * channels, 3, padding=1)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = [x.new_zeros(len(x), self.channels, x.shape[3]) for _ in range(2)]
        for row in x.unbind(2):
            i, f, o, g = self.cell(torch.cat([row, state[0]], 1)).chunk(4, 1)
            state[1] = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
            state[0] = o.sigmoid() * state[1].tanh()
        return self.head(state[0].mean(2))


class DiagonalScan(nn.Module):
    """A diagonal state-space layer with complex states, as a convolution by FFT (S4D)."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.full((WIDTH, states), 0.5).log())
        self.turn = nn.Parameter(math.pi * torch.arange(states).repeat(WIDTH, 1))
        self.read = nn.Parameter(torch.randn(WIDTH, states, 2))
        self.skip, self.out = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        rate = torch.complex(-self.decay.exp(), self.turn)
        powers = torch.exp(rate[..., None] * torch.arange(length))
        kernel = 2 * (torch.view_as_complex(self.read)[..., None] * powers).sum(1).real
        spectrum = torch.fft.rfft(x.transpose(1, 2), 2 * length) * torch.fft.rfft(kernel, 2 * length)
        mixed = torch.fft.irfft(spectrum, 2 * length)[..., :length].transpose(1, 2)
        return self.out(F.gelu(mixed + x * self.skip))


class ChoosingExperts(nn.Module):
    """Each expert chooses its tokens of the microbatch (Zhou et al. 2022)."""

    def __init__(self, experts: int = 4, capacity: int = 6) -> None:
        super().__init__()
        self.capacity = capacity
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(FeedForward() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = self.gate(flat).softmax(-1).t()
        # Equal tokens, such as the same word at the first place of two samples, would be chosen by rounding.
        chosen = (scores + 1e-9 * torch.arange(len(flat))).topk(self.capacity, dim=-1).indices
        weights = scores.gather(1, chosen)
        result = torch.zeros_like(flat)
        for expert, weight, tokens in zip(self.experts, weights, chosen, strict=True):
            result = result.index_add(0, tokens, expert(flat[tokens]) * weight[:, None])
        return result.view_as(x)


class ParallelBlock(nn.Module):
    """PaLM's: attention with one key head and feed-forward side by side, ALiBi, a bool buffer as the mask."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.size = heads, WIDTH // heads
        self.norm = nn.RMSNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, WIDTH + 2 * self.size + 4 * WIDTH, bias=False)
        self.out, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        place = torch.arange(LENGTH)
        self.register_buffer("hidden", place[None] > place[:, None])
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, heads + 1))
        self.register_buffer("gaps", (place[None] - place[:, None]).double())

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        sizes = [WIDTH, self.size, self.size, 2 * WIDTH, 2 * WIDTH]
        q, k, v, gate, up = self.wide(self.norm(x)).split(sizes, dim=-1)
        q = q.view(b, t, self.heads, self.size).transpose(1, 2)
        scores = torch.einsum("bhqd,bkd->bhqk", q, k) / math.sqrt(self.size)
        scores = scores + self.slopes[:, None, None] * self.gaps[:t, :t]
        scores = scores.masked_fill(self.hidden[:t, :t], float("-inf")).softmax(-1)
        mixed = torch.einsum("bhqk,bkd->bqhd", scores, v).flatten(2)
        return x + self.out(mixed) + self.down(F.silu(gate) * up)


class RotatingAttention(nn.Module):
    """Rotary angles as a complex buffer, grouped keys, norms of queries and keys."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.size = heads, WIDTH // heads
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out, self.q_norm, self.k_norm = (
            nn.Linear(WIDTH, WIDTH),
            nn.RMSNorm(self.size),
            nn.RMSNorm(self.size),
        )
        angles = torch.outer(torch.arange(LENGTH), 100.0 ** -torch.arange(0, 1, 2 / self.size)).double()
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))

    def turn(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.freqs_cis[: x.shape[1], None]).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        q = self.turn(self.q_norm(self.q(x).unflatten(-1, (self.heads, self.size))))
        k, v = self.kv(x).unflatten(-1, (-1, self.size)).chunk(2, dim=2)
        k, v = (each.repeat_interleave(2, dim=2) for each in (self.turn(self.k_norm(k)), v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class PointNet(nn.Module):
    """Points that a net of their own turns first, with the turn returned for a penalty of orthogonality."""

    def __init__(self) -> None:
        super().__init__()
        self.turner = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16))
        self.lift, self.head = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16)), nn.Linear(16, 1)

    def forward(self, x: Tensor, counts: Tensor) -> dict[str, Tensor]:
        mask = torch.arange(x.shape[1])[None] < counts[:, None]
        turn = self.turner(x).masked_fill(~mask[..., None], float("-inf")).amax(1).view(-1, 4, 4)
        lifted = self.lift(x @ turn).masked_fill(~mask[..., None], float("-inf")).amax(1)
        return {"value": self.head(lifted)[:, 0], "turn": turn}


class Equilibrium(nn.Module):
    """A fixed point of a layer, with as many iterations as the microbatch needs (Bai et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        nn.init.normal_(self.inner.weight, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        entered = self.enter(x)
        state = torch.zeros_like(entered)
        with torch.no_grad():
            for _ in range(20):
                new = torch.tanh(self.inner(state) + entered)
                if (new - state).norm() < 1e-3:
                    break
                state = new
        return self.head(torch.tanh(self.inner(state) + entered))[:, 0]


class Universal(nn.Module):
    """One block four times, with the table of tokens as the head, and a step's embedding (Dehghani 2018)."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.table, self.steps = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(4, WIDTH))
        self.block, self.norm = Layer(mixer, FeedForward()), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for step in self.steps:
            x = self.block(x + step)
        return F.linear(self.norm(x), self.table.weight)


class PrefixAttention(nn.Module):
    """A frozen attention with trained keys and values in front of the sequence's."""

    def __init__(self, heads: int = 4, prefix: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.prefix = nn.Parameter(torch.randn(2, heads, prefix, WIDTH // heads))
        self.requires_grad_(False).prefix.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        k, v = (
            torch.cat([own.expand(b, -1, -1, -1), each], 2)
            for own, each in zip(self.prefix, (k, v), strict=True)
        )
        mask = torch.ones(t, k.shape[2], dtype=torch.bool).tril(k.shape[2] - t)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class DepthByToken(nn.Module):
    """A layer that only the tokens with the highest scores go through (mixture of depths)."""

    def __init__(self, mixer: nn.Module, share: float = 0.5) -> None:
        super().__init__()
        self.router, self.layer, self.share = nn.Linear(WIDTH, 1), Layer(mixer, FeedForward()), share

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)[..., 0]
        chosen = scores.topk(int(self.share * x.shape[1]), dim=1).indices.sort(dim=1).values
        index = chosen[..., None].expand(-1, -1, x.shape[2])
        gained = self.layer(x.gather(1, index)) * scores.gather(1, chosen).sigmoid()[..., None]
        return x.scatter_add(1, index, gained)


class GatedCross(nn.Module):
    """A frozen decoder with trained cross-attention to a resampled image behind gates at zero (Flamingo)."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.decoder = Decoder([Layer(mixer, FeedForward()), Layer(mixer, FeedForward())]).requires_grad_(
            False
        )
        self.queries, self.enter = nn.Parameter(torch.randn(3, WIDTH)), nn.Linear(3 * 8, WIDTH)
        self.resample = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.cross = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2))
        self.gates = nn.ParameterList(nn.Parameter(torch.full((), 0.1)) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        rows = self.enter(x.permute(0, 2, 1, 3).flatten(2))
        seen, _ = self.resample(self.queries.expand(len(x), -1, -1), rows, rows, need_weights=False)
        hidden = self.decoder.table(labels[:, None].expand(-1, LENGTH))
        for layer, cross, gate in zip(self.decoder.layers, self.cross, self.gates, strict=True):
            hidden = layer(hidden + gate.tanh() * cross(hidden, seen, seen, need_weights=False)[0])
        return self.decoder.head(self.decoder.norm(hidden))[:, -1, :10]


@dataclass
class Found:
    """A result in a class of one's own."""

    logits: Tensor
    taps: list[Tensor]


class Tapped(Decoder):
    """A decoder whose hooks collect what its layers return, for a loss in the middle."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.seen: list[Tensor] = []
        for layer in self.layers:
            layer.register_forward_hook(lambda _module, _args, result: self.seen.append(result))

    def forward(self, ids: Tensor) -> Any:
        self.seen.clear()
        return Found(super().forward(ids), list(self.seen))


class FeatureTokens(nn.Module):
    """A table's row as tokens of raw parameters, with a token for the class (FT-Transformer)."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.randn(features, WIDTH)) for _ in range(2))
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[..., None] * self.scale + self.shift
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.encoder(tokens)[:, 0])
