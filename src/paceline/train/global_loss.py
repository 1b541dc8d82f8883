"""Computes a loss over the outputs of the whole global batch, for losses that compare samples (contrastive).

On a microbatch such a loss has fewer samples to compare, so its value differs. Here it is computed once, on
all outputs, in two passes (GradCache, Gao et al. 2021, https://arxiv.org/abs/2101.06983):

1. Every rank runs the forward of its microbatches without a graph. The outputs are gathered
   (`whole_batch.py`), so that every rank has all of them, in the order of microbatches.
2. Every rank computes the loss on them, and its gradient with respect to the outputs. This is the same
   computation on the same bits, whichever rank ran a microbatch.
3. Every rank runs its microbatches again, with the same random numbers. Backward begins with the slice of
   that gradient that belongs to the microbatch's output. Gradients are then reduced as in any other step.

The result is the gradient of the loss on the whole batch, with the activations of one microbatch in memory.
The cost is a second forward, and memory for the outputs of the global batch on every rank.

Under pp, both passes run the stages of their microbatches. The ranks of the last stage have the outputs, so
they alone gather them and compute the loss; each gathers over the data ranks of the same stage.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.one_tensor import gather_objects
from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.mesh import Mesh
from paceline.parallel.objective import Loss, Objective
from paceline.parallel.tensor.vocabulary import CutTensor
from paceline.torch_seams.trees import tree_flatten, tree_unflatten
from paceline.train.batches import weigh
from paceline.train.loss_parameters import find_leaves
from paceline.train.precision import Precision
from paceline.train.runners.runner import Runner
from paceline.train.whole_batch import Whole, gather_batch, gather_whole


class GlobalLoss:
    """The two passes that give microbatches the gradients of one loss over all of them.

    Args:
        forward: from (model, batch) to the output; runs on microbatches.
        loss: from (output, batch) of the whole global batch to (sum of losses, weight) or their mean.
        mesh: the ranks, or `None` in a world of one.
        precision: dtype and device.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Any, Any], Any],
        loss: Callable[[Any, Any], Any],
        mesh: Mesh | None,
        precision: Precision,
    ) -> None:
        self._model = model
        self._forward = forward
        self._loss = loss
        self._dp = mesh.dp if mesh is not None and mesh.dp.size > 1 else None
        self._precision = precision

    def prepare(self, runner: Runner, share: Share, *, step: int, phase: int) -> tuple[Loss, Share]:
        """Run the first pass and the loss; collective.

        Args:
            step, phase: as for `Work`, so that both passes draw the same random numbers.

        Returns:
            The arguments of `Update.run`: the second pass as an objective, and the share that it runs on.
        """
        first_pass: Objective[Any] = Objective(self.run, lambda output, batch: output)
        outputs = runner.run_forward(first_pass, share, step=step, phase=phase)
        second_pass = Objective(lambda item: self.run(item["batch"]), _begin)
        if not runner.has_outputs:
            items = [(number, {"batch": own}) for number, own in share.microbatches]
            return second_pass, dataclasses.replace(share, microbatches=items)
        counts = self._count_samples(share)
        whole = gather_whole(
            [(number, out) for (number, _), out in zip(share.microbatches, outputs, strict=True)],
            counts,
            self._dp,
            "output",
        )
        batch = gather_batch(share.microbatches, counts, self._dp, self._precision.place_batch)
        total, weight, gradients = self._differentiate(whole, batch, share.num_samples, runner)
        microbatches = []
        for number, own in share.microbatches:
            start = sum(counts[:number])
            slices = [
                None
                if gradient is None
                else gradient[start : start + counts[number]]
                if is_per_sample
                else gradient
                if number == 0  # an output that all samples share gets its gradient once
                else torch.zeros_like(gradient)
                for gradient, is_per_sample in zip(gradients, whole.per_sample, strict=True)
            ]
            # One microbatch reports the loss, so that the sum over microbatches counts it once.
            own_loss = (total, weight) if number == 0 else (torch.zeros_like(total), torch.zeros_like(weight))
            microbatches.append((number, {"batch": own, "gradients": slices, "loss": own_loss}))
        return second_pass, dataclasses.replace(share, microbatches=microbatches)

    def join(self, outputs: list[Any], share: Share) -> tuple[Any, Any]:
        """Return the output and the batch of a whole global batch, from this rank's outputs; collective."""
        counts = self._count_samples(share)
        own = zip(share.microbatches, outputs, strict=True)
        whole = gather_whole([(number, out) for (number, _), out in own], counts, self._dp, "output")
        return whole.build(), gather_batch(share.microbatches, counts, self._dp, self._precision.place_batch)

    def run(self, batch: Any) -> Any:
        """Return the output of a microbatch, with cut tensors made whole."""
        return make_whole(self._forward(self._model, batch))

    def _differentiate(
        self, whole: Whole, batch: Any, num_samples: int, runner: Runner
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Return the loss, its weight, and the sum's gradient with respect to each leaf of the output."""
        leaves = [
            leaf.detach().requires_grad_()
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
            else leaf
            for leaf in whole.leaves
        ]
        learned = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        with torch.enable_grad(), self._precision.autocast():
            result = self._loss(tree_unflatten(leaves, whole.spec), batch)
            total, weight = weigh(result, torch.empty(num_samples))
        if not total.requires_grad:
            raise PacelineError(
                "PL412",
                saw="the loss of the global batch does not depend on the output of forward=.",
                rule="Its gradient is what an update applies.",
                fix="Compute the loss from the model's output, outside of torch.no_grad() and without "
                "detach().",
            )
        _check_inputs(total, learned)
        # Scale already here: in fp16, small gradients of the outputs would vanish.
        unit = 2.0 ** math.ceil(math.log2(num_samples))
        scaled = total if runner.scaler is None else runner.scaler.scale(total / unit)
        found = iter(torch.autograd.grad(scaled, learned, allow_unused=True))
        by_leaf = [next(found) if any(leaf is x for x in learned) else None for leaf in leaves]
        if runner.scaler is not None:
            factor = unit * runner.scaler.scale_of_gradients()
            by_leaf = [None if g is None else g.float() * factor for g in by_leaf]
        return total.detach(), weight.detach().to(total.device), by_leaf

    def _count_samples(self, share: Share) -> list[int]:
        """Return the number of samples of each microbatch of the global batch; collective over dp."""
        own = [
            (number, len(samples))
            for (number, _), samples in zip(share.microbatches, share.samples, strict=True)
        ]
        if self._dp is None:
            return [count for _, count in own]
        found = gather_objects(own, self._dp.group)
        return [count for _, count in sorted(chain.from_iterable(found))]


def make_whole(output: Any) -> Any:
    """Return a nest with its cut tensors made whole; collective over tp where there are any."""
    leaves, spec = tree_flatten(output)
    return tree_unflatten([x.whole() if isinstance(x, CutTensor) else x for x in leaves], spec)


def _begin(output: Any, item: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the loss of a microbatch's second pass: its backward begins with the gradient of the outputs."""
    total, weight = item["loss"]
    pairs = [
        (leaf, gradient)
        for leaf, gradient in zip(tree_flatten(output)[0], item["gradients"], strict=True)
        if gradient is not None and leaf.requires_grad
    ]
    if not pairs:
        return total, weight
    outputs, gradients = zip(*pairs, strict=True)
    return _Begin.apply(total, len(outputs), *outputs, *gradients), weight  # type: ignore[no-untyped-call]


class _Begin(torch.autograd.Function):
    """A number whose value and whose gradients with respect to the outputs are given."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, num_outputs: int, *tensors: Tensor) -> Tensor:
        outputs, gradients = tensors[:num_outputs], tensors[num_outputs:]
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [output.dtype for output in outputs]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        own = [(gradient * grad).to(dtype) for gradient, dtype in given]
        return None, None, *own, *[None] * len(own)


def _check_inputs(total: Tensor, outputs: list[Tensor]) -> None:
    """Raise PL415 if the loss uses a trained tensor that is not an output: its gradient would be lost."""
    known = set(map(id, outputs))
    for variable in find_leaves(total):
        if id(variable) not in known:
            raise PacelineError(
                "PL415",
                saw=f"the loss uses a trained tensor of shape {list(variable.shape)} that is not in the "
                "output of forward=.",
                rule='With loss_over="global_batch" gradients reach the model through the outputs alone.',
                fix="Return that parameter (a temperature, for example) from forward= along with the other "
                "outputs.",
            )
