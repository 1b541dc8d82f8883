"""The same training under a layout, with Paceline's Trainer and by hand with bare torch.

Both train one model from the same weights on the same samples in the same order, with the same optimizer
groups and clipping. Each is a generator: `next()` takes one optimizer step and gives the loss of this rank's
last microbatch (by hand) or of the global batch (Trainer), not yet read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader, Dataset

from paceline import Trainer
from paceline.models import Gpt
from paceline.recipe import Layout
from paceline.recipe.schema import GptModel

VOCAB_SIZE = 256
CLIP_NORM = 1.0
_LOG_EVERY = 10
_NUM_SAMPLES = 4096


@dataclass(frozen=True)
class Job:
    """The training that both loops do.

    Attributes:
        model: keys of a recipe's [model].
        layout: as for `Trainer(layout=...)`.
        seq_len: tokens of a sample.
        microbatch_size: samples per forward.
        num_microbatches: per rank of dp and step.
    """

    model: dict[str, Any]
    layout: str
    seq_len: int
    microbatch_size: int
    num_microbatches: int

    @property
    def degrees(self) -> Layout:
        return Layout.parse(self.layout)

    @property
    def global_batch_size(self) -> int:
        return self.degrees.dp_shard * self.num_microbatches * self.microbatch_size

    def build_model(self) -> Gpt:
        torch.manual_seed(0)
        return Gpt(GptModel(kind="gpt", **self.model), VOCAB_SIZE, self.seq_len)


class Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens; the speed doesn't depend on which."""

    def __init__(self, seq_len: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(VOCAB_SIZE, (_NUM_SAMPLES, seq_len + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"ids": self._tokens[number, :-1], "targets": self._tokens[number, 1:]}


def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused AdamW, weight decay on matrices only. Split over tp, the matrices are DTensors and the norms
    are not: each group is of one kind, so that a fused optimizer takes it."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-4, fused=True)


def ours(job: Job) -> Iterator[Any]:
    """Paceline: the model and the layout in words."""
    dataset = Tokens(job.seq_len)
    trainer = Trainer(
        job.build_model(),
        forward=lambda model, batch: model(batch["ids"]),
        loss=_sum_losses,
        optimizer=lambda named: build_optimizer([p for _, p in named]),
        layout=job.layout,
        example={key: value.unsqueeze(0).expand(2, -1) for key, value in dataset[0].items()},
        reduction="fast",
        microbatch_size=job.microbatch_size,
        clip_norm=CLIP_NORM,
    )
    loader = trainer.loader(dataset, global_batch_size=job.global_batch_size, shuffle=False)
    while True:
        for share in loader:
            yield trainer.step(share).loss


def by_hand(job: Job) -> Iterator[Any]:
    """Train as the tutorials of torch and torchtitan do, with their fastest settings."""
    degrees = job.degrees
    mesh = init_device_mesh("cpu", (degrees.dp_shard, degrees.tp), mesh_dim_names=("dp", "tp"))
    if degrees.dp_shard > 1 and degrees.tp > 1:
        mesh._flatten("all")  # for norms over both: one all-reduce, not one per axis
    model = job.build_model()
    if degrees.tp > 1:
        split_by_hand(model, mesh["tp"])
    if degrees.dp_shard > 1:
        shard_by_hand(model, mesh["dp"], reshard=degrees.zero == 3)
    parameters = list(model.parameters())
    optimizer = build_optimizer(parameters)
    batches = _read(job, mesh.get_local_rank("dp"))
    last = job.num_microbatches - 1
    step = 0
    while True:
        optimizer.zero_grad(set_to_none=True)
        for number in range(job.num_microbatches):
            batch = next(batches)
            if isinstance(model, FSDPModule) and degrees.zero < 3:
                model.set_reshard_after_backward(number == last)
            with loss_parallel() if degrees.tp > 1 else nullcontext():
                logits = model(batch["ids"]).flatten(0, 1)
                # FSDP averages over its ranks; every microbatch has as many tokens as any other.
                loss = cross_entropy(logits, batch["targets"].flatten()) / job.num_microbatches
                loss.backward()  # type: ignore[no-untyped-call]
        _clip([p.grad for p in parameters if p.grad is not None], parameters)
        optimizer.step()
        if step % _LOG_EVERY == 0:
            loss.item()
        step += 1
        yield loss.detach() * job.num_microbatches


def shard_by_hand(model: Gpt, mesh: DeviceMesh, *, reshard: bool) -> None:
    """`fully_shard` for every block, then for the rest, as in torch's FSDP2 tutorial."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    # The root is needed again as soon as backward begins.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def split_by_hand(model: Gpt, mesh: DeviceMesh) -> None:
    """torchtitan's plan for Llama without sequence parallelism. The input of attention and of the
    feed-forward becomes a DTensor once, so that backward has one all-reduce for it and not one per matrix."""
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "self_attn": PrepareModuleInput(
                    input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
                ),
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(),
            },
        )
    plan: dict[str, Any] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        # The head is a plain matrix product in this model: with a DTensor as its input the logits are one,
        # split along the vocabulary.
        "norm": PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
        ),
    }
    if model.lm_head is not None:
        plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, plan)


def _clip(gradients: list[Tensor], parameters: list[nn.Parameter]) -> None:
    """`clip_grad_norm_`, which doesn't take tensors of several meshes, for each kind of them."""
    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = []
    for found in kinds.values():
        norm = get_total_norm(found)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for mesh in kinds:
        same = [
            p for p in parameters if (p.grad.device_mesh if isinstance(p.grad, DTensor) else None) == mesh
        ]
        clip_grads_with_norm_(same, CLIP_NORM, total)


def _sum_losses(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    targets = batch["targets"].flatten()
    return cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), targets.numel()


def _read(job: Job, rank: int) -> Iterator[dict[str, Tensor]]:
    """Yield this rank's microbatches: of every global batch a block, as the Trainer shares them out."""
    size, own = job.microbatch_size, job.num_microbatches
    places = [
        list(range(start, start + size))
        for first in range(0, _NUM_SAMPLES, job.global_batch_size)
        for start in range(first + rank * own * size, first + (rank + 1) * own * size, size)
    ]
    loader = DataLoader(Tokens(job.seq_len), batch_sampler=places)
    while True:
        yield from loader


LOOPS = {"paceline": ours, "by_hand": by_hand}
