"""Checks how the cut into microbatches affects a model, before the first step of a start.

The probe runs a microbatch whole and cut in two, without a graph. It then restores buffers, statistics and
generators. If the trainer chose the size of microbatches, a loss that depends on the cut is refused, because
the user has not chosen that objective. If forward changes buffers, the probe separates changes that do not
depend on the samples from those that do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.finding import Finding
from paceline.mesh import Mesh
from paceline.parallel.batchnorm import ForwardBuffer, list_forward_buffers
from paceline.parallel.objective import Loss
from paceline.phrases import name_some
from paceline.torch_seams.modules import BatchNormBase, own_buffers
from paceline.torch_seams.tensors import read_version
from paceline.torch_seams.trees import tree_leaves, tree_map, tree_map_only
from paceline.train.batches import count_samples
from paceline.train.runners.runner import Runner

log = logging.getLogger(__name__)

# A relative difference of losses that no rounding explains, by dtype.
_TOLERANCE = {"fp64": 1e-3, "fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
Sums = tuple[float, float]
_ONE_VALUE = "Expected more than 1 value per channel when training"


@dataclass(frozen=True)
class Halves:
    """A batch and its two halves, with the numbers of their samples."""

    whole: tuple[Any, Sequence[int]]
    parts: tuple[tuple[Any, Sequence[int]], tuple[Any, Sequence[int]]]


class Probe:
    """A trial of a model on a part of the first global batch.

    Args:
        models: all models that the loss may run.
        mesh: the ranks, or `None` in a world of one.
        is_divided: whether forwards of the model communicate with other ranks.
    """

    def __init__(
        self,
        models: list[nn.Module],
        runner: Runner,
        mesh: Mesh | None,
        *,
        is_divided: bool,
        dtype: str,
    ) -> None:
        self._models = models
        self._runner = runner
        self._mesh = mesh
        self._is_divided = is_divided
        self._tolerance = _TOLERANCE[dtype]
        self._is_main = mesh is None or (mesh.reports and mesh.dp.rank == 0)
        self._norm = next(
            (
                name
                for model in models
                for name, module in model.named_modules()
                if isinstance(module, BatchNormBase) and module.training
            ),
            None,
        )

    def warn_batchnorm(self, share: Share) -> None:
        """Log PL413 for BatchNorm, whose statistics are those of a microbatch by design."""
        if self._norm is not None and self._is_main:
            log.warning("%s", _describe_batchnorm(self._norm, share))

    def check_cut(self, objective: Loss, share: Share) -> None:
        """Raise PL413 if the loss of a microbatch is not the sum over its samples. Collective.

        With BatchNorm only the loss on given outputs is checked.

        Args:
            objective: forward and loss.
            share: of the first global batch.
        """
        halves = self._cut_together(share)
        if halves is None or (self._norm is not None and not objective.has_output):
            return
        try:
            with self._undone():
                if self._norm is None:
                    found = self._measure(objective, halves)
                else:
                    found = self._measure_loss(objective, halves)
        except Exception:  # a batch that cannot be cut along samples, such as packed sequences
            return
        if self._differ(*found) and not self._runner.draws_unsafely:
            whole, _, cut = found
            with self._undone():
                mixing = self._find_mixing(objective, halves) if self._norm is None else ""
            raise _cut_error(whole[0] / whole[1], cut[0] / cut[1], len(halves.whole[1]), share, mixing)

    def find_buffers(self, run: Callable[[Any], Any], share: Share) -> list[ForwardBuffer]:
        """Return the buffers that forward changes alike for any samples; log PL416 for others. Collective.

        Args:
            run: from a batch on the device to anything; runs the forward.
            share: of the first global batch.
        """
        buffers = [buffer for model in self._models for buffer in list_forward_buffers(model)]
        if not buffers:
            return []
        changed, dependent = self._watch_buffers(run, share, buffers)
        if self._mesh is not None and self._mesh.dp.size > 1:
            owner = next(rank for rank, owned in enumerate(share.num_owned) if owned)
            box: list[Any] = [(changed, dependent)]
            dist.broadcast_object_list(box, group=self._mesh.dp.group, group_src=owner)
            changed, dependent = box[0]
        if dependent and self._is_main:
            log.warning("%s", _describe_dependent([buffers[number].name for number in dependent]))
        kept = [buffers[number] for number in changed if number not in dependent]
        warn_of_counts(kept if self._is_main else [], share)
        return kept

    def _watch_buffers(
        self, run: Callable[[Any], Any], share: Share, buffers: list[ForwardBuffer]
    ) -> tuple[list[int], list[int]]:
        """Return the numbers of the buffers that change, and of those that depend on the samples."""
        if not self._may_run(share):
            return [], []
        batch, samples = share.microbatches[0][1], share.samples[0]
        halves = self._cut_together(share)
        before = [(buffer.tensor, read_version(buffer.tensor)) for buffer in buffers]
        with self._undone():
            self._runner.try_forward(run, batch, samples, "probe")
            after = [buffer.read() for buffer in buffers]
            # Compare versions, not values: an iteration that has converged writes the same value again.
            changed = [
                number
                for number, (buffer, (tensor, version)) in enumerate(zip(buffers, before, strict=True))
                if buffer.tensor is not tensor or read_version(tensor) != version
            ]
        if not changed:
            return [], []
        if halves is None:
            return changed, changed
        with self._undone():
            try:
                self._runner.try_forward(run, *halves.parts[1], "other")
            except Exception:
                return changed, changed
            again = [buffer.read() for buffer in buffers]
        return changed, [n for n in changed if not _same(after[n], again[n])]

    def _measure(self, objective: Loss, halves: Halves) -> tuple[Sums, Sums, Sums]:
        """Return (sum of losses, weight) of a batch whole, whole with other random numbers, and in halves."""

        def run(batch: Any, samples: Sequence[int], seed: str) -> Sums:
            total, weight = self._runner.try_forward(objective, batch, samples, seed)
            return float(total), float(weight)

        parts = [run(*part, "probe") for part in halves.parts]
        return run(*halves.whole, "probe"), run(*halves.whole, "other"), _add(parts)

    def _find_mixing(self, objective: Loss, halves: Halves) -> str:
        """Return the first module whose output for a sample depends on other samples; "" if none is seen."""
        found: list[tuple[str, Tensor]] = []

        def note(name: str, output: Any) -> None:
            found.extend(
                (name, leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim()
            )

        modules = [named for model in self._models for named in model.named_modules()]
        handles = [
            module.register_forward_hook(lambda _module, _args, output, name=name: note(name, output))
            for name, module in modules
        ]
        runs = []
        for batch, samples in (halves.whole, *halves.parts):
            self._runner.try_forward(objective, batch, samples, "probe")
            runs.append([each for each in found if len(each[1]) == len(samples)])
            found.clear()
        for handle in handles:
            handle.remove()
        for (name, whole), *parts in zip(*runs, strict=False):
            rows = torch.cat([part for _, part in parts]) if all(n == name for n, _ in parts) else whole
            if rows.shape == whole.shape and not torch.allclose(rows, whole, self._tolerance, 1e-6):
                return name or "the model"
        return ""

    def _measure_loss(self, objective: Loss, halves: Halves) -> tuple[Sums, Sums, Sums]:
        """Return the same as `_measure` for the loss alone: on one output, and on its rows in halves."""
        batch, samples = halves.whole
        size, first = len(samples), len(halves.parts[0][1])
        output, placed = self._runner.try_forward(
            lambda x: (objective.forward(x), x), batch, samples, "probe"
        )

        def run(start: int, stop: int, seed: str) -> Sums:
            def rows(tensor: Tensor) -> Tensor:
                return tensor[start:stop] if tensor.dim() and len(tensor) == size else tensor

            cut = [tree_map_only(Tensor, rows, nest) for nest in (output, placed)]
            total, weight = self._runner.try_forward(lambda _: objective.loss(*cut), batch, samples, seed)
            return float(total), float(weight)

        parts = [run(0, first, "probe"), run(first, size, "probe")]
        return run(0, size, "probe"), run(0, size, "other"), _add(parts)

    def _differ(self, whole: Sums, again: Sums, cut: Sums) -> bool:
        if not math.isclose(whole[0], again[0], rel_tol=1e-6, abs_tol=1e-9):
            return False  # random numbers that depend on how many were drawn before
        if not whole[1] or not cut[1]:
            return False
        one, other = whole[0] / whole[1], cut[0] / cut[1]
        return abs(one - other) > self._tolerance * max(abs(one), abs(other)) + 1e-6  # False for nan

    def _may_run(self, share: Share) -> bool:
        """Return whether this rank runs forwards now: all ranks of a divided model do, or none."""
        return bool(share.microbatches) and (not self._is_divided or min(share.num_owned) > 0)

    def _cut_together(self, share: Share) -> Halves | None:
        """Return what `_cut` returns, or nothing if another rank of a divided model has nothing.

        Ranks may have first microbatches of other sizes, and forwards of a divided model are collective.
        """
        halves = self._cut(share)
        if not self._is_divided:
            return halves
        assert self._mesh is not None
        found = [False] * self._mesh.group.size()
        dist.all_gather_object(found, halves is not None, group=self._mesh.group)
        return halves if all(found) else None

    def _cut(self, share: Share) -> Halves | None:
        """Return the first microbatch and its halves; for a single sample, the first two joined and each."""
        if not self._may_run(share):
            return None
        batch, samples = share.microbatches[0][1], share.samples[0]
        half = len(samples) // 2
        try:
            if half:
                if count_samples(batch) != len(samples):
                    return None
                leaves = [x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
                if any(len(x) != len(samples) for x in leaves):
                    return None
                one = tree_map_only(Tensor, lambda t: t[:half] if t.dim() else t, batch)
                two = tree_map_only(Tensor, lambda t: t[half:] if t.dim() else t, batch)
                return Halves((batch, samples), ((one, samples[:half]), (two, samples[half:])))
            if self._is_divided or len(share.microbatches) < 2:
                return None
            other, places = share.microbatches[1][1], share.samples[1]
            joined = tree_map(
                lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) and a.dim() else a, batch, other
            )
            return Halves((joined, [*samples, *places]), ((batch, samples), (other, places)))
        except Exception:  # samples that cannot be joined
            return None

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Restore all buffers at exit; run without gradients and without compiled code."""
        held = [
            (module, key, buffer, buffer.detach().clone())
            for model in self._models
            for module in model.modules()
            for key, buffer in own_buffers(module).items()
            if buffer is not None
        ]
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                yield
        finally:
            with torch.no_grad():
                for module, key, buffer, value in held:
                    own_buffers(module)[key] = buffer  # forward may have put another one there
                    buffer.copy_(value)


@contextmanager
def explain_single_sample(share: Share) -> Iterator[None]:
    """Turn BatchNorm's error about one value per channel into PL414, which names the microbatch sizes."""
    try:
        yield
    except ValueError as error:
        if _ONE_VALUE not in str(error):
            raise
        sizes = sorted({len(samples) for samples in share.samples})
        raise PacelineError(
            "PL414",
            saw=f"BatchNorm got one value per channel: a global batch of {share.num_samples} samples is "
            f"divided into {share.num_microbatches} microbatches, on this rank of "
            f"{', '.join(map(str, sizes))} samples.",
            rule="BatchNorm normalizes with the statistics of a microbatch, and one value has no variance.",
            fix="Set microbatch_size to 2 or more, such that no single sample is left over, or "
            "drop_last=True.",
        ) from error


def _add(parts: list[Sums]) -> Sums:
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(
        torch.equal(
            one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
        )
    )


def _cut_error(whole: float, cut: float, num_samples: int, share: Share, mixing: str) -> PacelineError:
    size = len(share.samples[0])
    mixes = f" The output of {mixing} for a sample depends on the other samples." if mixing else ""
    return PacelineError(
        "PL413",
        saw=f"the loss of {num_samples} samples is {whole:.5g} in one piece and {cut:.5g} in two. No "
        f"microbatch_size was given, so each global batch of {share.num_samples} would be divided into "
        f"{share.num_microbatches} microbatches of {size}.{mixes}",
        rule="A loss that compares samples, or a mean over targets if their number differs between samples, "
        "depends on that division, so the trainer must not choose it.",
        fix='If the loss compares samples, pass loss_over="global_batch". If it is a mean over targets, '
        "return (sum of losses, number of targets). Or choose: microbatch_size="
        f"{share.num_samples} computes a global batch in one piece.",
    )


def _describe_batchnorm(name: str, share: Share) -> Finding:
    return Finding(
        "PL413",
        name,
        f"BatchNorm normalizes each microbatch of {len(share.samples[0]) if share.samples else 0} samples "
        f"separately; a global batch of {share.num_samples} is divided into {share.num_microbatches}, "
        "because no microbatch_size was given.",
        "The size of microbatches affects the result.",
        f"Pass microbatch_size= to choose it; {share.num_samples} is the whole global batch.",
    )


def warn_of_counts(kept: Sequence[ForwardBuffer], share: Share) -> None:
    """Log PL416 for counters among the buffers that change once per step."""
    names, number = [each.name for each in kept if each.tensor.numel() == 1], share.num_microbatches
    if not names or number == 1:
        return
    finding = Finding(
        "PL416",
        name_some(names, 5),
        f"forward changes this number, and a global batch has {number} forwards.",
        "All microbatches of a step start from the same value, so it changes once per step, on any number of "
        "ranks. A loop that accumulates gradients changes it once per microbatch.",
        f"Count steps in it, or let each forward change it {number} times as much.",
    )
    log.warning("%s", finding)


def _describe_dependent(names: list[str]) -> Finding:
    shown = name_some(names, 5)
    return Finding(
        "PL416",
        shown,
        "forward changes this buffer depending on the samples, and ranks have different samples.",
        "The trainer merges the running statistics of BatchNorm over ranks. Each rank keeps its own copy of "
        "other buffers, and checkpoints have rank 0's, so the result depends on the number of ranks.",
        "Update it outside of forward, from values that all ranks have, or use BatchNorm's running "
        "statistics.",
    )
