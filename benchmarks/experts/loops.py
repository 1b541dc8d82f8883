"""The same mixture with experts shared by Paceline, by hand, by replicated tokens, and in one process.

All of them train with fused AdamW and clipping, and the same auxiliary loss per microbatch. The last three
take the same global batches; Paceline's loader has an order of its own. Each is a generator: `next()` takes
one optimizer step and gives its loss, or this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.data import TaskData
from paceline.models import build_model
from paceline.models.moe import Mixture
from paceline.recipe import Recipe
from paceline.train.run import build_loader, build_trainer
from paceline.train.tasks import balanced_token_loss, build_optimizer
from paceline.world import World

Mix = Callable[[Tensor, Tensor, Tensor, Mixture], Tensor]


@dataclass(frozen=True)
class Job:
    """The training that all variants share.

    Attributes:
        recipe: model, data, batch, optimizer, and the layout of Paceline's variant.
        data: what `build_data(recipe)` gave.
        world: the ranks.
    """

    recipe: Recipe
    data: TaskData
    world: World

    def build_model(self) -> Any:
        torch.manual_seed(self.recipe.train.seed)
        return build_model(self.recipe, self.data)

    def microbatches(self) -> Iterator[list[dict[str, Tensor]]]:
        """Yield the microbatches of the same global batches on all ranks."""
        generator = torch.Generator().manual_seed(0)
        train = self.recipe.train
        loader = torch.utils.data.DataLoader(
            self.data.train,
            batch_size=train.global_batch_size,
            shuffle=True,
            generator=generator,
            drop_last=True,
        )
        while True:
            for batch in loader:
                parts = {key: value.split(train.microbatch_size) for key, value in batch.items()}
                yield [dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)]


def paceline(job: Job) -> Iterator[Any]:
    """`layout = "dp_replicate=2 ep=2"`."""
    assert job.recipe.train.steps is not None
    trainer = build_trainer(job.recipe, job.data, job.recipe.train.steps)
    loader = build_loader(job.recipe, trainer, job.data.train, train=True)
    while True:
        for share in loader:
            yield trainer.step(share).loss


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.given = received, sent
        found = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(found, rows, received, sent)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sent, received = ctx.given
        found = gradient.new_empty(sum(received), gradient.shape[1])
        dist.all_to_all_single(found, gradient.contiguous(), received, sent)
        return found, None, None


class _AddUp(torch.autograd.Function):
    """Sums over ranks in forward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        total = rows.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class _Copy(torch.autograd.Function):
    """Sums over ranks in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def compute(rows: Tensor, counts: list[int], mixture: Mixture) -> Tensor:
    """The outputs of this rank's experts to rows that are sorted by expert: a product per expert."""
    answers = []
    experts = zip(mixture.experts.gate_up_proj, mixture.experts.down_proj, strict=True)
    for part, (up, down) in zip(rows.split(counts), experts, strict=True):
        gate, inner = F.linear(part, up).chunk(2, -1)
        answers.append(F.linear(F.silu(gate) * inner, down))
    return torch.cat(answers)


def mix_by_exchange(tokens: Tensor, chosen: Tensor, weights: Tensor, mixture: Mixture) -> Tensor:
    """Mix by sending tokens to their experts and back."""
    num_ranks, num_choices = dist.get_world_size(), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=mixture.gate.out_features)
    arrived = torch.empty_like(counts)
    dist.all_to_all_single(arrived, counts)
    arrived = arrived.view(num_ranks, -1)
    sent, received = counts.view(num_ranks, -1).sum(1).tolist(), arrived.sum(1).tolist()
    rows = _Exchange.apply(tokens[order // num_choices], sent, received)
    # Those of one expert together, from all ranks.
    numbers = torch.arange(arrived.shape[1]).repeat(num_ranks).repeat_interleave(arrived.flatten())
    by_expert = numbers.argsort(stable=True)
    answers = compute(rows[by_expert], arrived.sum(0).tolist(), mixture)
    back = _Exchange.apply(answers[by_expert.argsort()], received, sent)
    return (back[order.argsort()].view(-1, num_choices, tokens.shape[1]) * weights.unsqueeze(-1)).sum(1)


def mix_by_sum(tokens: Tensor, chosen: Tensor, weights: Tensor, mixture: Mixture) -> Tensor:
    """Mix with all tokens on all ranks: each runs its experts, and the outputs are summed over ranks."""
    each = len(mixture.experts.gate_up_proj)
    tokens, weights = _Copy.apply(tokens), _Copy.apply(weights)
    own = chosen - dist.get_rank() * each
    is_own = (own >= 0) & (own < each)
    # Other ranks' choices get the sentinel, which sorts last.
    numbers = own.masked_fill(~is_own, each).flatten()
    order = numbers.argsort(stable=True)[: int(is_own.sum())]
    counts = torch.bincount(numbers, minlength=each)[:each].tolist()
    places = order // chosen.shape[1]
    answers = compute(tokens[places], counts, mixture) * weights.flatten()[order].unsqueeze(-1)
    return _AddUp.apply(torch.zeros_like(tokens).index_add(0, places, answers))


def share_out(model: nn.Module, mix: Mix) -> list[nn.Parameter]:
    """Leave each rank its experts, and change how mixtures find theirs. Returns the experts' parameters."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for mixture in model.modules():
        if isinstance(mixture, Mixture):
            for key in ("gate_up_proj", "down_proj"):
                part = getattr(mixture.experts, key).detach().chunk(num_ranks)[rank].clone()
                setattr(mixture.experts, key, nn.Parameter(part))
                found.append(getattr(mixture.experts, key))

            def forward(self: Mixture, x: Tensor) -> Any:
                tokens = x.flatten(0, 1)
                chances = self.gate(tokens).softmax(-1)
                weights, chosen = chances.topk(self.num_choices, -1)
                weights = weights / weights.sum(-1, keepdim=True)
                output = mix(tokens, chosen, weights, self).view_as(x)
                shares = torch.bincount(chosen.flatten(), minlength=self.gate.out_features) / chosen.numel()
                return output, self.gate.out_features * (shares * chances.mean(0)).sum(), shares.max()

            mixture.forward = MethodType(forward, mixture)
    return found


def train_by_hand(job: Job, mix: Mix, *, replicates: bool) -> Iterator[Any]:
    """Train with experts shared over all ranks.

    Args:
        job: the training.
        mix: how tokens meet experts.
        replicates: whether all ranks run all microbatches; if not, each runs its share.
    """
    model, rank, num_ranks = job.build_model(), dist.get_rank(), dist.get_world_size()
    experts = share_out(model, mix)
    others = [p for p in model.parameters() if all(p is not expert for expert in experts)]
    optimizer = build_optimizer(job.recipe, list(model.named_parameters()))
    for batches in job.microbatches():
        share = len(batches) // num_ranks
        weight, total = sum(int((each["targets"] != -100).sum()) for each in batches), 0.0
        for batch in batches if replicates else batches[rank * share : (rank + 1) * share]:
            loss = balanced_token_loss(model(batch["ids"]), batch)[0] / weight
            loss.backward()
            total += loss.item()
        if not replicates:
            flat = torch.cat([p.grad.flatten() for p in others if p.grad is not None])
            dist.all_reduce(flat)
            for p, part in zip(others, flat.split([p.numel() for p in others]), strict=True):
                p.grad = part.view_as(p)
        squares = torch.stack([p.grad.square().sum() for p in experts if p.grad is not None]).sum()
        dist.all_reduce(squares)
        squares += torch.stack([p.grad.square().sum() for p in others if p.grad is not None]).sum()
        scale = min(1.0, job.recipe.train.clip_norm / (squares.sqrt().item() + 1e-6))
        torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], scale)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield total


def by_hand(job: Job) -> Iterator[Any]:
    """Train with torch's all_to_all_single around the experts."""
    return train_by_hand(job, mix_by_exchange, replicates=False)


def replicated(job: Job) -> Iterator[Any]:
    """As transformers' expert parallelism: all ranks run all tokens, and skip other ranks' experts."""
    return train_by_hand(job, mix_by_sum, replicates=True)


def one_process(job: Job) -> Iterator[Any]:
    """Train the whole model on rank 0, with accumulation; the other ranks wait."""
    if job.world.rank:
        while True:
            yield None
    model = job.build_model()
    optimizer = build_optimizer(job.recipe, list(model.named_parameters()))
    for batches in job.microbatches():
        weight, total = sum(int((each["targets"] != -100).sum()) for each in batches), 0.0
        for batch in batches:
            loss = balanced_token_loss(model(batch["ids"]), batch)[0] / weight
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.recipe.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield total


VARIANTS: dict[str, Callable[[Job], Iterator[Any]]] = {
    "paceline": paceline,
    "by_hand": by_hand,
    "replicated": replicated,
    "one_process": one_process,
}
