"""Runs a factory on the meta device and records its effects on memory.

A dispatch mode sees every operation below autograd. It sends those that make tensors to the meta device and
records all that write. `construct/appearances.py` handles calls that no dispatch mode sees.

Tensors have no values there, but a value that does not depend on random numbers can be computed: the record
is replayed up to that point (`dpr = [x.item() for x in torch.linspace(0, 0.1, depth)]`). Any other value is
refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.parallel.construct.record import Data, Draw, Kind, Record, RecordedOp, StorageWindow
from paceline.parallel.construct.replay import ChangedError, LostError, UninitialisedError, read_bytes, replay
from paceline.torch_seams.dispatch import TorchDispatchMode, read_schema, without_functions, without_modes
from paceline.torch_seams.operators import view_negated
from paceline.torch_seams.tensors import identify, read_version
from paceline.torch_seams.trees import tree_flatten, tree_iter, tree_map, tree_map_only

META = torch.device("meta")
CPU = torch.device("cpu")
BUILT = "Pass the built model in place of its factory: rank 0's weights are then used."

# They write every element of their output, and do not read its old content.
_OVERWRITING = {
    *("bernoulli_.float", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_"),
    *("normal_", "random_", "uniform_", "zero_"),
}
# They write running statistics, which their schemas do not declare.
_UNDECLARED = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), ("running_mean", "running_var")
)
_EMPTY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


class FactoryRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode that records a factory.

    Attributes:
        record: the operations so far.
        refused: the first refusal, even if the factory's own `except` swallowed it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record()
        self.refused: PacelineError | None = None
        # Number of each meta storage by its address; the storages are kept, so that no address is reused.
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []
        # By the address of a real storage: its stand-in on the meta device, and the data with its bytes.
        self._mirrors: dict[int, tuple[torch.UntypedStorage, Data]] = {}
        self._sources: list[torch.UntypedStorage] = []
        # Stand-ins for memory that code outside the factory sees too.
        self._foreign: set[int] = set()
        # numpy's memory, and its content when it was first seen.
        self._shared: list[tuple[Tensor, Data]] = []
        # By id: each generator that was drawn from, and its state before.
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        # By id of a generator and its state: the operation that left it so; None if nothing seeded it.
        self._drawn: dict[tuple[int, bytes], int | None] = {
            (id(torch.default_generator), _digest(torch.default_generator.get_state())): None
        }

    # -- queries by other modules

    def window(self, tensor: Tensor) -> StorageWindow:
        """Return the bytes that a meta tensor shows; a tensor that was not made here is recorded as lost."""
        storage = tensor.untyped_storage()
        number = self._numbers.get(identify(storage))
        if number is None:
            number = self._number(storage)
            self.record.add(RecordedOp(None, (), {}, [], {number: True}, (), Kind.LOST))
        return StorageWindow(
            number,
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor was made here."""
        return (
            tensor.device.type == "meta"
            and tensor.layout is torch.strided
            and is_plain(tensor)
            and identify(tensor.untyped_storage()) in self._numbers
        )

    def adopt(self, tensor: Tensor) -> Tensor:
        """Return a stand-in on the meta device for a real tensor, whose bytes are kept."""
        mirror = self._adopt_storage(tensor.untyped_storage(), tensor)
        window = StorageWindow(
            0, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), False, False
        )
        stand_in = window.view(mirror)
        stand_in = stand_in.conj() if tensor.is_conj() else stand_in
        return view_negated(stand_in) if tensor.is_neg() else stand_in

    def value(self, tensor: Tensor, reader: str) -> Tensor:
        """Return the real tensor, if its value does not depend on random numbers.

        Raises:
            PacelineError: PL455, PL458, PL459.
        """
        window = self.window(tensor)
        now = len(self.record.ops)
        if self.record.is_random(self.record.slice([window.storage], now)):
            self.refuse_read(reader)
        try:
            return replay(self.record, window, now)
        except (UninitialisedError, LostError, ChangedError):
            self.refuse(
                "PL458",
                saw=f"{where()} reads a value ({reader}) that depends on uninitialised memory, or on a "
                "tensor that was made outside of the factory.",
                rule="Only values that the factory itself makes are known while it runs on the meta device.",
                fix=BUILT,
            )

    def refuse_read(self, reader: str) -> NoReturn:
        """Refuse to return a value that depends on random numbers."""
        self.refuse(
            "PL455",
            saw=f"{where()} reads a value that depends on random numbers ({reader}).",
            rule="A factory runs on the meta device, where random numbers have no values yet: each "
            "parameter is drawn later, separately, from the seed and its name.",
            fix=f"Build the tensor without reading its values. {BUILT}",
        )

    def refuse(self, code: str, *, saw: str, rule: str, fix: str) -> NoReturn:
        """Raise the error, and remember it for the end of the construction."""
        error = PacelineError(code, saw=saw, rule=rule, fix=fix)
        self.refused = self.refused or error
        raise error

    # -- called by torch

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The function mode must not see calls made here.
        with without_functions():
            return self.perform(func, args, dict(kwargs or {}))

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the meta device, and record it if it writes."""
        name = read_schema(func).name.removeprefix("aten::")
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        self._check_kinds(name, tensors)
        written, overwritten = _written(func, name, args, kwargs)
        real = [t for t in tensors if t.device.type != "meta"]
        is_view = func.is_view and name != "lift_fresh"
        looks = name == "_local_scalar_dense" or (is_view and len(real) == len(tensors))
        if real and (looks or any(t.device.type != "meta" for t in written)):
            return self._perform_really(func, name, tensors, written, args, kwargs)
        if name == "_local_scalar_dense":
            return self.value(args[0], "item()").item()
        args, kwargs = tree_map_only(Tensor, self._on_meta, (args, kwargs))
        if name == "lift_fresh":
            if real and real[0].untyped_storage().resizable():
                self._foreign.discard(self.window(args[0]).storage)  # fresh, so no outside code sees it
            self.window(args[0])
            return args[0]
        if name == "set_" and isinstance(args[1], torch.UntypedStorage) and args[1].device.type != "meta":
            on_it = torch.empty(0, dtype=torch.uint8, device=args[1].device).set_(args[1])
            args = (args[0], self._adopt_storage(args[1], on_it), *args[2:])
        takes_device = any(argument.name == "device" for argument in read_schema(func).arguments)
        if takes_device and (not tensors or kwargs.get("device") is not None):
            kwargs["device"] = META
            kwargs.pop("pin_memory", None)
        windows = tree_map_only(Tensor, self.window, (args, kwargs))
        self._check_written(name, written)
        try:
            outputs = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not isinstance(error, NotImplementedError) and "meta tensor" not in str(error):
                raise
            outputs = self._without_meta(func, name, windows, args, kwargs, written)
        return self._note(func, name, windows, outputs, written, overwritten)

    def call_whole(self, func: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record one call of a Python function that fills a tensor at random, as one operation."""
        with unseen():
            if not self.knows(tensor):
                return func(tensor, *args, **kwargs)
            window = self.window(tensor)
            op = RecordedOp(
                func, (window, *args), kwargs, [], {window.storage: self.record.covers(window)}, ()
            )
            self._note_randomness(op)
            self.record.add(op)
            return tensor

    def check_shared(self) -> None:
        """Raise PL458 if numpy's memory was written after torch read it."""
        for tensor, data in self._shared:
            if not torch.equal(read_bytes(tensor), read_bytes(data.tensor)):
                self.refuse(
                    "PL458",
                    saw=f"The factory changes a numpy array of {tuple(tensor.shape)} that a tensor shares.",
                    rule="Writes of numpy are not recorded, so the values of the tensor at a given time are "
                    "not known.",
                    fix=f"Copy it: torch.tensor(array) in place of torch.from_numpy(array). {BUILT}",
                )

    def put_back_generators(self) -> None:
        """Restore the state of all generators that were drawn from."""
        for generator, state in self._generators.values():
            generator.set_state(state)

    # -- internals

    def _adopt_storage(self, storage: torch.UntypedStorage, tensor: Tensor) -> torch.UntypedStorage:
        """Return the stand-in of a real storage; `tensor` is any tensor on it."""
        if identify(storage) not in self._mirrors:
            data = Data(tensor, read_version(tensor))
            if not storage.resizable():
                data.keep()  # numpy's memory: its owner may write to it undetected
                self._shared.append((tensor, data))
            mirror = torch.UntypedStorage(storage.nbytes(), device=META)  # type: ignore[no-untyped-call]
            self._mirrors[identify(storage)] = mirror, data
            self._sources.append(storage)
            number = self._number(mirror)
            self._foreign.add(number)
            self.record.add(RecordedOp(None, (), {}, [], {number: True}, (), Kind.DATA, data=data))
        return self._mirrors[identify(storage)][0]

    def _number(self, storage: torch.UntypedStorage) -> int:
        number = self.record.add_storage(storage.nbytes())
        self._numbers[identify(storage)] = number
        self._kept.append(storage)
        return number

    def _on_meta(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == "meta" else self.adopt(tensor)

    def _check_kinds(self, name: str, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is not torch.strided or not is_plain(tensor):
                self.refuse(
                    "PL456",
                    saw=f"{where()} calls {name} on a {type(tensor).__name__} of layout {tensor.layout}.",
                    rule="Only dense tensors of torch's own class can be recorded and repeated.",
                    fix=BUILT,
                )

    def _check_written(self, name: str, written: list[Tensor]) -> None:
        for tensor in written:
            if self.window(tensor).storage in self._foreign:
                self.refuse(
                    "PL458",
                    saw=f"{where()} writes with {name} into memory from outside of the factory: that of a "
                    "numpy array or of another tensor.",
                    rule="What is written has no values yet while a factory runs on the meta device, so its "
                    "other owner would not see it.",
                    fix=f"Copy it first: torch.tensor(array), or tensor.clone(). {BUILT}",
                )

    def _perform_really(
        self,
        func: Any,
        name: str,
        tensors: list[Tensor],
        written: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Read or write a tensor that was made outside, as without Paceline."""
        if any(t.device.type == "meta" for t in tensors):
            self.refuse(
                "PL458",
                saw=f"{where()} writes with {name} into a tensor that was made outside of the factory.",
                rule="What is written has no values yet while a factory runs on the meta device.",
                fix=f"Make that tensor inside of the factory. {BUILT}",
            )
        for tensor in written:
            mirror = self._mirrors.pop(identify(tensor.untyped_storage()), None)
            if mirror is not None:
                mirror[1].keep()
        return func(*args, **kwargs)

    def _without_meta(
        self,
        func: Any,
        name: str,
        windows: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Tensor],
    ) -> Any:
        """Return outputs of an operation that cannot run on the meta device."""
        if written:
            return written[0] if len(written) == 1 else written
        storages = {leaf.storage for leaf in tree_iter(windows) if isinstance(leaf, StorageWindow)}
        numbers = self.record.slice(storages, len(self.record.ops))
        if torch.Tag.nondeterministic_seeded in func.tags or self.record.is_random(numbers):
            self.refuse(
                "PL456",
                saw=f"{where()} calls {name} on values that depend on random numbers, and torch cannot "
                "compute the shape or value of its result without them.",
                rule="A factory runs on the meta device, where random numbers have no values yet.",
                fix=BUILT,
            )
        real_args, real_kwargs = tree_map_only(Tensor, lambda t: self.value(t, name), (args, kwargs))
        if kwargs.get("device") is not None:
            real_kwargs["device"] = CPU

        def shape_only(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=META)

        return tree_map(shape_only, func(*real_args, **real_kwargs))

    def _note(
        self,
        func: Any,
        name: str,
        windows: tuple[tuple[Any, ...], dict[str, Any]],
        outputs: Any,
        written: list[Tensor],
        overwritten: set[int],
    ) -> Any:
        """Record an operation that has run; return its outputs."""
        flat = tree_flatten(outputs)[0]
        before = {id(t): self.window(t) for t in written}
        resized = name in ("resize_", "resize_as_")
        if resized:
            return self._note_resize(outputs, before)
        if torch.Tag.inplace_view in func.tags:
            return outputs  # other windows into the same bytes
        makes: list[tuple[int, StorageWindow]] = []
        writes: dict[int, bool] = {}
        for place, leaf in enumerate(flat):
            if isinstance(leaf, Tensor):
                self._check_kinds(name, [leaf])
                if identify(leaf.untyped_storage()) not in self._numbers:
                    writes[self._number(leaf.untyped_storage())] = True
                    makes.append((place, self.window(leaf)))
        if not makes and not written:
            return outputs  # a view
        pure: set[int] = set()
        for tensor in written:
            window = before[id(tensor)]
            overwrites = id(tensor) in overwritten
            writes[window.storage] = writes.get(window.storage, False) or (
                overwrites and self.record.covers(window)
            )
            if overwrites:
                pure.add(id(tensor))
        kind = Kind.EMPTY if name in _EMPTY else Kind.CALL
        reads = () if kind is Kind.EMPTY else self._reads(windows, [before[i] for i in pure])
        generators = [leaf for leaf in tree_iter(windows) if isinstance(leaf, torch.Generator)]
        args, kwargs = tree_map_only(torch.Generator, lambda generator: None, windows)
        args, kwargs = tree_map_only(torch.device, lambda device: CPU, (args, kwargs))
        op = RecordedOp(func, args, kwargs, makes, writes, reads, kind, dtype=torch.get_default_dtype())
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note_randomness(op, *generators)
        self.record.add(op)
        return outputs

    def _note_resize(self, outputs: Any, before: dict[int, StorageWindow]) -> Any:
        """Record that the bytes that a resize adds are uninitialised."""
        for window in before.values():
            num_bytes = self._kept[window.storage].nbytes()
            if num_bytes > self.record.num_bytes[window.storage]:
                fresh = self.record.num_bytes[window.storage] == 0
                self.record.num_bytes[window.storage] = num_bytes
                # Earlier content is refused instead of carried over: that would need the storage's old size.
                kind = Kind.EMPTY if fresh else Kind.LOST
                self.record.add(RecordedOp(None, (), {}, [], {window.storage: True}, (), kind))
        return outputs

    def _reads(self, windows: Any, overwritten: list[StorageWindow]) -> tuple[int, ...]:
        """Return the storages whose content an operation needs."""
        remaining = list(overwritten)
        reads: dict[int, None] = {}
        for leaf in tree_iter(windows):
            if isinstance(leaf, StorageWindow):
                if leaf in remaining:
                    remaining.remove(leaf)
                else:
                    reads[leaf.storage] = None
        return tuple(reads)

    def _note_randomness(self, op: RecordedOp, generator: torch.Generator | None = None) -> None:
        """Record the origin of an operation's random numbers.

        Numbers are seeded by name, unless the factory seeded the generator itself: then they are those that
        it would have got. Nothing is drawn on the meta device, so a mark is left in the generator's state. A
        state that is neither such a mark nor the initial one was set by the factory.
        """
        op.random = True
        drawing = generator if generator is not None else op.kwargs.get("generator")
        op.kwargs = {k: v for k, v in op.kwargs.items() if not isinstance(v, torch.Generator)}
        drawing = torch.default_generator if drawing is None else drawing
        if drawing.device.type != "cpu":
            self.refuse(
                "PL456",
                saw=f"{where()} draws from a generator on {drawing.device}.",
                rule="Weights are drawn on the CPU, so that they are the same on every device.",
                fix="Use a generator on the CPU in the factory.",
            )
        state = drawing.get_state()
        key = (id(drawing), _digest(state))
        self._generators.setdefault(id(drawing), (drawing, state))  # kept, so that no id is reused
        # A known state: the initial one (seeded by name), or the mark of an earlier draw from this generator.
        if key in self._drawn:
            previous = self._drawn[key]
            if previous is None:
                return
            op.draw = Draw(None, previous)
        else:
            op.draw = Draw(state, None)
        number = len(self.record.ops)
        # The mark: a state that only this operation leaves, so that a later draw is seen to follow it.
        drawing.manual_seed(0x9E3779B97F4A7C15 ^ number)
        self._drawn[(id(drawing), _digest(drawing.get_state()))] = number


@contextmanager
def unseen() -> Iterator[None]:
    """Hide the calls inside the context from both modes."""
    with without_modes(), without_functions():
        yield


def is_plain(tensor: Tensor) -> bool:
    """Return whether operations on a tensor behave as torch's own classes define."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def where() -> str:
    """Return the innermost module that is being built, and the line that called torch."""
    frame: FrameType | None = sys._getframe(1)
    line = module = None
    while frame is not None and module is None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and "parallel/construct" not in path and line is None:
            line = f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = type(owner).__name__
        frame = frame.f_back
    return " at ".join(part for part in (module or "The factory", line) if part)


def _written(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], set[int]]:
    """Return the tensors that an operation writes, and the ids of those whose old values it does not read."""
    written: list[Tensor] = []
    overwritten: set[int] = set()
    overload = f"{name}.{read_schema(func).overload_name}"
    for position, argument in enumerate(read_schema(func).arguments):
        is_declared = argument.alias_info is not None and argument.alias_info.is_write
        if not is_declared and argument.name not in _UNDECLARED.get(name, ()):
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for leaf in tree_iter(value):
            if isinstance(leaf, Tensor):
                written.append(leaf)
                if argument.is_out or name in _OVERWRITING or overload in _OVERWRITING:
                    overwritten.add(id(leaf))
    return written, overwritten


def _digest(state: Tensor) -> bytes:
    return bytes(state.numpy().data)
