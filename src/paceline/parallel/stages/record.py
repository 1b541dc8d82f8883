"""Records one forward without computing it: what each call returns, and what is used where.

The parameters are replaced by tensors without numbers (torch's fake tensors), so everything that depends on
them has a shape only. What depends on the batch alone (positions, masks) is computed as usual.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.parallel.flops import FlopCounter
from paceline.parallel.results import leaves_as_found, list_held
from paceline.parallel.stages.walk import Call, Walker, list_tensors, name_function
from paceline.torch_seams.fake import FakeTensorMode, RunFake
from paceline.torch_seams.modules import NormBase, own_buffers
from paceline.torch_seams.tensors import is_fake
from paceline.torch_seams.trees import tree_flatten, tree_map_only

# Functions that turn a tensor into a value of Python.
_READS = frozenset(
    {"__bool__", "__int__", "__float__", "__index__", "__complex__", "item", "tolist", "numpy", "is_nonzero"}
)
_WRITES = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__"}
)
_NORMS = frozenset({"batch_norm", "instance_norm"})  # they change buffers that they are given
_SHARING = frozenset({"data.__get__", "detach"})
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format)
# A tensor's name: the call that made it, and its place among that call's results.
Made = tuple[Call, int]

_APPLY = inspect.unwrap(torch.autograd.Function.apply).__code__


@dataclass(frozen=True)
class Leaf:
    """A part of what a call returned.

    Attributes:
        alias: number of the argument that it is, if it is one.
        shape, dtype: of a new tensor; `None` for a plain value.
        made: the name of the tensor, if the forward made it.
    """

    alias: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    made: Made | None = None
    value: Any = None


@dataclass(frozen=True)
class Result:
    """The result of a call in the trial forward.

    Attributes:
        function: the name of the function that was called; "" for a module.
        spec: the containers around the leaves.
        leaves: in order.
        end: the segment after the call.
        begin: of a module, the segment when it is called.
    """

    function: str
    spec: Any
    leaves: tuple[Leaf, ...]
    end: int
    begin: int = 0


@dataclass(frozen=True)
class LearnedTensor:
    """A tensor that depends on parameters.

    Attributes:
        needs_grad: whether a gradient flows back to it.
        segment: where it is made.
        uses: segments that use it; the last one for outputs of the model.
    """

    made: Made
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    segment: int
    uses: frozenset[int]


@dataclass
class ForwardRecord:
    """One forward.

    Attributes:
        num_segments: one more than blocks were called.
        entered: the blocks that were called, in order.
        functions: what every call of a function returned.
        modules: what every call of a module returned, by path.
        learned: the tensors that depend on parameters, by name, in the order in which they were made.
        opened: calls of modules that provide more than their result; these are followed inside.
        parameters: by the id of a parameter, the segments that use it.
        readers: by the id of a parameter, the full names of the modules that compute with it.
        costs: floating-point operations by segment.
        writes: tensors that a later segment changes in place: (name, segment, module).
        buffers: by full name, the segments that change a buffer; none where all stages do.
        dependent: names of buffers whose new values follow from the batch.
        buffer_users: by full name of a buffer, the segments that use it.
    """

    num_segments: int = 0
    entered: list[str] = field(default_factory=list)
    functions: dict[Call, Result] = field(default_factory=dict)
    modules: dict[str, Result] = field(default_factory=dict)
    learned: dict[Made, LearnedTensor] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)
    parameters: dict[int, set[int]] = field(default_factory=dict)
    readers: dict[int, set[str]] = field(default_factory=dict)
    costs: list[float] = field(default_factory=list)
    writes: list[tuple[Made, int, str]] = field(default_factory=list)
    buffers: dict[str, set[int]] = field(default_factory=dict)
    dependent: set[str] = field(default_factory=set)
    buffer_users: dict[str, set[int]] = field(default_factory=dict)


@leaves_as_found
def record_forward(
    model: nn.Module,
    blocks: Collection[str],
    run: Callable[[], Any],
    device: torch.device,
    loss: Callable[[Any], Any] | None = None,
) -> ForwardRecord:
    """Record a forward, and what a loss of its output uses besides, as far as that runs without numbers.

    Args:
        model: its parameters may be on the meta device.
        blocks: full names of the modules between which the model may be cut.
        run: calls the model.
    """
    recorder = _Recorder(model, blocks, device)
    with _refusing_kept(model, recorder), FlopCounter() as counter:
        recorder.count = counter.get_total_flops
        with recorder.following(), RunFake():  # type: ignore[no-untyped-call]
            output = run()
            recorder.end_segment()
            if loss is not None:
                try:
                    loss(output)
                except Exception:  # it needs numbers
                    recorder.use_held()
    return recorder.finish(output)


class _Recorder(Walker):
    def __init__(self, model: nn.Module, blocks: Collection[str], device: torch.device) -> None:
        super().__init__(list(model.named_modules()), blocks)
        self.count: Callable[[], float] = float
        self._record = ForwardRecord(costs=[])
        self._counted = 0.0
        self._keep: list[Any] = []  # ids stay those of these objects
        self._names: dict[int, Made] = {}
        self._paths: dict[Made, str] = {}
        self._found: dict[Made, tuple[Tensor, int]] = {}
        self._users: dict[Made, set[tuple[int, str]]] = defaultdict(set)
        self._outputs: dict[str, set[int]] = {}
        self._learned: set[int] = set()
        self._of_batch: set[int] = set()
        norms = [module for _, module in self._modules if isinstance(module, NormBase)]
        self._statistics = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
        self._twins: dict[int, Tensor] = {}
        self._origins: dict[int, int] = {}
        mode = self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        parameters = {id(p) for p in model.parameters()}
        for tensor in (*model.parameters(), *model.buffers()):
            is_parameter = id(tensor) in parameters
            if id(tensor) in self._twins or not (is_parameter or tensor.is_meta):
                continue
            with torch.no_grad(), mode:
                twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
            self._twins[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
            if id(tensor) in self._buffers:
                self._buffers[id(twin)] = self._buffers[id(tensor)]
            if is_parameter:
                self._learned.add(id(twin))
                self._origins[id(twin)] = id(tensor)

    def enter_block(self, name: str) -> None:
        _refuse_in_function(name)
        self.end_segment()
        self._record.entered.append(name)
        super().enter_block(name)

    def end_segment(self) -> None:
        """Note what the segment cost that ends now."""
        total = self.count()
        self._record.costs.append(total - self._counted)
        self._counted = total

    def use_held(self) -> None:
        """Note a use of every learned tensor that still exists: the loss may use it."""
        own = {id(self._keep), *map(id, self._found.values())}
        learned = [made for made, (tensor, _) in self._found.items() if id(tensor) in self._learned]
        for number, _ in list_held([self._found[made][0] for made in learned], own):
            self._users[learned[number]].add((self.segment, self.path))

    def run_function(self, call: Call, function: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda t: self._twins.get(id(t), t), (args, kwargs))
        inputs, name = list_tensors((args, kwargs)), name_function(function)
        is_learned = any(id(tensor) in self._learned for tensor in inputs)
        if is_learned and name in _READS:
            raise _decision_error(self.module_name, name)
        changed = kwargs.get("out", inputs[0]) if inputs and _writes(name, kwargs) else None
        if is_learned and changed is not None and not is_fake(changed):
            self._forget_numbers(changed)
            return self.run_function(call, function, args, kwargs)
        if not name.endswith(".__get__"):
            self._use(inputs)
        output = function(*args, **kwargs)
        outputs = list_tensors(output)
        depends = any(map(self._depends, inputs))
        if depends:
            self._of_batch |= {id(changed), *map(id, outputs)}
        if name in _SHARING and inputs and id(inputs[0]) in self._buffers:
            self._buffers |= {id(tensor): self._buffers[id(inputs[0])] for tensor in outputs}
        for buffer in inputs if name in _NORMS else ():
            if id(buffer) in self._buffers and id(buffer) not in self._statistics:
                self._of_batch.add(id(buffer))
                self._note_buffer(buffer, self.segment, "/")
        if changed is not None:
            self._note_write(changed, is_learned=is_learned)
        if not outputs:
            if is_learned and name == "__setitem__":
                self._record.functions[call] = self._describe(name, output, inputs, self.segment)
            return output
        for tensor in inputs:
            if id(tensor) in self._origins:
                self._record.readers.setdefault(self._origins[id(tensor)], set()).add(self.module_name)
        self._keep += outputs
        for place, tensor in enumerate(outputs):
            if id(tensor) not in self._names and not any(tensor is each for each in inputs):
                made = call, place
                self._names[id(tensor)] = made
                self._found[made] = tensor, self.segment
                self._paths[made] = self.path
            if is_learned:
                self._learned.add(id(tensor))
        self._record.functions[call] = self._describe(name, output, inputs, self.segment)
        return output

    def run_module(self, name: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        inputs = list_tensors((args, kwargs))
        self._keep += inputs
        with self.calling_module(name):
            path, begin = self.path, self.segment
            output = call(*args, **kwargs)
            self._keep += list_tensors(output)
            self._outputs[path] = {id(tensor) for tensor in list_tensors(output)}
            found = self._describe("", output, inputs, self.segment)
            self._record.modules[path] = replace(found, begin=begin)
        leaves, _ = tree_flatten(output)
        if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
            self._record.opened.add(path)  # it returns an object that may hold anything
        return output

    def finish(self, output: Any) -> ForwardRecord:
        """Return the record of a forward that has ended."""
        record = self._record
        record.num_segments = self.segment + 1
        for tensor in list_tensors(output):
            if id(tensor) in self._names:
                self._users[self._names[id(tensor)]].add((self.segment, ""))
        for made, (tensor, segment) in self._found.items():
            users = self._users[made]
            self._open(made, tensor, users)
            if id(tensor) in self._learned:
                record.learned[made] = LearnedTensor(
                    made,
                    tuple(tensor.shape),
                    tuple(tensor.stride()),
                    tensor.dtype,
                    tensor.requires_grad,
                    segment,
                    frozenset(used for used, _ in users),
                )
        return record

    def _open(self, made: Made, tensor: Tensor, users: set[tuple[int, str]]) -> None:
        """Mark the calls of modules that a tensor leaves other than as their result."""
        parts = self._paths[made].split("/") if self._paths[made] else []
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            if id(tensor) in self._outputs.get(path, ()):
                continue
            if any(user != path and not user.startswith(f"{path}/") for _, user in users):
                self._record.opened.add(path)

    def _use(self, inputs: list[Tensor]) -> None:
        for tensor in inputs:
            if id(tensor) in self._origins:
                self._record.parameters.setdefault(self._origins[id(tensor)], set()).add(self.segment)
            elif id(tensor) in self._names:
                self._users[self._names[id(tensor)]].add((self.segment, self.path))
            if id(tensor) in self._buffers:
                self._record.buffer_users.setdefault(self._buffers[id(tensor)], set()).add(self.segment)

    def _forget_numbers(self, target: Tensor) -> None:
        """Use a tensor without numbers in the place of one that becomes learned, and of the one it views."""
        base = target if target._base is None else target._base
        with torch.no_grad(), self._mode:
            twin = torch.empty_strided(base.size(), base.stride(), dtype=base.dtype, device=base.device)
            view = twin.as_strided(target.size(), target.stride(), target.storage_offset())
        for old, new in ((base, twin),) if target is base else ((base, twin), (target, view)):
            self._keep.append(old)
            self._twins[id(old)] = new
            if id(old) in self._buffers:
                self._buffers[id(new)] = self._buffers[id(old)]
            if id(old) in self._names:
                made = self._names[id(new)] = self._names[id(old)]
                self._found[made] = new, self._found[made][1]

    def note_replaced(self, name: str, buffer: Tensor) -> bool:
        """Note that the forward has put another tensor in a buffer's place; return whether it has numbers."""
        made = self._names.get(id(buffer))
        if is_fake(buffer):  # `out=` returns what is given, here the buffer's twin
            return self._buffers.get(id(buffer)) == name
        if made is not None:
            self._buffers[id(buffer)] = name
            self._note_buffer(buffer, self._found[made][1], self._paths[made])
        return True

    def _note_buffer(self, buffer: Tensor, segment: int, path: str) -> None:
        """Note a changed buffer. What the model's own forward does without parameters, all stages do."""
        name = self._buffers[id(buffer)]
        self._record.buffers.setdefault(name, set()).update({segment} if "/" in path else ())
        if id(buffer) in self._of_batch:
            self._record.dependent.add(name)

    def _depends(self, tensor: Tensor) -> bool:
        """Return whether a tensor's numbers follow from the batch."""
        number = id(tensor)
        is_known = number in self._names or number in self._buffers or number in self._origins
        return number in self._of_batch or not is_known

    def _note_write(self, target: Tensor, *, is_learned: bool) -> None:
        """Note a write; if it is learned, the target and all that shares its memory are from here on."""
        base = target if target._base is None else target._base
        if id(base) in self._buffers:
            if id(target) in self._of_batch:
                self._of_batch.add(id(base))
            self._note_buffer(base, self.segment, "/" if is_learned else self.path)
        if not is_learned:
            return
        self._learned.add(id(base))
        for made, (tensor, segment) in self._found.items():
            if tensor is base or tensor._base is base:
                self._learned.add(id(tensor))
                if segment < self.segment:
                    self._record.writes.append((made, self.segment, self.module_name))

    def _describe(self, function: str, output: Any, inputs: list[Tensor], end: int) -> Result:
        leaves, spec = tree_flatten(output)
        places = {id(tensor): place for place, tensor in enumerate(inputs)}
        found = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                found.append(Leaf(value=leaf if isinstance(leaf, _PLAIN) else None))
            elif id(leaf) in places:
                found.append(Leaf(alias=places[id(leaf)]))
            else:
                made = self._names.get(id(leaf))
                found.append(Leaf(shape=tuple(leaf.shape), dtype=leaf.dtype, made=made))
        return Result(function, spec, tuple(found), end)


def _writes(name: str, kwargs: Any) -> bool:
    is_method = name.endswith("_") and not name.endswith("__")
    return name in _WRITES or is_method or isinstance(kwargs.get("out"), Tensor)


@contextmanager
def _refusing_kept(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Refuse a forward that puts tensors into attributes of modules, or without numbers into buffers."""
    before = [
        (name, module, dict(vars(module)), dict(own_buffers(module)))
        for name, module in model.named_modules()
    ]
    yield
    for name, module, attributes, buffers in before:
        for key, value in vars(module).items():
            if key == "forward" or attributes.get(key) is value or key.startswith("_"):
                continue
            if list_tensors(value):
                raise _kept_error(name, key)
        for key, buffer in own_buffers(module).items():
            if buffer is None or buffer is buffers.get(key):
                continue
            if not recorder.note_replaced(f"{name}.{key}".removeprefix("."), buffer):
                raise _kept_error(name, key)


def _refuse_in_function(block: str) -> None:
    """Raise PL485 for a block that an `autograd.Function` of the user's calls: all ranks run its backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind = frame.f_locals["cls"] if frame.f_code is _APPLY else None
        if kind is not None and not kind.__module__.startswith("torch."):
            raise PacelineError(
                "PL485",
                saw=f"{kind.__name__}, an autograd.Function, calls {block}.",
                rule="Its backward runs in every stage, and the weights are in one.",
                fix="Call it inside of the block's own forward, or use torch.utils.checkpoint around blocks.",
            )
        frame = frame.f_back


def _decision_error(module: str, name: str) -> PacelineError:
    return PacelineError(
        "PL481",
        saw=f"the forward of {module or 'the model'} reads the value of a tensor that depends on the weights "
        f"({name}).",
        rule="Under pp, a rank has the values of its own stages only, and the cut follows from a forward "
        "without values.",
        fix="Compute the choice with tensors (torch.where), or use dp_shard or tp in place of pp.",
    )


def _kept_error(module: str, key: str) -> PacelineError:
    return PacelineError(
        "PL484",
        saw=f"the forward puts a tensor into the attribute {key!r} of {module or 'the model'}.",
        rule="Under pp, a rank runs its own stage only, so an attribute that another stage sets is missing "
        "or old there.",
        fix="Return the tensor from the module's forward and pass it on as an argument.",
    )
