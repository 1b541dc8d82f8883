"""The forms of experts that ep can share out: Paceline's own, and those of transformers.

One module holds the weights of all experts of a mixture, as parameters whose first dimension counts experts.
The experts of transformers choose at each call among several implementations, whose products have other bits
and need other shapes. `open_forward` replaces these by one: each token's answers are computed by a product
per expert, and weighted and added in the order of the token's choices, as transformers' `grouped_mm` adds
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.models.grouped import add_to_groups, multiply_groups
from paceline.models.moe import Experts, ask_experts, count_choices
from paceline.torch_seams.dispatch import without_functions
from paceline.torch_seams.modules import copy_frame
from paceline.torch_seams.tensors import is_fake

# From rows that are sorted by expert, and the number of rows for each expert, to the answers.
Answer = Callable[[Tensor, Tensor], Tensor]


class ExpertForm(ABC):
    """The experts of one mixture, whose weights are parameters with a first dimension that counts experts.

    Args:
        module: the experts, whole; its forward is replaced.

    Attributes:
        keys: the names of the module's parameters that ep divides.
        width: of a row.
    """

    keys: tuple[str, ...]
    width: int

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def list_weights(self) -> list[nn.Parameter]:
        """Return the parameters of `keys`, as they are now: whole, or a rank's part."""
        # In a trial forward they are no `nn.Parameter`, which `get_parameter` requires.
        return [getattr(self.module, key) for key in self.keys]

    @property
    def num_experts(self) -> int:
        """The number of experts whose weights the module holds now."""
        return self.list_weights()[0].shape[0]

    @abstractmethod
    def multiply(self, rows: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Return the answers of experts to rows.

        Args:
            rows: [rows, width], sorted by expert.
            counts: rows of each expert, int64 [experts].
            weights: of these experts, in the order of `keys`.
        """

    @abstractmethod
    def make_forward(self, num_experts: int, answer: Answer) -> Callable[..., Tensor]:
        """Return a forward for the module, as a function of the module and its inputs.

        Args:
            num_experts: of the mixture, on all ranks together.
            answer: computes the answers.
        """


class OwnForm(ExpertForm):
    """Experts of `paceline.models.moe`."""

    keys = ("gate_up_proj", "down_proj")

    def __init__(self, module: Experts) -> None:
        super().__init__(module)
        self.width = module.gate_up_proj.shape[2]

    def multiply(self, rows: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return Experts.multiply(rows, counts, *weights)

    def make_forward(self, num_experts: int, answer: Answer) -> Callable[..., Tensor]:
        return lambda module, rows, counts: answer(rows, counts)


class TransformersForm(ExpertForm):
    """Experts of transformers: a class with the decorator `use_experts_implementation`.

    The decorator's attributes describe the class: whether its experts have a gate and biases, and whether
    their matrices are transposed. The gate's own function is the class's `_apply_gate`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        # A copy that no hook and no stage of pp follows: the module computes a part per rank of ep, and an
        # activation is a module that would be called as often.
        self._described: Any = copy_frame(module)
        first = "gate_up_proj" if self._described.has_gate else "up_proj"
        keys = [first, "down_proj"]
        if self._described.has_bias:
            keys = [key for weight in keys for key in (weight, f"{weight}_bias")]
        self.keys = tuple(keys)
        self.width = getattr(module, first).shape[1 if self._described.is_transposed else 2]

    def multiply(self, rows: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Tensor:
        described, given = self._described, dict(zip(self.keys, weights, strict=True))
        inner = self._apply(self.keys[0], rows, counts, given)
        activate = described._apply_gate if described.has_gate else described.act_fn
        if is_fake(inner):
            inner = activate(inner)
        else:
            # By expert as well: kernels compute the last elements of a tensor in another way.
            parts = [activate(part) for part in torch.split(inner, counts.tolist()) if len(part)]
            inner = torch.cat(parts) if parts else activate(inner)
        return self._apply("down_proj", inner, counts, given)

    def _apply(self, key: str, rows: Tensor, counts: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        matrices = given[key].transpose(1, 2) if self._described.is_transposed else given[key]
        product = multiply_groups(rows, matrices, counts)
        return add_to_groups(product, given[f"{key}_bias"], counts) if f"{key}_bias" in given else product

    def make_forward(self, num_experts: int, answer: Answer) -> Callable[..., Tensor]:
        def forward(_: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            tokens = hidden.reshape(-1, hidden.shape[-1])
            if not torch.is_autocast_enabled(hidden.device.type):
                tokens = tokens.to(self.list_weights()[0].dtype)
            counts = count_choices(chosen, num_experts)
            answers = ask_experts(tokens, chosen, lambda rows: answer(rows, counts))
            # As transformers does: in the wider type of the two, and narrowed after the sum.
            added = (answers * weights.reshape(*answers.shape[:2], 1)).sum(1)
            return added.to(hidden.dtype).view(*hidden.shape[:-1], added.shape[-1])

        return forward


def hide_functions(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a forward whose functions no mode follows, except in trial forwards.

    A stage of pp follows the functions that the trial forward has called, and would not know the exchanges.
    """

    def hidden(module: nn.Module, tokens: Tensor, *others: Tensor) -> Tensor:
        if is_fake(tokens):
            return forward(module, tokens, *others)
        with without_functions():
            return forward(module, tokens, *others)

    return hidden


def is_decorated(module: nn.Module) -> bool:
    """Return whether transformers' decorator made a module's class, and its forward is not replaced."""
    if "_is_expert_parallel" not in vars(module) or not hasattr(type(module).forward, "__wrapped__"):
        return False
    weight = getattr(module, "down_proj", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 3 or not weight.is_floating_point():
        return False  # quantised
    own = vars(module).get("forward")
    return own is None or getattr(own, "__func__", None) is _forward_alone


def has_norm(module: nn.Module) -> bool:
    """Return whether the outputs of decorated experts go through a norm that all of them share."""
    # Its weights belong to all experts, so that no rank has their whole gradient.
    return bool(getattr(module, "has_post_expert_norm", False))


def open_forward(form: TransformersForm) -> None:
    """Set transformers' experts to one product per expert, in place, whatever the user has set."""
    # The form is made before: while stages of pp run, children carry forwards that follow each call.
    form.module.forward = MethodType(_forward_alone, form)


def _forward_alone(form: TransformersForm, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    answer: Answer = lambda rows, counts: form.multiply(rows, counts.cpu(), form.list_weights())  # noqa: E731
    return hide_functions(form.make_forward(form.num_experts, answer))(form.module, hidden, chosen, weights)
