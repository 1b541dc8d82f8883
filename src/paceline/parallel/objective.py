"""`Objective`: the computation on a batch, in two parts that can run on different ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

Result = TypeVar("Result")
# From a batch on the device to (sum of losses, weight).
Compute = Callable[[Any], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Objective(Generic[Result]):
    """A forward and the computation on its output, for example the loss.

    A rank that holds a whole model calls the objective. Ranks that hold stages of it run `forward` on every
    stage and `loss` on the last one.

    Attributes:
        forward: from a batch on the device to the model's output.
        loss: from (output, batch) to the result; in training (sum of losses, weight).
        has_output: whether `forward` returns the output of one model. The loss over several models cannot be
            divided, so `forward` computes all of it.
        measure: in training, from (output, batch) to further sums and weights of a microbatch, in turn.
    """

    forward: Callable[[Any], Any]
    loss: Callable[[Any, Any], Result]
    has_output: bool = True
    measure: Callable[[Any, Any], Tensor] | None = None

    def __call__(self, batch: Any) -> Result:
        """Run both on one batch."""
        return self.loss(self.forward(batch), batch)


Loss = Objective[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Trial:
    """A forward of an example batch, which calling it runs, and what the loss does with its output.

    Attributes:
        forward: from the model to the output.
    """

    forward: Callable[[nn.Module], Any]
    loss: Callable[[Any], Any]

    def __call__(self, model: nn.Module) -> Any:
        """Run the forward alone."""
        return self.forward(model)
