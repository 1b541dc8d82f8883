"""Builds an account of a process's memory from its live objects, without earlier recording.

The garbage collector knows every tensor, module and optimizer. Autograd's graph leads from the tensors to
what is saved for backward. Each storage counts once, for the first kind to which it belongs: state, graphs,
variables, and what is left.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from paceline.memory.account import (
    TENSORS,
    Account,
    BatchTensor,
    Holder,
    ModuleMemory,
)
from paceline.memory.graph import (
    Graph,
    GraphWalk,
    Key,
    Saved,
    find_storage,
    list_below,
    separate_graphs,
)
from paceline.memory.holders import Variable, count_bytes, find_held
from paceline.memory.limits import (
    Use,
    count_private,
    list_children,
    read_anonymous,
)
from paceline.memory.live_modules import OUTSIDE, Anchor, Neighbours, find_models
from paceline.memory.process_facts import describe_model, describe_progress, find_phase, find_running
from paceline.memory.steps import STEPS
from paceline.torch_seams.saved import find_gathered, find_order, is_built

_MANY_MODULES = 12
_MANY_HOLDERS = 6
_MANY_INPUTS = 6
_NEARLY = 0.9
# Fewer graphs through the whole model may be meant: twins, or two views of a sample.
_FEW_FORWARDS = 3


@dataclass
class _Objects:
    """torch's objects, as the garbage collector lists them."""

    tensors: list[Any] = field(default_factory=list)
    modules: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    gathered: list[tuple[Any, Any]] = field(default_factory=list)


class MemoryWalk:
    """The state of an account that is being built.

    Args:
        frames: of the thread that ran short, innermost first.
        device: the kind of device that ran short, `"cpu"` or `"cuda"`.
        is_running: whether that thread goes on meanwhile.
    """

    def __init__(
        self, torch: Any, frames: Sequence[FrameType], device: str = "cpu", *, is_running: bool = False
    ) -> None:
        self._torch = torch
        self._frames = frames
        self._device = device
        self._phase = find_phase(frames)
        # The engine frees what nodes save without holding Python's lock.
        self._walk = GraphWalk(torch, reads=not (is_running and self._phase == "backward"))
        self._kind_of: dict[Key, str] = {}
        self._sizes: dict[Key, int] = {}
        self._objects = _find_objects(torch)
        self._models = find_models(self._objects.modules)
        for module, parameter in self._objects.gathered:
            if id(module) in self._models.names:
                self._models.owners[id(parameter)] = self._models.names[id(module)]
        self._inside = find_running(torch, frames, self._models)
        self._running = self._inside[0] if self._inside else None
        self._holders: list[Holder] = []
        self._batch: list[BatchTensor] = []
        self._graph = Graph()
        self._forwards = 1
        self._saved: list[Saved] = []
        self._totals: Counter[str] = Counter()
        self._neighbours: Neighbours | None = None

    def take(self, rank: int, use: Use | None, request: int, num_ranks: int) -> Account:
        """Return the account.

        Args:
            rank: global.
            use: the limit that ran short; `None`: not known.
            request: bytes that could not be allocated.
        """
        self._claim_state()
        held = self._find_variables()
        self._claim_inputs(held)
        self._claim_graphs(held)
        self._claim_temporaries(held)
        modules = self._list_modules()
        self._claim_rest(held)
        kinds: dict[str, int] = dict.fromkeys(TENSORS, 0)
        for key, kind in self._kind_of.items():
            kinds[kind] += self._sizes[key]
        total = self._measure(kinds, request)
        workers = list_children(os.getpid())
        total += self._add_processes(kinds, use, total - request, workers)
        return Account(
            rank=rank,
            time_s=time.time(),
            limit_kind=use.kind if use is not None else "machine",
            limit=use.limit if use is not None else 0,
            used=use.used if use is not None else total,
            total=total,
            kinds={kind: size for kind, size in kinds.items() if size},
            modules=modules,
            holders=tuple(sorted(self._holders, key=lambda holder: -holder.num_bytes)[:_MANY_HOLDERS]),
            batch=tuple(sorted(self._batch, key=lambda one: -one.num_bytes)[:_MANY_INPUTS]),
            steps=STEPS.summarize(),
            progress=describe_progress(self._frames, self._running, self._models, self._graph),
            model=describe_model(self._models, self._objects.optimizers, self._graph, self._totals),
            num_workers=len(workers),
            num_ranks=num_ranks,
        )

    # ---- who owns which storage

    def _claim(self, tensor: Any, kind: str) -> int:
        """Count a tensor's storage for this kind unless it counts already; return its bytes then."""
        storage = find_storage(tensor)
        return 0 if storage is None else self._claim_storage(*storage, kind)

    def _claim_storage(self, key: Key, size: int, kind: str) -> int:
        if key in self._kind_of or not key[0].startswith(self._device):
            return 0
        self._kind_of[key] = kind
        self._sizes[key] = size
        return size

    def _claim_state(self) -> None:
        parameters = list(self._models.parameters)
        for optimizer in self._objects.optimizers:
            with suppress(Exception):
                parameters += [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            self._claim(parameter, "parameters")
        for parameter in parameters:
            if (gradient := _find_gradient(parameter)) is not None:
                self._claim(gradient, "gradients")
        for optimizer in self._objects.optimizers:
            with suppress(Exception):
                for state in list(optimizer.state.values()):
                    for value in list(state.values()):
                        if isinstance(value, self._torch.Tensor):
                            self._claim(value, "optimizer")
        for buffer in self._models.buffers:
            self._claim(buffer, "buffers")
        for tensor in self._objects.tensors:
            # Whole parameters that are gathered from shards are no module's own.
            if isinstance(tensor, self._torch.nn.Parameter):
                self._claim(tensor, "gathered")
                if (gradient := _find_gradient(tensor)) is not None:
                    self._claim(gradient, "gradients")

    def _find_variables(self) -> list[tuple[Any, Variable]]:
        opaque = (self._torch.nn.Module, self._torch.optim.Optimizer)
        return list(
            find_held(
                zip(self._frames, self._inside, strict=True),
                lambda value: isinstance(value, self._torch.Tensor),
                lambda value: isinstance(value, opaque),
            )
        )

    def _claim_inputs(self, held: Sequence[tuple[Any, Variable]]) -> None:
        """Count what local variables hold and no operation has made: before the graph, which saves it too."""
        for value, variable in held:
            is_input = _is_input(variable) or (variable.is_own and not variable.is_container)
            if variable.module is not None or not is_input or not isinstance(value, self._torch.Tensor):
                continue
            if value.requires_grad or not (size := self._claim(value, "batch")):
                continue
            shape = tuple(int(length) for length in value.shape)
            dtype = str(value.dtype).removeprefix("torch.")
            self._batch.append(BatchTensor(variable.name, shape, dtype, size))

    # ---- the graph

    def _claim_graphs(self, held: Sequence[tuple[Any, Variable]]) -> None:
        containers: dict[tuple[str, str], list[Any]] = {}
        for value, variable in held:
            if variable.is_container and isinstance(value, self._torch.Tensor):
                node = _find_node(value)
                if node is not None:
                    containers.setdefault((variable.name, variable.place), []).append(node)
        for (name, place), nodes in containers.items():
            self._claim_kept(name, place, nodes)
        roots = [node for tensor in self._objects.tensors if (node := _find_node(tensor)) is not None]
        roots += [node for value, _ in held if (node := _find_node(value)) is not None]
        graph = self._walk.add_newest_first(roots)
        self._graph = graph
        self._forwards = max(1, self._count_forwards(graph))
        self._saved = list(graph.saved)
        for tensor in self._objects.tensors:
            node = _find_node(tensor)
            storage = None if node is None else find_storage(tensor)
            if storage is not None:
                self._saved.append(Saved(*storage, find_order(node), False))
        num_bytes = sum(self._claim_storage(one.key, one.num_bytes, "activations") for one in self._saved)
        if self._forwards >= _FEW_FORWARDS:
            self._give_to_earlier(num_bytes, held)

    def _claim_kept(self, name: str, place: str, nodes: Sequence[Any]) -> None:
        """Count the graphs that a container keeps, all but the newest, if they are of different forwards."""
        separate = separate_graphs(nodes)
        if len(separate) < 2:
            return
        num_bytes = 0
        for roots in separate[:-1]:
            graph = self._walk.add(roots)
            num_bytes += sum(
                self._claim_storage(one.key, one.num_bytes, "kept graphs") for one in graph.saved
            )
        if num_bytes:
            self._holders.append(Holder(name, place, num_bytes, len(nodes), len(separate) - 1))

    def _count_forwards(self, graph: Graph) -> int:
        """Return how often one graph runs through the model: nine in ten parameters are used as often."""
        calls = sorted(graph.calls[id(parameter)] for parameter in self._models.trained)
        return calls[len(calls) // 10] if len(calls) > 1 else 1

    def _give_to_earlier(self, num_bytes: int, held: Sequence[tuple[Any, Variable]]) -> None:
        """Count the activations of a sum over many forwards for the earlier ones."""
        earlier = num_bytes * (self._forwards - 1) // self._forwards
        for key, kind in list(self._kind_of.items()):
            if kind == "activations" and earlier > 0:
                self._kind_of[key] = "kept graphs"
                earlier -= self._sizes[key]
        # The variable with the largest graph holds the sum.
        longest = max(
            (pair for pair in held if pair[1].is_own and _find_node(pair[0]) is not None),
            key=lambda pair: len(list_below(_find_node(pair[0]))),
            default=None,
        )
        if longest is not None:
            kept = sum(self._sizes[key] for key, kind in self._kind_of.items() if kind == "kept graphs")
            variable = longest[1]
            self._holders.append(Holder(variable.name, variable.place, kept, 1, self._forwards - 1))

    def _claim_temporaries(self, held: Sequence[tuple[Any, Variable]]) -> None:
        """Count what running forwards hold and autograd has not saved for their modules."""
        for value, variable in held:
            if variable.module is not None and isinstance(value, self._torch.Tensor):
                self._totals[variable.module] += self._claim(value, "activations")

    def _list_modules(self) -> tuple[ModuleMemory, ...]:
        kinds = ("activations", "kept graphs") if self._forwards >= _FEW_FORWARDS else ("activations",)
        saved = [one for one in self._saved if self._kind_of.get(one.key) in kinds]
        names = {
            order: self._models.owners[parameter]
            for parameter, orders in self._graph.uses.items()
            if parameter in self._models.owners
            for order in orders
        }
        neighbours = Neighbours([Anchor(order, name) for order, name in names.items()], self._models)
        self._neighbours = neighbours if names else None
        totals = self._totals
        seen: set[Key] = set()
        for one in saved:
            if one.key in seen:
                continue
            seen.add(one.key)
            name = self._find_module(one.order)
            totals[name] += one.num_bytes
        return tuple(
            ModuleMemory(name, self._models.kind(name), size)
            for name, size in totals.most_common(_MANY_MODULES)
            if size
        )

    def _find_module(self, order: int) -> str:
        if self._neighbours is None:
            return ""
        name = self._neighbours.find(order)
        # In a forward, what follows the last parameter belongs to what is running, and is no loss yet.
        return self._running if name == OUTSIDE and self._running is not None else name

    # ---- what else there is

    def _claim_rest(self, held: Sequence[tuple[Any, Variable]]) -> None:
        totals: Counter[tuple[str, str]] = Counter()
        counts: Counter[tuple[str, str]] = Counter()
        for value, variable in held:
            if isinstance(value, self._torch.Tensor):
                size = self._claim(value, "kept")
            elif self._device == "cpu":
                size = self._claim_storage(("cpu", -id(value)), count_bytes(value) or 0, "kept")
            else:
                continue
            if size:
                totals[variable.name, variable.place] += size
                counts[variable.name, variable.place] += 1
        for (name, place), size in totals.items():
            self._holders.append(Holder(name, place, size, counts[name, place]))
        for tensor in self._objects.tensors:
            self._claim(tensor, "other tensors")

    def _measure(self, kinds: dict[str, int], request: int) -> int:
        """Enter the request, what the process had from its start, and the rest; return the measured total."""
        tensors = sum(kinds.values())
        if self._device != "cpu":
            with suppress(Exception):
                device = getattr(self._torch, self._device)
                total, held = int(device.memory_reserved()), int(device.memory_allocated())
                kinds["freed"], kinds["rest"] = max(0, total - held), max(0, held - tensors)
                kinds["request"] = request
                return max(total, tensors) + request
        anonymous = read_anonymous() or tensors
        rest = max(0, anonymous - tensors)
        base = min(rest, STEPS.base)
        kinds["base"], kinds["rest"], kinds["request"] = base, rest - base, request
        return max(anonymous, tensors) + request

    def _add_processes(
        self,
        kinds: dict[str, int],
        use: Use | None,
        total: int,
        workers: Sequence[int],
    ) -> int:
        """Enter other processes, where a limit holds for all of them; return their bytes."""
        if use is None or use.kind not in ("cgroup", "machine"):
            return 0
        if use.kind == "machine" and use.used + kinds["request"] < _NEARLY * use.limit:
            return 0  # It is something else that ran short.
        kinds["loader workers"] = sum(map(count_private, workers))
        # By the limit's own count: pages that forks share count once there.
        kinds["other processes"] = max(0, use.used - total - kinds["loader workers"])
        return kinds["loader workers"] + kinds["other processes"]


def _is_input(variable: Variable) -> bool:
    """Return whether a container is the step's batch, by the name that the loop gave it."""
    return variable.name.rpartition(".")[2] in _INPUTS


# The names that loops give to a batch which is a list or a dict.
_INPUTS = {"batch", "data", "inputs", "input", "sample", "samples", "x", "item", "share", "microbatches"}


def _find_objects(torch: Any) -> _Objects:
    found = _Objects()
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.Tensor):
            found.tensors.append(thing)
        elif issubclass(kind, torch.nn.Module) and is_built(thing):
            found.modules.append(thing)
        elif issubclass(kind, torch.optim.Optimizer) and "param_groups" in vars(thing):
            found.optimizers.append(thing)
        elif (gathered := find_gathered(thing)) is not None:
            found.gathered.append(gathered)
    return found


def find_main_frames(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread."""
    return sys._current_frames().get(thread)


def _find_gradient(parameter: Any) -> Any | None:
    with suppress(Exception):
        return parameter.grad if parameter.is_leaf else None
    return None


def _find_node(value: Any) -> Any | None:
    with suppress(Exception):
        return value.grad_fn
    return None
