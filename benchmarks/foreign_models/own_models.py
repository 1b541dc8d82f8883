"""Models as people write them in scripts: loops, views with numbers, containers, raw parameters."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.foreign_models.models import DROPOUT, Size


class NanoAttention(nn.Module):
    """Packed projections, split and viewed by numbers; dropout by function or inside of torch's attention."""

    def __init__(self, size: Size, flash: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = (
            nn.Linear(size.hidden, 3 * size.hidden),
            nn.Linear(size.hidden, size.hidden),
        )
        self.attn_dropout, self.resid_dropout = nn.Dropout(DROPOUT), nn.Dropout(DROPOUT)
        self.n_head, self.n_embd, self.dropout, self.flash = size.heads, size.hidden, DROPOUT, flash
        if not flash:
            mask = torch.tril(torch.ones(size.length, size.length)).view(1, 1, size.length, size.length)
            self.register_buffer("bias", mask)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        heads = (batch, length, self.n_head, width // self.n_head)
        q, k, v = (part.view(*heads).transpose(1, 2) for part in self.c_attn(x).split(self.n_embd, dim=2))
        if self.flash:
            rate = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(scores, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(batch, length, width)
        out: Tensor = self.resid_dropout(self.c_proj(y))
        return out


class NanoNorm(nn.Module):
    """LayerNorm by function, without a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class NanoMlp(nn.Module):
    """Four times as wide inside."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.c_fc, self.c_proj = (
            nn.Linear(size.hidden, 4 * size.hidden),
            nn.Linear(4 * size.hidden, size.hidden),
        )
        self.gelu, self.dropout = nn.GELU(), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.c_proj(self.gelu(self.c_fc(x))))
        return out


class NanoBlock(nn.Module):
    """Norms in front."""

    def __init__(self, size: Size, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = NanoNorm(size.hidden), NanoAttention(size, flash)
        self.ln_2, self.mlp = NanoNorm(size.hidden), NanoMlp(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class NanoGPT(nn.Module):
    """The structure of Karpathy's nanoGPT: a ModuleDict of all parts, the table tied to the head."""

    def __init__(self, size: Size, flash: bool = True) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(size.vocab, size.hidden),
                "wpe": nn.Embedding(size.length, size.hidden),
                "drop": nn.Dropout(DROPOUT),
                "h": nn.ModuleList([NanoBlock(size, flash) for _ in range(size.layers)]),
                "ln_f": NanoNorm(size.hidden),
            }
        )
        self.lm_head = nn.Linear(size.hidden, size.vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * size.layers))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        parts = self.transformer
        positions = torch.arange(0, ids.size(1), dtype=torch.long, device=ids.device)
        x = parts["drop"](parts["wte"](ids) + parts["wpe"](positions))
        for block in parts["h"]:
            x = block(x)
        logits: Tensor = self.lm_head(parts["ln_f"](x))
        return logits


class RecurrentModel(nn.Module):
    """Two layers of torch's LSTM."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(size.vocab, size.hidden), nn.Linear(size.hidden, size.vocab)
        self.cells = nn.LSTM(size.hidden, size.hidden, 2, batch_first=True, dropout=DROPOUT)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cells(self.table(ids))[0])
        return logits


class CellModel(nn.Module):
    """A cell in a loop over the sequence."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(size.vocab, size.hidden), nn.Linear(size.hidden, size.vocab)
        self.cell, self.dropout = nn.GRUCell(size.hidden, size.hidden), nn.Dropout(DROPOUT)

    def forward(self, ids: Tensor) -> Tensor:
        state = torch.zeros(len(ids), self.cell.hidden_size, dtype=self.table.weight.dtype)
        outputs = []
        for place in range(ids.shape[1]):
            state = self.cell(self.dropout(self.table(ids[:, place])), state)
            outputs.append(state)
        logits: Tensor = self.head(torch.stack(outputs, 1))
        return logits


class Experts(nn.Module):
    """Two of four experts per token, gathered and scattered by index."""

    def __init__(self, size: Size, count: int = 4) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(size.hidden, 64), nn.GELU(), nn.Linear(64, size.hidden))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).reshape(-1, x.shape[-1])
        weights, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            places, slots = torch.where(chosen == number)
            if places.numel():
                out = out.index_add(0, places, expert(rows[places]) * weights[places, slots, None])
        return x + out.view(x.shape)


class Mixture(nn.Module):
    """torch's attention, and experts."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(size.vocab, size.hidden), nn.Linear(size.hidden, size.vocab)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(size.hidden, size.heads, dropout=DROPOUT, batch_first=True)
            for _ in range(size.layers)
        )
        self.experts = nn.ModuleList(Experts(size) for _ in range(size.layers))

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.table(ids), torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for attend, experts in zip(self.attention, self.experts, strict=True):
            x = experts(x + attend(x, x, x, attn_mask=mask, need_weights=False)[0])
        logits: Tensor = self.head(x)
        return logits


class EinsumModel(nn.Module):
    """Raw parameters with heads as a dimension of their own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, heads, each = size.hidden, size.heads, size.hidden // size.heads
        scale = width**-0.5
        self.table, self.norm = nn.Embedding(size.vocab, width), nn.LayerNorm(width)
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(heads, width, each) * scale) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(heads, each, width) * scale)
        self.up, self.down = (nn.Parameter(torch.randn(*s) * scale) for s in ((width, 64), (64, width)))
        self.head = nn.Linear(width, size.vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        n = self.norm(x)
        q, k, v = (torch.einsum("btd,hdk->bhtk", n, w) for w in (self.wq, self.wk, self.wv))
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        scores = torch.einsum("bhtk,bhsk->bhts", q, k).div(q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
        mixed = torch.einsum("bhts,bhsk->bhtk", scores.softmax(-1), v)
        x = x + torch.einsum("bhtk,hkd->btd", mixed, self.wo)
        logits: Tensor = self.head(x + F.relu(x @ self.up).square() @ self.down)
        return logits


class Universal(nn.Module):
    """One block, as often as the first token says."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(size.vocab, size.hidden), nn.Linear(size.hidden, size.vocab)
        self.block = nn.TransformerEncoderLayer(size.hidden, size.heads, 64, DROPOUT, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for _ in range(2 + int(ids[0, 0]) % 2):
            x = self.block(x)
        logits: Tensor = self.head(x)
        return logits


class Residual(nn.Module):
    """Two convolutions with a time step between them."""

    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(4, inner), nn.GroupNorm(4, outer)
        self.conv_1 = nn.Conv2d(inner, outer, 3, padding=1)
        self.conv_2 = nn.Conv2d(outer, outer, 3, padding=1)
        self.time, self.dropout = nn.Linear(time, outer), nn.Dropout(DROPOUT)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inside = self.conv_1(F.silu(self.first(x))) + self.time(F.silu(time))[:, :, None, None]
        out: Tensor = self.skip(x) + self.conv_2(self.dropout(F.silu(self.second(inside))))
        return out


class PixelAttention(nn.Module):
    """Attention between pixels, with convolutions for projections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        packed = self.qkv(self.norm(x)).view(b, 3, 4, c // 4, h * w).transpose(-1, -2)
        mixed = F.scaled_dot_product_attention(*packed.unbind(1))
        out: Tensor = x + self.out(mixed.transpose(-1, -2).reshape(b, c, h, w))
        return out


class Diffusion(nn.Module):
    """A small U-Net that finds the noise in an image."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.enter, self.leave = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.down, self.up = nn.Conv2d(16, 32, 3, 2, 1), nn.ConvTranspose2d(32, 16, 2, 2)
        self.high, self.low, self.last = Residual(16, 16, 32), Residual(32, 32, 32), Residual(32, 16, 32)
        self.attention = PixelAttention(32)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-torch.arange(8, device=x.device) / 8.0)[None]
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype))
        high = self.high(self.enter(x), time)
        low = self.attention(self.low(self.down(high), time))
        out: Tensor = self.leave(self.last(torch.cat([self.up(low), high], 1), time))
        return out


class Squeeze(nn.Module):
    """Scales channels by what all pixels say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid()
        return out


class Inverted(nn.Module):
    """A wide depthwise convolution, dropped by sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.inner = nn.Sequential(
            *(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU()),
            *(nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU()),
            *(Squeeze(wide), nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        inside: Tensor = self.inner(x)
        if self.training:
            inside = inside * inside.new_empty((len(x), 1, 1, 1)).bernoulli_(0.8) / 0.8
        return x + inside


class Efficient(nn.Module):
    """BatchNorm, squeeze and excitation, stochastic depth by sample."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 8, 3, 2, 1), nn.Sequential(Inverted(8), Inverted(8))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


class Mixer(nn.Module):
    """Blocks that are no modules with a forward, but ModuleDicts that the model reads."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.hidden
        self.patches, self.head = nn.Conv2d(3, width, 4, 4), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_1": nn.LayerNorm(width),
                    "tokens_1": nn.Linear(16, 32),
                    "tokens_2": nn.Linear(32, 16),
                    "norm_2": nn.LayerNorm(width),
                    "channels_1": nn.Linear(width, 64),
                    "channels_2": nn.Linear(64, width),
                }
            )
            for _ in range(size.layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            mixed = F.gelu(block["tokens_1"](block["norm_1"](x).transpose(1, 2)))
            x = x + block["tokens_2"](mixed).transpose(1, 2)
            x = x + block["channels_2"](F.gelu(block["channels_1"](block["norm_2"](x))))
        logits: Tensor = self.head(x.mean(1))
        return logits


class Normed(nn.Module):
    """Parametrized weights, and BatchNorm with a plain average."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        norms = nn.utils.parametrizations
        self.first = norms.weight_norm(nn.Linear(768, 32))
        self.second = norms.spectral_norm(nn.Linear(32, 32))
        self.norm, self.head = nn.BatchNorm1d(32, momentum=None), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(self.norm(self.second(self.first(x.flatten(1))))))
        return logits


class Quantised(nn.Module):
    """A codebook in buffers that every forward moves."""

    code: Tensor
    count: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(768, 16), nn.Linear(16, 10)
        self.register_buffer("code", torch.randn(8, 16))
        self.register_buffer("count", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        z = self.enter(x.flatten(1))
        chosen = torch.cdist(z, self.code.to(z.dtype)).argmin(-1)
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(chosen, 8).to(z.dtype)
                self.count.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
                self.code.mul_(0.9).add_(one_hot.T @ z, alpha=0.1)
        nearest = self.code[chosen].to(z.dtype)
        logits: Tensor = self.leave(z + (nearest - z).detach())
        return logits
