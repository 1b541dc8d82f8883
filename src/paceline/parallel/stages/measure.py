"""Measures how long each part of a model takes between two places at which it may be cut.

Every part runs as a stage of its own, forward and backward, with random numbers as what it receives. So no
rank needs the whole model: parameters on the meta device have numbers while their part runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.dropout.replacements import Masks
from paceline.parallel.stages.plan import StageCut
from paceline.parallel.stages.received import receive
from paceline.parallel.stages.record import LearnedTensor, record_forward
from paceline.parallel.stages.stage import run_stage
from paceline.torch_seams.modules import own_buffers, own_parameters

# The fastest of so many runs counts, after one that warms up: other processes only make a run slower.
_NUM_RUNS = 3
# The scale of random weights: activations stay finite over many layers.
_SCALE = 0.02


@dataclass(frozen=True)
class TimedBatch:
    """A batch on which the parts of a model are timed.

    Attributes:
        forward: calls the model on it.
        loss: from the model's output to the sum of losses.
        num_samples: in it.
    """

    forward: Callable[[nn.Module], Any]
    loss: Callable[[Any], Tensor]
    num_samples: int


def measure_costs(
    model: nn.Module,
    blocks: Collection[str],
    batch: TimedBatch,
    masks: Masks,
    device: torch.device,
    *,
    has_modes: bool,
) -> list[float]:
    """Return the seconds of each segment's forward and backward, with the loss: the mean over all ranks.

    Collective over the world: all ranks get the same numbers. Gradients, buffers and weights are unchanged.

    Args:
        model: whole; on `device` or on the meta device.
        blocks: full names of the modules that begin a segment.
        batch: to run.
        masks: the model's dropout.
        device: of the laid-out model.
        has_modes: see `run_stage`.

    Raises:
        PacelineError: PL481 to PL484 for a model that cannot be cut before each of its blocks.
    """
    samples = range(batch.num_samples)
    with masks.drawing(0, samples):
        record = record_forward(model, blocks, lambda: batch.forward(model), device)
    cut = StageCut(record, tuple(range(record.num_segments + 1)))
    cut.check_writes()
    costs = []
    for segment in range(record.num_segments):
        needed = {number for number, segments in record.parameters.items() if segment in segments}
        with _lent_values(model, needed, device):
            runs = []
            for _ in range(1 + _NUM_RUNS):
                with masks.drawing(0, samples):
                    runs.append(_time_segment(model, blocks, cut, segment, batch, device, has_modes))
        costs.append(min(runs[1:]))
    return _agree(costs, device)


def _time_segment(
    model: nn.Module,
    blocks: Collection[str],
    cut: StageCut,
    segment: int,
    batch: TimedBatch,
    device: torch.device,
    has_modes: bool,
) -> float:
    crossing = cut.crossings[segment]
    received, _ = receive(crossing, [_make_received(each, device) for each in crossing])
    _wait(device)
    started_s = time.perf_counter()
    made, output = run_stage(
        list(model.named_modules()),
        blocks,
        cut,
        segment,
        received,
        lambda: batch.forward(model),
        device,
        has_modes=has_modes,
    )
    roots = [made[each.made] for each in cut.crossings[segment + 1]]
    if segment + 1 == cut.num_stages:
        roots = [batch.loss(output)]
    roots = [root for root in roots if root.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    _wait(device)
    return time.perf_counter() - started_s


def _make_received(each: LearnedTensor, device: torch.device) -> Tensor:
    made = torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device=device)
    return _draw(made, 1.0) if made.is_floating_point() or made.is_complex() else made.zero_()


def _draw(tensor: Tensor, std: float) -> Tensor:
    """Fill a tensor with normal numbers; the user's generators are left alone."""
    generator = torch.Generator(tensor.device).manual_seed(0)
    return tensor.normal_(std=std, generator=generator)


@contextmanager
def _lent_values(model: nn.Module, needed: Collection[int], device: torch.device) -> Iterator[None]:
    """Put tensors of their own in the place of parameters and buffers, which keep values and gradients.

    Args:
        model: whole.
        needed: ids of the parameters that need numbers.
        device: of the numbers.
    """
    twins: dict[int, Tensor] = {}
    replaced: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for module in list(model.modules()):
            for key, tensor in [*own_parameters(module).items(), *own_buffers(module).items()]:
                if tensor is None or (
                    isinstance(tensor, nn.Parameter) and tensor.is_meta and id(tensor) not in needed
                ):
                    continue
                if id(tensor) not in twins:
                    twins[id(tensor)] = _make_twin(tensor, device)
                replaced.append((module, key, tensor))
                setattr(module, key, twins[id(tensor)])
        yield
    finally:
        for module, key, tensor in reversed(replaced):
            setattr(module, key, tensor)


def _make_twin(tensor: Tensor, device: torch.device) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.clone()
    values = tensor.detach()
    if tensor.is_meta:
        values = _draw(torch.empty_like(tensor, device=device, requires_grad=False), _SCALE)
    twin = nn.Parameter(values, requires_grad=tensor.requires_grad)
    twin.__dict__.update(tensor.__dict__)
    return twin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agree(costs: list[float], device: torch.device) -> list[float]:
    """Return the mean over all ranks; rank 0's sum is everybody's, to the bit."""
    total = torch.tensor(costs, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    dist.broadcast(total, 0)
    return [cost / dist.get_world_size() for cost in total.tolist()]
