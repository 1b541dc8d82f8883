"""Shows the inputs and outputs of every module in one step, forward and backward.

An event is a tensor at a module's boundary: `in` before its forward, `out` after it. Inputs count, because
the result of a module's own code between two children (attention between its projections) is the input of the
next child. The weights that a module has when its forward begins are events too, `weight NAME`, once per
step: they reveal a shard that was gathered in another type, or not gathered again. Events are numbered per
microbatch in the order of the forward. Gradients of these tensors carry the same numbers, so backward runs
through them in reverse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.share import Share
from paceline.parallel.stages.stage import is_stub
from paceline.torch_seams.dispatch import without_functions
from paceline.torch_seams.modules import own_parameters
from paceline.torch_seams.trees import keystr, tree_flatten_with_path, tree_leaves
from paceline.train.batches import weigh
from paceline.train.trainer import Trainer
from paceline.verifying.closeness import EPS
from paceline.verifying.observe import (
    digest,
    find_running,
    has_part_of_gradient,
    is_trial,
    place_batch,
    take_local,
    wrap_functions,
)
from paceline.verifying.precision import Modules, Types
from paceline.verifying.run_steps import Observer
from paceline.verifying.settings import list_hooks, list_module_settings

# The kinds of an event and of its gradient, as an observer gets them. The name is `microbatch/event`.
EVENT, EVENT_GRADIENT = "event", "gradient of event"
# The start of the side of a weight's event, and the microbatch number that such an event carries.
WEIGHT = "weight "
ONCE = -1


@dataclass(frozen=True)
class Event:
    """A tensor at the boundary of a module.

    Attributes:
        module: full name, empty for the model itself.
        call: number of the module's call in this microbatch, from 0.
        side: `"in"`, `"out"` or `"weight NAME"`.
        place: index among the tensors there.
    """

    module: str
    call: int
    side: str
    place: int

    @property
    def is_weight(self) -> bool:
        """Whether it is a weight that a forward found."""
        return self.side.startswith(WEIGHT)

    @property
    def weight(self) -> str:
        """The full name of that weight."""
        key = self.side.removeprefix(WEIGHT)
        return f"{self.module}.{key}" if self.module else key

    def __str__(self) -> str:
        return f"{self.module}|{self.call}|{self.side}|{self.place}"

    @classmethod
    def parse(cls, text: str) -> Event:
        """Parse the text that `str` gives for an event."""
        module, call, side, place = text.rsplit("|", 3)
        return cls(module, int(call), side, int(place))


class Watch:
    """The hooks on all modules of a trainer, active in one step.

    Args:
        observer: receives the events.
        step: that is watched.

    Attributes:
        step: that is watched.
        ran: numbers of the microbatches that this rank ran forward in that step, in order.
        microbatch: the number of the running microbatch, -1 outside.
        batches: digests of the tensors of this rank's microbatches, by `microbatch/place in the batch`.
        losses: by microbatch, (sum of losses, weight).
        types: the narrowest types that operations computed in.
    """

    def __init__(self, trainer: Trainer, observer: Observer, dtype: str, step: int) -> None:
        self.ran: list[int] = []
        self.microbatch = -1
        self._trainer, self._observer, self.step = trainer, observer, step
        self._waiting: list[tuple[int, Any]] | None = None
        self._numbers: list[int] = []
        self._inside = False
        self._calls: Counter[str] = Counter()
        self._shown: set[str] = set()
        self.batches: dict[str, str] = {}
        self.losses: dict[int, tuple[float, float]] = {}
        self.modules = Modules(trainer.model)
        self.types = Types(self.modules, EPS[dtype])
        wrap_functions(trainer, self._forward, self._loss)
        for name, module in trainer.model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                self._hook(name, module)

    @contextmanager
    def watching(self, step: int, share: Share) -> Iterator[None]:
        """Watch the step inside the block, which trains on `share`, if it is the one to be watched."""
        if step != self.step:
            yield
            return
        self._waiting = list(share.microbatches)
        self._numbers = [number for number, _ in share.microbatches]
        for number, batch in share.microbatches:
            for path, leaf in tree_flatten_with_path(batch)[0]:
                if isinstance(leaf, Tensor):
                    self.batches[f"{number}/{keystr(path)}"] = digest([leaf])
        with self.types:
            try:
                yield
            finally:
                self._waiting = None

    def _forward(self, inner: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
        if self._waiting is None or is_trial(self._trainer):
            return inner(model, batch)
        place = find_running(self._trainer)
        if place is None:
            assert self._waiting is not None
            self.microbatch = take_matching(self._trainer, self._waiting, batch)
        else:
            self.microbatch = self._numbers[place]
        if self.microbatch < 0:  # an idle round
            return inner(model, batch)
        if self.microbatch not in self.ran:  # a rank runs the forward once per stage
            self.ran.append(self.microbatch)
        self.types.microbatch = self.microbatch
        self._calls.clear()
        with self._in_forward():
            return inner(model, batch)

    def _loss(self, inner: Callable[..., Any], output: Any, batch: Any) -> Any:
        result = inner(output, batch)
        if self._waiting is not None and self.microbatch >= 0 and not is_trial(self._trainer):
            loss_sum, weight = weigh(result, batch)
            self.losses[self.microbatch] = float(loss_sum.detach()), float(weight.detach())
        return result

    @contextmanager
    def _in_forward(self) -> Iterator[None]:
        self._inside = self.types.is_forward = True  # forwards that backward recomputes are no events
        try:
            yield
        finally:
            self._inside = self.types.is_forward = False

    def _hook(self, name: str, module: nn.Module) -> None:
        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._inside:
                with without_functions():  # a stage follows the model's calls, and must not see these
                    self._show(name, "in", (args, kwargs))
                    self._show_weights(name, _module)

        def after(_module: nn.Module, args: Any, output: Any) -> None:
            if self._inside:
                with without_functions():
                    self._show(name, "out", output)
                self._calls[name] += 1

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def _show(self, name: str, side: str, nest: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
        for place, tensor in enumerate(tensors):
            if is_stub(tensor):
                continue
            event, microbatch = Event(name, self._calls[name], side, place), self.microbatch
            self._pass_on(microbatch, event, tensor)
            if tensor.requires_grad and not has_part_of_gradient(tensor):

                def show(gradient: Tensor, event: Event = event, microbatch: int = microbatch) -> None:
                    self._pass_on(microbatch, event, gradient, EVENT_GRADIENT)

                tensor.register_hook(show)  # type: ignore[no-untyped-call]

    def _show_weights(self, name: str, module: nn.Module) -> None:
        if name in self._shown:
            return
        self._shown.add(name)
        for key, parameter in own_parameters(module).items():
            if parameter is None or parameter.is_meta:  # on another stage
                continue
            if not hasattr(parameter, "to_local"):  # gathered, or never sharded
                event = Event(name, 0, f"{WEIGHT}{key}", 0)
                self._pass_on(ONCE, event, parameter)

    def _pass_on(self, microbatch: int, event: Event, tensor: Tensor, kind: str = EVENT) -> None:
        self._observer.tensor(self.step, kind, f"{microbatch}/{event}", "", take_local(tensor))


def take_matching(trainer: Trainer, waiting: list[tuple[int, Any]], batch: Any) -> int:
    """Take a microbatch from those that wait, by its contents, because a rank may have skipped one.

    Returns:
        Its number, -1 if it is none of them: an idle round.
    """
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    for place, (number, other) in enumerate(waiting):
        there = [leaf for leaf in tree_leaves(place_batch(trainer, other)) if isinstance(leaf, Tensor)]
        if len(there) == len(leaves) and all(map(torch.equal, there, leaves)):
            del waiting[place]
            return number
    return -1


@dataclass(frozen=True)
class ModuleFacts:
    """The facts about a module from which a cause may follow.

    Attributes:
        kind: name of its class.
        dropout: the largest of its settings with "drop" in the name, or `p` of a dropout module.
        has_parameters: whether it has parameters of its own.
        settings: see `list_module_settings`.
        hooks: names of the hooks that users put on it.
    """

    kind: str
    dropout: float
    has_parameters: bool
    settings: dict[str, str] = field(default_factory=dict)
    hooks: list[str] = field(default_factory=list)


def describe_modules(model: nn.Module) -> dict[str, ModuleFacts]:
    """Return the facts about every module, by name."""
    return {
        name: ModuleFacts(
            type(module).__name__,
            _find_dropout(module),
            any(True for _ in module.parameters(recurse=False)),
            list_module_settings(module),
            list_hooks(module),
        )
        for name, module in model.named_modules()
    }


def _find_dropout(module: nn.Module) -> float:
    """Return the largest dropout rate among the module's settings and those of settings objects in it."""
    kind = type(module).__name__.lower()
    found = [0.0]
    for key, value in vars(module).items():
        if "drop" in key.lower() or (key == "p" and "drop" in kind):
            found.append(_read_rate(value))
        elif (
            not key.startswith("_")
            and hasattr(value, "__dict__")
            and not isinstance(value, nn.Module | Tensor)
        ):
            settings = vars(value).items()
            found += [_read_rate(rate) for name, rate in settings if "drop" in name.lower()]
    return max(found)


def _read_rate(value: Any) -> float:
    return value if isinstance(value, float) and 0 < value < 1 else 0.0
