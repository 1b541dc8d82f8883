"""Builds a model on the meta device, and any one of its tensors for real: no rank holds the whole model.

A factory's construction is recorded and replayed tensor by tensor:

1. `construct` runs the factory with everything on the meta device, which costs no memory, and records its
   reads and writes of memory (`construct/mode.py`).
2. Every random operation gets a seed from the global seed, the name of the first tensor (in named order) that
   depends on it, and its number among the operations of that tensor. An operation on which several tensors
   depend, such as the layer that `nn.TransformerEncoder` copies, thus draws the same for all of them.
3. `Construction.fill` repeats the operations that one tensor depends on, and no others
   (`construct/replay.py`).

The value of a tensor depends on the seed, its name and its operations. It does not depend on the layout, the
rank, the device, the tensors filled before, or other tensors of the model. A factory that seeds torch's
generator itself, or draws from a generator of its own, gets the numbers that it would get without Paceline.

An operation that cannot be replayed is refused by name: PL455 to PL459.

Not collective: every rank runs the same factory with the same seed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.errors import PacelineError
from paceline.memory.errors import is_out_of_memory
from paceline.parallel.construct.appearances import recording
from paceline.parallel.construct.mode import BUILT, META, FactoryRecorder
from paceline.parallel.construct.record import Kind, Record, StorageWindow
from paceline.parallel.construct.replay import (
    ChangedError,
    LostError,
    UninitialisedError,
    replay,
    seeded_generators,
)
from paceline.phrases import name_some
from paceline.seeds import derive_seed
from paceline.torch_seams.modules import STORES

log = logging.getLogger(__name__)


@dataclass
class Construction:
    """A model on the meta device, and the record from which its tensors are made.

    Attributes:
        model: complete except for values: names, ties, dtypes, strides, hooks and attributes are those of the
            eager model.
        windows: the bytes that each parameter and buffer shows, by full name, persistent or not, and under
            every name of a shared one. In named order, parameters first.
        parameters: those of the names that are parameters.
    """

    model: nn.Module
    windows: Mapping[str, StorageWindow]
    parameters: frozenset[str]
    _record: Record

    @property
    def names(self) -> tuple[str, ...]:
        """The full names of all parameters, then of all buffers."""
        return tuple(self.windows)

    def fill(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Return the whole initial value of one parameter or buffer, computed anew.

        The bits are the same in any order, for any subset and any number of times. The value is computed on
        the CPU, also for another device. Memory: that of the tensor and of its operations at a time. Tensors
        that share memory in the model do not share it here.

        Args:
            name: one of `names`.
            device: the device of the result.

        Raises:
            PacelineError: PL456, PL458, PL459.
        """
        window = self.windows[name]
        what = "parameter" if name in self.parameters else "buffer"
        try:
            tensor = replay(self._record, window, len(self._record.ops))
        except UninitialisedError as error:
            if what == "parameter":
                raise uninitialised_error([name]) from None
            log.warning(
                "The factory does not write all of the buffer %s: the rest of it starts as zeros.", name
            )
            tensor = error.zeroed
        except LostError:
            raise lost_error([name]) from None
        except ChangedError:
            raise PacelineError(
                "PL458",
                saw=f"The {what} {name} comes from a tensor of yours that was changed after the factory ran.",
                rule="Tensors are made when they are needed, from the data as the factory saw it.",
                fix="Copy the data in the factory (tensor.clone()), or leave it as it is.",
            ) from None
        except (
            RuntimeError,
            NotImplementedError,
            ValueError,
            TypeError,
            AssertionError,
            MemoryError,
        ) as error:
            if is_out_of_memory(error):
                raise PacelineError(
                    "PL432",
                    saw=f"Not enough memory for the {what} {name}: {str(error)[:150].rstrip('.')}.",
                    rule="A rank holds its part of the weights before training starts.",
                    fix="Use a smaller model, or divide its weights over more ranks with dp_shard or tp.",
                ) from error
            raise PacelineError(
                "PL456",
                saw=f"The {what} {name} cannot be made: {type(error).__name__}: {error}.",
                rule="The operations of a factory are recorded on the meta device and repeated on the CPU.",
                fix=BUILT,
            ) from error
        return tensor.to(device)


def construct(
    factory: Callable[[], nn.Module],
    seed: int,
    place: Callable[[nn.Module], object] | None = None,
) -> Construction:
    """Run a factory on the meta device.

    torch's, numpy's and Python's generators are seeded for the factory and restored afterwards. Memory: the
    model's structure, and the data that the factory loads. Tensors that a module keeps as plain attributes
    are made at once, on the CPU.

    Args:
        factory: builds the model; called once.
        seed: of all random numbers.
        place: called with the model afterwards, under the same record: for example to change the dtype.

    Raises:
        PacelineError: PL455 to PL459, for operations that cannot be replayed.
    """
    with seeded_generators(derive_seed(seed, 0, "construction")), recording() as recorder:
        try:
            model = factory()
            if recorder.refused is None and isinstance(model, nn.Module) and place is not None:
                place(model)
        except PacelineError:
            raise
        except Exception as error:
            raise PacelineError(
                "PL457",
                saw=f"The factory raised {type(error).__name__}: {str(error).rstrip('.')}.",
                rule="A factory is called with all tensors on the meta device, without their values.",
                fix=f"Call it directly to see whether it fails without Paceline. If it does not: {BUILT}",
            ) from error
    if recorder.refused is not None:
        raise recorder.refused
    recorder.check_shared()
    if not isinstance(model, nn.Module):
        raise PacelineError(
            "PL457",
            saw=f"The factory returned a {type(model).__name__}.",
            rule="A factory takes no arguments and returns one nn.Module.",
            fix="Return the model.",
        )
    return _finish(model, recorder, seed)


def uninitialised_error(names: list[str]) -> PacelineError:
    """Return the error for parameters with memory that nothing wrote."""
    return PacelineError(
        "PL459",
        saw=f"The factory does not write all of {name_some(names)}: its content after construction is "
        "arbitrary.",
        rule="Every rank must start with the same weights, so every element of a parameter needs a value.",
        fix="Initialise it in the factory (torch.zeros, or a function of torch.nn.init).",
    )


def lost_error(names: list[str]) -> PacelineError:
    """Return the error for tensors whose values the record does not know."""
    return PacelineError(
        "PL458",
        saw=f"The values of {name_some(names)} were not made by the factory while it ran.",
        rule="A factory makes all of its model's tensors, and not on the meta device, which keeps no values: "
        "only then can each be made again separately.",
        fix=f"Build it inside of the factory, and without torch.device('meta'). {BUILT}",
    )


def _finish(model: nn.Module, recorder: FactoryRecorder, seed: int) -> Construction:
    """Name the windows, seed the random operations, and refuse tensors that cannot be made."""
    record = recorder.record
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensors: dict[str, Tensor] = {**parameters, **buffers}
    lost = [name for name, t in tensors.items() if is_lazy(t) or not recorder.knows(t)]
    if lost:
        raise lost_error(lost)
    windows = {name: recorder.window(tensor) for name, tensor in tensors.items()}
    attributes = list(_attributes(model, recorder, {id(tensor) for tensor in tensors.values()}))
    named = {**windows, **{name: recorder.window(tensor) for name, _, _, tensor in attributes}}
    _seed(record, named, seed)
    unwritten = [
        name
        for name in parameters
        if all(record.ops[number].kind is Kind.EMPTY for number in record.writers[windows[name].storage])
        and windows[name].num_bytes
    ]
    if unwritten:
        raise uninitialised_error(unwritten)
    construction = Construction(model, windows, frozenset(parameters), record)
    owned = {window.storage for window in windows.values()}
    for name, holder, key, tensor in attributes:
        _make_attribute(construction, name, holder, key, recorder.window(tensor), owned)
    return construction


def _seed(record: Record, windows: Mapping[str, StorageWindow], seed: int) -> None:
    """Seed every random operation that matters by the first name that depends on it."""
    seen: set[int] = set()
    lost: list[str] = []
    for name, window in windows.items():
        numbers = record.slice([window.storage], len(record.ops), seen)
        random = [n for n in numbers if record.ops[n].random and record.ops[n].draw is None]
        for position, number in enumerate(random):
            record.seeds[number] = derive_seed(seed, position, name)
        if any(record.ops[n].kind is Kind.LOST for n in numbers):
            lost.append(name)
    if lost:
        raise lost_error(lost)


def _attributes(
    model: nn.Module, recorder: FactoryRecorder, known: set[int]
) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Yield recorded tensors that are attributes, not parameters or buffers: name, holder, key, tensor."""
    for prefix, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key not in STORES:
                name = f"{prefix}.{key}" if prefix else key
                yield from _held(name, vars(module), key, value, recorder, known)


def _held(
    name: str, holder: Any, key: Any, value: Any, recorder: FactoryRecorder, known: set[int]
) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Yield the same for one attribute, including tensors inside lists, tuples and dicts."""
    if isinstance(value, Tensor):
        if value.device == META and id(value) not in known:
            yield name, holder, key, value
    elif isinstance(value, (list, tuple, dict)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for inner, item in list(pairs):
            yield from _held(f"{name}[{inner!r}]", value, inner, item, recorder, known)


def _make_attribute(
    construction: Construction, name: str, holder: Any, key: Any, window: StorageWindow, owned: set[int]
) -> None:
    """Replace a tensor that is a plain attribute by its real value."""
    if window.storage in owned or isinstance(holder, tuple):
        raise PacelineError(
            "PL458",
            saw=f"{name} is a tensor that "
            + (
                "shares its memory with a parameter or buffer."
                if window.storage in owned
                else "is in a tuple."
            ),
            rule="A tensor that is neither a parameter nor a buffer is made at once, and put in its place.",
            fix=f"Register it with register_buffer, or keep it in a list. {BUILT}",
        )
    made = Construction(construction.model, {name: window}, frozenset(), construction._record)
    holder[key] = made.fill(name)
