"""Training of a GPT whose sequences two or more ranks divide, by hand with bare torch.

`exchange` sends rows for heads by `all_to_all_single` around attention (Ulysses), `gather` sends keys and
values by `all_gather`. Embedding, head and loss run on a rank's own positions, which is the least work. Each
is a generator: `next()` takes one optimizer step and gives the loss of this rank's positions, not yet read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from loops import CLIP_NORM, Job, Tokens, build_optimizer
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from paceline.models.gpt import rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class ToHeads(torch.autograd.Function):
    """[batch, heads, own rows, width] to [batch, own heads, rows, width]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return swap(x, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return swap(grad, 2, 1)


class ToRows(torch.autograd.Function):
    """The inverse of `ToHeads`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return swap(x, 2, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return swap(grad, 1, 2)


class Gather(torch.autograd.Function):
    """[batch, heads, own rows, width] to [batch, heads, rows, width]; backward adds up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # As a reduce-scatter, which is slower on gloo.
        sent = torch.stack(grad.chunk(dist.get_world_size(), 2))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return received.sum(0)


def swap(x: Tensor, cut: int, join: int) -> Tensor:
    """Send a part along one dimension to each rank; join what comes along another."""
    sent = torch.stack(x.chunk(dist.get_world_size(), cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return torch.cat(received.unbind(0), join)


def exchange(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with some heads, between two exchanges of rows and heads."""
    heads = [ToHeads.apply(x) for x in (query, key, value)]
    result: Tensor = ToRows.apply(F.scaled_dot_product_attention(*heads, is_causal=True))
    return result


def gather(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend from own positions to gathered keys and values, which travel together."""
    own = query.shape[2]
    key, value = Gather.apply(torch.cat([key, value], -1)).chunk(2, -1)
    places = torch.arange(key.shape[2])
    first = dist.get_rank() * own
    mask = places[first : first + own, None] >= places
    return F.scaled_dot_product_attention(query, key.contiguous(), value.contiguous(), attn_mask=mask)


def run_block(block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    """Return a block of the model on this rank's positions."""
    layer: Any = block
    projections, y = layer.self_attn, layer.input_layernorm(x)
    batch, rows, _ = y.shape

    def heads(projected: Tensor) -> Tensor:
        return projected.view(batch, rows, -1, projections.head_dim).transpose(1, 2)

    query = rotate(heads(projections.q_proj(y)), cos, sin)
    key = rotate(heads(projections.k_proj(y)), cos, sin)
    attended = attend(query, key, heads(projections.v_proj(y)))
    x = x + projections.o_proj(attended.transpose(1, 2).reshape(batch, rows, -1))
    return x + layer.mlp(layer.post_attention_layernorm(x))


def by_hand(job: Job, attend: Attend) -> Iterator[Any]:
    """Train as `loops.ours` does."""
    model = job.build_model()
    parameters = list(model.parameters())
    optimizer = build_optimizer(parameters)
    loader = DataLoader(Tokens(job.seq_len), batch_size=job.microbatch_size)
    own = job.seq_len // dist.get_world_size()
    mine = slice(dist.get_rank() * own, (dist.get_rank() + 1) * own)
    while True:
        for batch in loader:
            optimizer.zero_grad(set_to_none=True)
            cos, sin = (table[mine] for table in model.rotary(job.seq_len))
            x = model.embed_tokens(batch["ids"][:, mine])
            for block in model.layers:
                x = run_block(block, x, cos, sin, attend)
            logits, targets = model.unembed(x).flatten(0, 1), batch["targets"][:, mine].flatten()
            loss = F.cross_entropy(logits, targets) / dist.get_world_size()
            loss.backward()
            gradients = [p.grad for p in parameters if p.grad is not None]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
            clip_grad_norm_(parameters, CLIP_NORM)
            optimizer.step()
            yield loss.detach() * dist.get_world_size()


HANDS: dict[str, Callable[[Job], Iterator[Any]]] = {
    "heads": partial(by_hand, attend=exchange),
    "gather": partial(by_hand, attend=gather),
}
