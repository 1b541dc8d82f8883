"""Shows a trainer's models to the user: plain modules, whole tensors, gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.recipe.layout import Layout
from paceline.signatures import explain_arguments
from paceline.train.average import Average, build_averages, no_average_error
from paceline.train.islands import Islands
from paceline.train.update import GradientHook, Update
from paceline.world import World


class TrainedModels:
    """The models of a trainer, as plain modules and whole tensors under any layout.

    Args:
        world: the ranks.
        models: by name, laid out.
        updates: those that have an optimizer, by the same names.
        layout: resolved.
        ema: decay of averages of weights, see `Trainer`.
    """

    _islands: Islands | None = None

    def __init__(
        self,
        world: World,
        models: Mapping[str, nn.Module],
        updates: Mapping[str, Update],
        layout: Layout,
        ema: float | Mapping[str, float] | None = None,
    ) -> None:
        self.layout, self._went_apart = layout, False
        self.world = world
        self.models = dict(models)
        self._updates = dict(updates)
        self._before_write: Callable[[], None] = lambda: None
        self.averages = build_averages(ema, self.models, lambda: self._before_write())

    def wait_before_writing(self, wait: Callable[[], None]) -> None:
        """Call `wait` before anything of the trainer writes to weights or optimizer state."""
        self._before_write = wait
        for update in self._updates.values():
            update.before_write = wait

    @property
    def model(self) -> nn.Module:
        """The plain module, with the trained weights, usable on its own. One model only.

        It may be written to: a save under way has copied it.
        """
        self._before_write()
        if len(self.models) > 1:
            raise PacelineError(
                "PL402",
                saw=f"trainer.model with {len(self.models)} models.",
                rule="`model` is the model of a trainer that has only one.",
                fix=f"Use trainer.models[name] with one of {', '.join(self.models)}.",
            )
        return next(iter(self.models.values()))

    @property
    def average(self) -> Average:
        """The average of weights that `ema` keeps (of the first model if there are several)."""
        if not self.averages:
            raise no_average_error()
        return next(iter(self.averages.values()))

    def whole(self, name: str, tensor: Tensor, model: str = "model") -> Tensor:
        """Return a whole tensor from this rank's part of it; collective.

        Args:
            name: of the parameter or buffer.
            tensor: the parameter or buffer, its gradient (as hooks get it) or a tensor of its optimizer
                state.
            model: name of the model, if there are several.
        """
        if model in self._updates:
            return self._updates[model].placement.whole(name, tensor)
        return tensor

    @explain_arguments
    def whole_state(self, model: str = "model") -> dict[str, Tensor]:
        """Return the whole model like a plain one's `state_dict`; collective.

        Returns:
            On rank 0 all parameters and persistent buffers by full name, on the CPU; elsewhere an empty dict.
        """
        found: dict[str, Tensor] = {}
        module = self._find(model)
        saved = module.state_dict(keep_vars=True).keys()
        buffers = module.named_buffers(remove_duplicate=False)
        named = [
            *module.named_parameters(remove_duplicate=False),
            *((name, buffer) for name, buffer in buffers if name in saved),
        ]
        with self._whole_islands():
            for name, tensor in named:
                whole = self.whole(name, tensor.detach(), model)
                if self.world.is_main:
                    found[name] = whole.to("cpu", copy=True)
        return found

    def _find(self, model: str) -> nn.Module:
        if model not in self.models:
            raise PacelineError(
                "PL404",
                saw=f"model={model!r}, but the models are {', '.join(self.models)}.",
                rule="Models have the names of Trainer(model=), and a single one is named model.",
                fix="Use one of these names.",
            )
        return self.models[model]

    def _whole_islands(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that all islands share."""
        return nullcontext() if self._islands is None else self._islands.whole()

    @explain_arguments
    def gather_into(self, plain: nn.Module, model: str = "model") -> None:
        """Put the trained weights into a plain module of the same kind, on rank 0; collective.

        Args:
            plain: a module built like the model before it was laid out; only rank 0's is changed.
            model: name of the model, if there are several.
        """
        state = self.whole_state(model)
        if self.world.is_main:
            plain.load_state_dict(state)

    @contextmanager
    def without_communication(self) -> Iterator[None]:
        """Make steps inside the context compute this rank's share without communication, to measure its cost.

        The ranks' weights diverge, so the trainer can then only be used for measuring: `save` raises PL433.
        """
        self._went_apart = True
        with ExitStack() as stack:
            for update in self._updates.values():
                stack.enter_context(update.silenced())
            yield

    def count_parameters(self, model: str = "model") -> int:
        """Return the number of a model's parameters, trained and frozen, independent of the layout."""
        named = self._find(model).named_parameters()
        if model not in self._updates:
            return sum(p.numel() for _, p in named)
        placement = self._updates[model].placement
        return sum(math.prod(placement.whole_shape(name, p)) for name, p in named)

    @explain_arguments
    def on_gradients(self, hook: GradientHook, model: str = "model") -> None:
        """Call `hook({name: gradient})` in every step after reduction, before clipping.

        The gradients are those of the mean loss over the global batch. The hook may change them in place, in
        the same way on every rank. If the layout divides the model, they are this rank's parts; `whole`
        returns a whole gradient.
        """
        if model not in self._updates:
            raise PacelineError(
                "PL404",
                saw=f"on_gradients(..., model={model!r}), but only {', '.join(self._updates)} have an "
                "optimizer.",
                rule="Gradients are those of a model that is updated.",
                fix="Use one of these names.",
            )
        self._updates[model].gradient_hooks.append(hook)
