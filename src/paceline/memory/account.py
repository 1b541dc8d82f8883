"""Defines the account of a rank's memory, which a rank leaves for its launcher."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.memory.limits import LimitKind

Phase = Literal["forward", "backward", "optimizer", "elsewhere"]
KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "buffers": "buffers",
    "gathered": "gathered parameters",
    "kept graphs": "graphs of earlier forwards",
    "activations": "activations",
    "kept": "tensors and arrays kept in variables",
    "batch": "batch",
    "other tensors": "other tensors",
    "request": "the allocation that failed",
    "loader workers": "loader workers",
    "other processes": "other processes under the same limit",
    "base": "Python and libraries at the start",
    "freed": "freed, and kept by the allocator (empty_cache returns it)",
    "rest": "not accounted for: temporary results, Python objects, buffers of libraries",
}
"""The kinds of memory, in the order in which they are listed, with their names."""
TENSORS = (
    *("parameters", "gradients", "optimizer", "buffers", "gathered", "kept graphs", "activations"),
    *("kept", "batch", "other tensors"),
)
"""The kinds that are tensors of this process."""


@dataclass(frozen=True)
class ModuleMemory:
    """The activations that belong to a module.

    Attributes:
        name: as in `named_modules`; "" for the model itself.
        kind: its class.
        num_bytes: saved by its operations and not by those of its children.
    """

    name: str
    kind: str
    num_bytes: int


@dataclass(frozen=True)
class Holder:
    """A variable that holds tensors or arrays.

    Attributes:
        variable: such as `outputs` or `self.history`.
        place: of the function that has it: `train.py:31 in evaluate`.
        num_bytes: held by it, graphs included.
        count: its tensors.
        graphs: the earlier forwards whose graphs it keeps.
    """

    variable: str
    place: str
    num_bytes: int
    count: int
    graphs: int = 0


@dataclass(frozen=True)
class BatchTensor:
    """An input of the step: the variable, its shape and dtype."""

    variable: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True)
class Steps:
    """The memory of the steps that fitted, at their ends; all in resident bytes.

    Attributes:
        count: optimizer steps so far.
        peak: the most up to the end of the last step.
        first: at the end of the second step (the first makes optimizer state).
        last: at the end of the last step.
    """

    count: int = 0
    peak: int = 0
    first: int = 0
    last: int = 0

    @property
    def growth(self) -> float:
        """Bytes that each step left behind, on average."""
        return (self.last - self.first) / (self.count - 2) if self.count > 2 else 0.0


@dataclass(frozen=True)
class Progress:
    """The position in the model.

    Attributes:
        place: the user's line, `train.py:31 in train`.
        module: the innermost module that was running; "" for the model, `None` for none.
        module_kind: its class.
        phase: what the process was in.
        reached: the share of the model's parameters that the running forward had used; 1 after it.
        has_graph: whether autograd saves anything for backward.
        is_evaluating: whether the model is in evaluation mode, and autograd saves for backward nevertheless.
    """

    place: str = ""
    module: str | None = None
    module_kind: str = ""
    phase: Phase = "elsewhere"
    reached: float = 1.0
    has_graph: bool = False
    is_evaluating: bool = False


@dataclass(frozen=True)
class ModelState:
    """The bytes that follow from the model and its optimizer.

    Attributes:
        trained: bytes of parameters that get gradients.
        expected_state: bytes that its state will have.
        repeated: modules of one class in a row, such as the blocks of a transformer: their common prefix.
        num_repeated: how many there are.
        repeated_activations: bytes of activations in them.
        fp32_activations: bytes of activations in fp32.
        is_sharded: whether parameters are divided among ranks.
        largest_module: bytes of parameters of one repeated module, or of the largest other one.
    """

    trained: int = 0
    expected_state: int = 0
    repeated: str = ""
    num_repeated: int = 0
    repeated_activations: int = 0
    fp32_activations: int = 0
    is_sharded: bool = False
    largest_module: int = 0


@dataclass(frozen=True)
class Account:
    """The contents of a rank's memory at one moment.

    Attributes:
        rank: global.
        time_s: when, in seconds since 1970.
        limit_kind: what ran short; its limit and use are in `limit` and `used`.
        kinds: bytes by kind; together the `total`.
        total: measured: the process's anonymous memory (CPU) or the allocator's (CUDA), with the request, and
            other processes if the limit holds for them too.
        modules: the activations by module, most first.
        holders: variables that keep memory, most first.
        batch: the step's inputs.
        steps: those that fitted.
        progress: where the model was.
        model: facts on it.
        num_workers: this rank's child processes.
        num_ranks: the world's size.
        is_raised: whether an exception reported that memory was exhausted; else the process still ran.
    """

    rank: int
    time_s: float
    limit_kind: LimitKind
    limit: int
    used: int
    total: int
    kinds: dict[str, int]
    modules: tuple[ModuleMemory, ...] = ()
    holders: tuple[Holder, ...] = ()
    batch: tuple[BatchTensor, ...] = ()
    steps: Steps = field(default_factory=Steps)
    progress: Progress = field(default_factory=Progress)
    model: ModelState = field(default_factory=ModelState)
    num_workers: int = 0
    num_ranks: int = 1
    is_raised: bool = False

    @property
    def own(self) -> int:
        """The part of the total that is this process's."""
        return self.total - self.get("loader workers", "other processes")

    def get(self, *kinds: str) -> int:
        """Return the bytes of these kinds together."""
        return sum(self.kinds.get(kind, 0) for kind in kinds)
