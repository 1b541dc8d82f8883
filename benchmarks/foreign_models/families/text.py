"""Families of sequences: recurrent, state-space, convolutional, speech, mixtures of experts, prompts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, LENGTH = 32, 16, 8


class CausalAttention(nn.Module):
    """Four heads, packed projections."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, c))


class FeedForward(nn.Sequential):
    """A dense layer of twice the width, and back."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Layer(nn.Module):
    """Attention and a mixer of any kind, with norms in front."""

    def __init__(self, mixer: nn.Module, feed: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixer, self.feed = mixer, feed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm_1(x))
        return x + self.feed(self.norm_2(x))


class Decoder(nn.Module):
    """A table, layers, a norm and a head."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.table, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class SelectiveScan(nn.Module):
    """Mamba's mixer, with its scan as a loop over the sequence."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        inner = 2 * WIDTH
        self.inner, self.states = inner, states
        self.enter, self.leave = nn.Linear(WIDTH, 2 * inner, bias=False), nn.Linear(inner, WIDTH, bias=False)
        self.conv = nn.Conv1d(inner, inner, 3, padding=2, groups=inner)
        self.select, self.step = nn.Linear(inner, 2 * states + 4, bias=False), nn.Linear(4, inner)
        self.decay = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.enter(x).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, write, read = self.select(x).split([4, self.states, self.states], dim=-1)
        step, state = F.softplus(self.step(step)), x.new_zeros(len(x), self.inner, self.states)
        outputs = []
        for t in range(x.shape[1]):
            kept = torch.exp(-step[:, t, :, None] * self.decay.exp())
            state = kept * state + (step[:, t] * x[:, t])[..., None] * write[:, t, None]
            outputs.append((state * read[:, t, None]).sum(-1))
        return self.leave((torch.stack(outputs, 1) + self.skip * x) * F.silu(gate))


class MinGru(nn.Module):
    """A recurrence without a hidden gate, as sums of logarithms (Feng et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.gate(x), self.value(x)
        kept = torch.cumsum(-F.softplus(k), dim=1)
        new = -F.softplus(-k) + torch.where(v >= 0, (F.relu(v) + 0.5).log(), -F.softplus(-v))
        return torch.exp(kept + torch.logcumsumexp(new - kept, dim=1))


class Retention(nn.Module):
    """Attention without a softmax, with a decay by head."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.gate, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.GroupNorm(heads, WIDTH)
        self.register_buffer("decay", torch.log(1 - 2.0 ** (-3 - torch.arange(heads))))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (each(x).view(b, t, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        place = torch.arange(t, device=x.device)
        gap = (place[:, None] - place[None]).clamp(min=0)
        weights = torch.exp(gap * self.decay[:, None, None]) * (place[:, None] >= place[None])
        mixed = (q @ k.transpose(-1, -2) * weights / math.sqrt(c)) @ v
        mixed = self.norm(mixed.transpose(1, 2).reshape(b * t, c)).view(b, t, c)
        return self.out(mixed * F.silu(self.gate(x)))


class IndexedMixture(nn.Module):
    """Two of four experts, as transformers' first Mixtral had them: rows added by index in place."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(FeedForward() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(rows).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            slots, places = torch.where(mask[number])
            current = rows[None, places].reshape(-1, WIDTH)
            out.index_add_(0, places, expert(current) * weights[places, slots, None])
        return out.view(x.shape)


class SwitchMixture(nn.Module):
    """One expert per token, with a capacity: tokens over it pass by (Fedus et al. 2021)."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router, self.count = nn.Linear(WIDTH, count), count
        self.experts = nn.ModuleList(FeedForward() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weight, chosen = self.router(rows).softmax(-1).max(-1)
        final = rows.clone()
        capacity = math.ceil(1.25 * len(rows) / self.count)
        for number in range(self.count):
            places = (chosen == number).nonzero()[:capacity, 0]
            final[places] = self.experts[number](rows[places])
        return (final * weight[:, None]).view(x.shape)


class DispatchMixture(nn.Module):
    """Tokens sent and gathered by one-hot products, experts as one tensor (Mesh TensorFlow's style)."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router, self.count = nn.Linear(WIDTH, count, bias=False), count
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        gates = self.router(rows).softmax(-1)
        mask = F.one_hot(gates.argmax(-1), self.count)
        place = (mask.cumsum(0) - 1) * mask
        capacity = len(rows) // 2
        sent = mask * (place < capacity)
        dispatch = sent[..., None] * F.one_hot(place.clamp(max=capacity - 1), capacity)
        given = torch.einsum("nec,nd->ecd", dispatch.to(x.dtype), rows)
        answers = torch.einsum("ecf,efd->ecd", torch.einsum("ecd,edf->ecf", given, self.up).relu(), self.down)
        return torch.einsum("nec,ecd->nd", dispatch * gates[..., None], answers).view(x.shape)


class SharedMixture(nn.Module):
    """An expert that all tokens pass, and two of four others, weighted by sigmoids (DeepSeek's style)."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(count, WIDTH) * 0.2),
            nn.Parameter(torch.zeros(count)),
        )
        self.shared = FeedForward()
        self.experts = nn.ModuleList(FeedForward() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, WIDTH)
        scores = F.linear(rows, self.weight).sigmoid()
        chosen = (scores + self.bias).topk(2, dim=-1)[1]
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        out, counts = torch.zeros_like(rows), torch.bincount(chosen.flatten(), minlength=4).tolist()
        for number, expert in enumerate(self.experts):
            if counts[number] == 0:
                continue
            place, slot = torch.where(chosen == number)
            out[place] += expert(rows[place]) * weights[place, slot, None]
        return (out + self.shared(rows)).view(x.shape)


class Seq2Seq(nn.Module):
    """A bidirectional GRU, and a cell that attends to it at each step (Bahdanau)."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, bidirectional=True, batch_first=True)
        self.bridge, self.cell = nn.Linear(2 * WIDTH, WIDTH), nn.GRUCell(3 * WIDTH, WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.score, self.head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(ids))
        state, keys, outputs = torch.tanh(self.bridge(torch.cat([*last], -1))), self.key(memory), []
        for t in range(labels.shape[1]):
            scores = self.score(torch.tanh(self.query(state)[:, None] + keys)).squeeze(-1)
            context = (scores.softmax(-1)[..., None] * memory).sum(1)
            state = self.cell(torch.cat([self.target(labels[:, t]), context], -1), state)
            outputs.append(state)
        return self.head(torch.stack(outputs, 1))


class StackedLstm(nn.Module):
    """Layers of LSTM with residual sums between, packed lengths, and dropout left out."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


class Temporal(nn.Module):
    """Dilated causal convolutions (TCN), each a residual block of its own width."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Conv1d(WIDTH, VOCAB, 1)
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, dilation=2**n) for n in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).transpose(1, 2)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.relu(norm(conv(F.pad(x, (2 * conv.dilation[0], 0)))))
        return self.head(x).transpose(1, 2)


class Conformer(nn.Module):
    """A block of speech recognition: half steps around attention and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.attend = FeedForward(), FeedForward(), CausalAttention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.enter, self.leave = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)
        self.depth, self.batch_norm = nn.Conv1d(WIDTH, WIDTH, 3, 1, 1, groups=WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.first(self.norms[0](x))
        x = x + self.attend(self.norms[1](x))
        inner = F.glu(self.enter(self.norms[2](x).transpose(1, 2)), dim=1)
        x = x + self.leave(F.silu(self.batch_norm(self.depth(inner)))).transpose(1, 2)
        return self.norms[4](x + 0.5 * self.second(self.norms[3](x)))


class SpeechModel(nn.Module):
    """Strided convolutions over frames, conformer blocks, logits for CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.enter = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Linear(4 * 4, WIDTH)
        self.blocks, self.head = nn.ModuleList(Conformer() for _ in range(2)), nn.Linear(WIDTH, VOCAB)

    def forward(self, frames: Tensor) -> Tensor:
        x = F.relu(self.stem(frames[:, None]))
        x = self.enter(x.permute(0, 2, 1, 3).flatten(2))
        for block in self.blocks:
            x = block(x)
        return self.head(x).log_softmax(-1)


class WaveModel(nn.Module):
    """wav2vec 2.0's structure: masked frames must be told from others; Gumbel noise comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Sequential(nn.Conv1d(inner, WIDTH, 4, stride=2), nn.GroupNorm(4, WIDTH), nn.GELU())
            for inner in (1, WIDTH)
        )
        self.masked = nn.Parameter(torch.rand(WIDTH))
        self.layers = nn.ModuleList(Layer(CausalAttention(), FeedForward()) for _ in range(2))
        self.logits, self.codes = nn.Linear(WIDTH, 8), nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, waves: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        x = waves[:, None]
        for conv in self.convs:
            x = conv(x)
        x = x.transpose(1, 2)
        soft = ((self.logits(x) + noise) / 0.5).softmax(-1)
        targets = soft @ self.codes
        mask = torch.arange(x.shape[1], device=x.device) % 3 == 1
        x = torch.where(mask[:, None], self.masked, x)
        for layer in self.layers:
            x = layer(x)
        scores = F.cosine_similarity(x[:, :, None], targets[:, None], dim=-1) / 0.1
        return scores, soft.mean((0, 1))


class Prompted(nn.Module):
    """A frozen decoder, whose table is known under two names, and a trained prompt (PEFT's structure)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Decoder([Layer(CausalAttention(), FeedForward()) for _ in range(2)]).requires_grad_(False)
        self.word_embeddings = self.base.table
        self.prompt = nn.Embedding(3, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(3, device=ids.device).expand(len(ids), 3)
        x = torch.cat([self.prompt(places), self.word_embeddings(ids)], dim=1)
        for layer in self.base.layers:
            x = layer(x)
        return self.base.head(self.base.norm(x))[:, 3:]


class Lora(nn.Module):
    """A dense layer with a low-rank addition, merged into the weight at each call."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), 0.5
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.scale * self.b @ self.a, self.base.bias)


class EarlyExit(nn.Module):
    """Every layer has a head, and the loss weights all of them; shallow texts leave after two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer(CausalAttention(), FeedForward()) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, VOCAB) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x, depth, total = self.table(ids), 2 + int(ids[0, 0]) % 3, 0.0
        for layer, head in zip(self.layers[:depth], self.heads, strict=False):
            x = layer(x)
            total = total + head(self.norm(x))
        return total


class TwoTowers(nn.Module):
    """A query's tower and a document's, their means compared with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Decoder([Layer(CausalAttention(), FeedForward()) for _ in range(2)])
        self.document = Decoder([Layer(MinGru(), FeedForward()) for _ in range(2)])
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        a, b = self.query(ids).mean(1), self.document(labels).mean(1)
        return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T * self.temperature.exp()


class MemoryNetwork(nn.Module):
    """End-to-end memory with adjacent tables shared between hops (Sukhbaatar et al. 2015)."""

    def __init__(self, hops: int = 3) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCAB, WIDTH) for _ in range(hops + 1))
        self.time = nn.Parameter(torch.randn(hops + 1, LENGTH, WIDTH) * 0.1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        u = self.tables[0](labels[:, :3]).sum(1)
        for hop in range(len(self.tables) - 1):
            keys = self.tables[hop](ids) + self.time[hop]
            values = self.tables[hop + 1](ids) + self.time[hop + 1]
            u = u + ((keys @ u[:, :, None]).softmax(1) * values).sum(1)
        return u @ self.tables[-1].weight.T


def build_hybrid() -> nn.Module:
    """Return a decoder whose layers alternate between kinds, as Jamba's."""
    return Decoder(
        [
            Layer(SelectiveScan(), FeedForward()),
            Layer(CausalAttention(), SharedMixture()),
            Layer(SelectiveScan(), IndexedMixture()),
            Layer(Retention(), FeedForward()),
        ]
    )


def build_lora() -> nn.Module:
    """Return a frozen decoder, of which attention and head have low-rank additions."""
    model = Decoder([Layer(CausalAttention(), FeedForward()) for _ in range(2)]).requires_grad_(False)
    for layer in model.layers:
        layer.mixer.qkv = Lora(layer.mixer.qkv)
        layer.feed[2] = Lora(layer.feed[2])
    model.head = Lora(model.head)
    return model
