"""Samples the copies of a model that DDP keeps equal, and what goes into them, in some passes."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.torch_seams.observing import (
    find_sample_ranks,
    has_exchange,
    has_own_exchange,
    list_replicated,
    read_default_group,
    read_group,
)
from paceline.torch_seams.watching import count_writes
from paceline.watch.rank.first_not_finite import Gradients, WatchedParameter
from paceline.watch.rank.sentinels.exchange import ExchangedBytes
from paceline.watch.rank.sentinels.numbers import Sample, hash_rows, take_sample
from paceline.watch.rank.sentinels.outbox import Outbox
from paceline.watch.rank.sentinels.passes import BackwardPass, HeldGradient
from paceline.watch.rank.sentinels.sampler_order import Orders
from paceline.watch.rank.threads import Mark, mark_stack

# Parameters whose numbers are compared, beside the watched ones.
_NUM_OTHERS = 8
_MANY_SIZES = 16
_MANY_BYTES = 64 << 10
# How many batches are compared at once.
_NUM_BATCHES = (3, 16, 32, 64)


@dataclass(eq=False)
class ReplicatedModel:
    """A model that DDP keeps equal on its ranks.

    Attributes:
        name: the same on all of them.
        ranks: in order.
        forwards: those with gradients, since they are looked at.
        steps: of its optimizers, since the last look.
        event: the name of the last look; empty for none.
        open: the values of a look, until backward has ended.
        written: by parameter, its version at the last look.
        sizes: of the first dimension of its latest inputs.
        rows: of its latest inputs, hashed.
        buffers: at the looks, where each forward broadcasts them.
    """

    name: str
    ranks: tuple[int, ...]
    forwards: int = 0
    steps: int = 0
    event: str = ""
    open: dict[str, Any] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    sizes: deque[int] = field(default_factory=lambda: deque(maxlen=_MANY_SIZES))
    rows: list[Sample] = field(default_factory=list)
    buffers: list[Sample] = field(default_factory=list)
    step_marks: tuple[Mark, ...] = ()


class ReplicatedModels:
    """The models that DDP keeps equal.

    Attributes:
        wrapped: the names of the parameters of each wrapper.

    Args:
        exchange: gets the weights of each look.
    """

    def __init__(
        self, torch: Any, gradients: Gradients, outbox: Outbox, exchange: ExchangedBytes, orders: Orders
    ) -> None:
        self._orders = orders
        self._torch = torch
        self._exchange = exchange
        self._gradients = gradients
        self._outbox = outbox
        self._models: weakref.WeakKeyDictionary[Any, ReplicatedModel] = weakref.WeakKeyDictionary()
        # Counted, not those alive: the garbage collector runs at other times on other ranks.
        self._met: Counter[str] = Counter()
        self._of: dict[int, weakref.ref[Any]] = {}
        self.wrapped: list[set[str]] = []

    def forget(self) -> None:
        """Forget what was seen, because the next passes are not."""
        for model in self._models.values():
            model.forwards = model.steps = 0
            model.event = ""
            model.open.clear()
            model.written.clear()
            model.sizes.clear()
            model.rows.clear()
            model.buffers.clear()

    @property
    def has_met_ddp(self) -> bool:
        """Whether DDP wraps a model."""
        return bool(self._of)

    def find(self, parameter: Any) -> tuple[Any, ReplicatedModel] | None:
        """Return the DDP module that keeps a parameter equal, and what is known of it."""
        ddp = self._of.get(id(parameter), lambda: None)()
        return None if ddp is None or ddp not in self._models else (ddp, self._models[ddp])

    def find_exchange(self, parameter: Any) -> bool | None:
        """Return whether DDP sums a parameter's gradient in this pass; None without DDP."""
        found = self.find(parameter)
        return None if found is None else has_exchange(found[0])

    def before_forward(self, ddp: Any, inputs: Iterable[Any], find: Any) -> None:
        """Take a look at a model before its forward.

        Args:
            find: returns the `HeldGradient` of a parameter.
        """
        if not ddp.training or not self._torch.is_grad_enabled():
            return
        model = self._models.get(ddp) or self._meet(ddp)
        model.forwards += 1
        self._note_input(self._name_event(ddp, model), model, inputs)
        if model.forwards & (model.forwards - 1):  # 1, 2, 4, 8 ...
            return
        parameters = list_replicated(ddp)
        watched = [one for one in self._gradients.list_watched() if self._belongs(one, ddp)]
        others = parameters[:: max(1, len(parameters) // _NUM_OTHERS)][:_NUM_OTHERS]
        chosen = [*(one.find() for one in watched), *others]
        optimizers: list[Any] = list({id(one.optimizer): one.optimizer for one in watched}.values())
        buffers = list(ddp.module.buffers()) if ddp.broadcast_buffers else []
        buffer_bytes = sum(one.numel() * one.element_size() for one in buffers)
        if buffer_bytes >= _MANY_BYTES:
            model.buffers.append(take_sample(self._torch, buffers))
        model.open = {
            "buffers": list(model.buffers),
            "buffer_bytes": buffer_bytes,
            "before": model.event,
            "steps": model.steps,
            "is_unwritten": all(
                count_writes(one) == self._find_written(model, one, find) for one in chosen[: len(watched)]
            ),
            "weights": take_sample(self._torch, filter(self._can_be_read, chosen)),
            "settings": [_read_settings(group) for one in optimizers for group in one.param_groups],
            "has_hook": has_own_exchange(ddp),
            "sizes": list(model.sizes),
            "forwards": model.forwards,
            "norm": _find_norm(ddp),
        }
        self._exchange.note_look(
            self._gradients.passes, model.open["weights"], parameters, mark_stack(sys._getframe(1))
        )
        model.written = {id(one): count_writes(one) for one in chosen[: len(watched)]}
        model.event = self._name_event(ddp, model)
        model.steps = 0

    def before_sharded_forward(self, state: Any, module: Any, inputs: Iterable[Any]) -> None:
        """Take note of the samples of a model of `fully_shard`, which has no copies to compare."""
        ranks = find_sample_ranks(state)
        if not ranks or not module.training or not self._torch.is_grad_enabled():
            return
        model = self._models.get(state)
        if model is None:
            self._met["sharded"] += 1
            model = self._models[state] = ReplicatedModel(f"sharded/{self._met['sharded']}", ranks)
        self._note_input(f"{model.name} {self._gradients.passes}", model, inputs)

    def after_pass(self, done: BackwardPass, touched: list[HeldGradient]) -> None:
        """Send the look of a model whose backward has ended."""
        for ddp, model in list(self._models.items()):
            if not model.open:
                continue
            mine = [held for held in touched if self._belongs(held.watched, ddp)]
            if not mine:
                continue
            looked, model.open = model.open, {}
            values = {
                **looked,
                "own": take_sample(self._torch, [held.own for held in mine]),
                "sums": take_sample(self._torch, [held.parameter.grad for held in mine]),
                "was_clear": all(held.was_clear for held in mine),
                "is_exchanged": bool(done.is_exchanged),
                "is_mean": done.is_mean,
            }
            marks = model.step_marks or done.marks
            self._outbox.put("copies", model.event, model.ranks, self._gradients.passes, marks, values)

    def before_step(self, optimizer: Any, marks: tuple[Mark, ...]) -> tuple[tuple[int, ...], str]:
        """Count a step, and return the ranks that take it too and its name; no ranks without DDP."""
        for group in optimizer.param_groups:
            found = self.find(group["params"][0]) if group["params"] else None
            if found is not None:
                ddp, model = found
                model.steps += 1
                model.step_marks = marks
                return model.ranks, self._name_event(ddp, model)
        return (), ""

    def look_before_step(self, optimizer: Any, held: list[HeldGradient], marks: tuple[Mark, ...]) -> None:
        """Take a look at a model without DDP, whose gradients the script may sum itself.

        Args:
            optimizer: that is about to step.
        """
        group = read_default_group()
        if group is None or not held:
            return
        model = self._models.get(optimizer)
        if model is None:
            parameters = [one for some in optimizer.param_groups for one in some["params"]]
            kind = f"{type(optimizer).__name__}/{len(parameters)}/{sum(one.numel() for one in parameters)}"
            self._met[kind] += 1
            model = self._models[optimizer] = ReplicatedModel(f"{kind}/{self._met[kind]}", group[1])
        model.forwards += 1
        if model.forwards & (model.forwards - 1):
            return
        parameters = [one.parameter for one in held]
        weights = take_sample(self._torch, parameters)
        values = {
            "before": model.event,
            "steps": 0,
            "is_unwritten": all(one.written == count_writes(one.parameter) for one in held),
            "weights": weights,
            "settings": [_read_settings(some) for some in optimizer.param_groups],
            "sums": take_sample(self._torch, [one.grad for one in parameters]),
            "is_exchanged": True,
        }
        model.event = f"{model.name} {group[2]} {self._gradients.passes}"
        trained = [one for some in optimizer.param_groups for one in some["params"]]
        self._exchange.note_look(self._gradients.passes, weights, trained, marks)
        self._outbox.put("copies", model.event, model.ranks, self._gradients.passes, marks, values)

    def _meet(self, ddp: Any) -> ReplicatedModel:
        parameters = list_replicated(ddp)
        name, ranks, _ = read_group(ddp.process_group)
        kind = f"{name}/{len(parameters)}/{sum(one.numel() for one in parameters)}"
        self._met[kind] += 1
        model = self._models[ddp] = ReplicatedModel(f"{kind}/{self._met[kind]}", ranks)
        self.wrapped.append({one for one, _ in ddp.named_parameters()})
        self._of.update(dict.fromkeys(map(id, parameters), weakref.ref(ddp)))
        return model

    def _name_event(self, ddp: Any, model: ReplicatedModel) -> str:
        return f"{model.name} {read_group(ddp.process_group)[2]} {self._gradients.passes}"

    def _belongs(self, watched: WatchedParameter, ddp: Any) -> bool:
        return self._of.get(id(watched.find()), lambda: None)() is ddp

    def _can_be_read(self, parameter: Any) -> bool:
        plain = (self._torch.nn.Parameter, self._torch.Tensor)
        return type(parameter) in plain and parameter.is_floating_point()

    def _find_written(self, model: ReplicatedModel, parameter: Any, find: Any) -> int:
        held = find(parameter)
        if model.steps and held is not None and held.written >= 0:
            return int(held.written)
        return model.written.get(id(parameter), -1)

    def _note_input(self, event: str, model: ReplicatedModel, inputs: Iterable[Any]) -> None:
        given = list(inputs)
        tensors = [one for one in given if isinstance(one, self._torch.Tensor) and one.dim() and len(one)]
        if not tensors:
            return
        model.sizes.append(len(tensors[0]))
        # In a later epoch a rank meets the samples of other ranks.
        if len(model.rows) >= _NUM_BATCHES[-1] or self._orders.has_repeated:
            return
        # Ranks that give the same samples to other heads or tasks, say, do other work.
        plain = repr([one for one in given if isinstance(one, str | int | float)])
        rows = hash_rows(self._torch, max(tensors, key=lambda one: one[0].numel()), plain)
        if rows is None:
            return
        model.rows.append(rows)
        if len(model.rows) in _NUM_BATCHES:
            values = {"batches": list(model.rows), "is_split": self._orders.has_split}
            marks = mark_stack(sys._getframe(2))
            self._outbox.put(
                "batches", f"{event} {len(model.rows)}", model.ranks, self._gradients.passes, marks, values
            )


def _read_settings(group: Any) -> dict[str, Any]:
    return {
        name: value for name, value in group.items() if isinstance(value, int | float) and name != "params"
    }


def _find_norm(ddp: Any) -> str:
    """Return the first BatchNorm of a model that normalises over its rank's samples alone; "" for none."""
    kinds = ((name, type(module).__name__) for name, module in ddp.module.named_modules() if module.training)
    return next((name for name, kind in kinds if kind.startswith("BatchNorm")), "")
