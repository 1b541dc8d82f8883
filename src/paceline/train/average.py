"""Averages a model's weights over the steps of a training, on any layout.

Each rank averages the parts of the parameters that it holds. The average of an element follows from this
element alone, so on any layout it has the bits of `torch.optim.swa_utils.AveragedModel` in one process.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline.errors import PacelineError
from paceline.parallel.placement import local
from paceline.parallel.shard.setup import copied_model_error
from paceline.signatures import explain_arguments
from paceline.train.own_step import refuse_in_pass
from paceline.train.update import Update, Updated


class Average:
    """An exponential moving average of a model's parameters; buffers are those of the model.

    The first update copies the weights. Each further one adds `1 - decay` of their difference, as
    `AveragedModel` with `get_ema_multi_avg_fn(decay)` does. It has `state_dict` and `load_state_dict`, so
    `trainer.track(average=...)` saves it, and a checkpoint fits any layout.

    Args:
        model: laid out or plain.
        decay: at least 0 and below 1.
        before_write: called before weights are written to.

    Attributes:
        num_averaged: the number of updates.
        is_applied: whether the model has the average in place of its weights.

    Raises:
        PacelineError: PL400 for another decay.
    """

    @explain_arguments
    def __init__(
        self, model: nn.Module, decay: float, *, before_write: Callable[[], None] = lambda: None
    ) -> None:
        if not 0 <= decay < 1:
            raise PacelineError(
                "PL400",
                saw=f"a decay of {decay!r} for an average of weights (ema).",
                rule="It is a number of at least 0 and below 1.",
                fix="Pass for example ema=0.999.",
            )
        self.decay, self.num_averaged, self.is_applied = decay, 0, False
        self._before_write = before_write
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._parameters = dict(model.named_parameters())
        self._values = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights into the average; call it on every rank after each step."""
        refuse_in_pass("average.update()")
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for value, parameter in self._pairs():
            values, parameters = groups.setdefault((value.device, value.dtype), ([], []))
            values.append(value)
            parameters.append(parameter)
        for values, parameters in groups.values():
            if self.num_averaged:
                self._average(values, parameters, self.num_averaged)
            else:
                for value, parameter in zip(values, parameters, strict=True):
                    value.copy_(parameter)
        self.num_averaged += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the average in place of its weights inside the context, and then its weights again.

            with trainer.average.applied():
                print(trainer.evaluate(valid))
                trainer.gather_into(plain)

        Every rank enters it. A trainer neither steps nor saves inside (PL545).
        """
        assert not self.is_applied, "the average is applied already"
        self._swap()
        self.is_applied = True
        try:
            yield
        finally:
            self._swap()
            self.is_applied = False

    def state_dict(self) -> dict[str, Any]:
        """Return the average by full names, with this rank's parts. Refers to its tensors, copies none."""
        return {"num_averaged": self.num_averaged, "parameters": dict(self._values)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved average with this rank's parts."""
        self.num_averaged = operator.index(state["num_averaged"])
        for name, value in self._values.items():
            if not value.is_meta:
                local(value).copy_(local(state["parameters"][name]))

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's parts of the average and of the weights; under pp those of its stages."""
        for name, parameter in self._parameters.items():
            if not parameter.is_meta:
                yield local(self._values[name]), local(parameter.detach())

    @torch.no_grad()
    def _swap(self) -> None:
        self._before_write()
        if not self.num_averaged:
            return  # nothing was averaged yet, so the average is the weights
        for value, parameter in self._pairs():
            kept = parameter.clone()
            parameter.copy_(value)
            value.copy_(kept)


def build_averages(
    decay: float | Mapping[str, float] | None,
    models: Mapping[str, nn.Module],
    before_write: Callable[[], None],
) -> dict[str, Average]:
    """Return the averages by name of the model.

    Args:
        decay: of all models, or by name.
        models: laid out.
        before_write: as for `Average`.

    Raises:
        PacelineError: PL404 for a name that no model has.
    """
    if decay is None:
        return {}
    decays = decay if isinstance(decay, Mapping) else dict.fromkeys(models, decay)
    for name in decays.keys() - models.keys():
        raise PacelineError(
            "PL404",
            saw=f"ema for {name!r}, which is not one of the models {', '.join(models)}.",
            rule="Averages and models share their names.",
            fix="Use these names, or one number for all models.",
        )
    return {name: Average(models[name], each, before_write=before_write) for name, each in decays.items()}


def update_averages(averages: Mapping[str, Average], done: Mapping[str, Updated]) -> None:
    """Update the averages of the models that a step has updated and not skipped."""
    for name, average in averages.items():
        if name in done and done[name].skipped is None:
            average.update()


def name_averages(averages: Mapping[str, Average]) -> dict[str, Average]:
    """Return averages by their names in a checkpoint."""
    return {"average" if name == "model" else f"average of {name}": each for name, each in averages.items()}


def refuse_averaged(averages: Iterable[Average]) -> None:
    """Raise PL545 for a step or a save while the model has an average in place of its weights."""
    if any(average.is_applied for average in averages):
        raise PacelineError(
            "PL545",
            saw="a step or a save inside of average.applied().",
            rule="The model has the average in place of its weights there.",
            fix="Train and save after the with block.",
        )


def refuse_copied_models(objects: Mapping[str, Any], updates: Iterable[Update]) -> None:
    """Raise PL929 for a tracked `AveragedModel` of a model that dp_shard or pp divides."""
    is_copyable = all(
        not update.placement.holders and not any(isinstance(p, DTensor) for p in update.model.parameters())
        for update in updates
    )
    for name, value in objects.items():
        if isinstance(value, AveragedModel) and not is_copyable:
            raise copied_model_error(f"track({name}=AveragedModel(...)) under dp_shard or pp")


def no_average_error() -> PacelineError:
    """Return PL404, for the average of a trainer that keeps none."""
    return PacelineError(
        "PL404",
        saw="trainer.average without ema=.",
        rule="A trainer averages the weights of the models that ema= gives a decay for.",
        fix="Pass ema=0.999 to Trainer.",
    )
