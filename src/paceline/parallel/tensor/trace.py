"""Records one forward: every operation on tensors, and the module that it belongs to.

The forward runs on fake tensors, which have no numbers, so it costs no arithmetic and works on the meta
device. The dispatcher's operations are recorded: few of them describe any code, as they compose the others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from paceline.errors import PacelineError
from paceline.own_code import describe_place
from paceline.parallel.dropout.replacements import Masks
from paceline.parallel.objective import Trial
from paceline.parallel.results import leaves_as_found, list_held
from paceline.parallel.tensor.calls import (
    ATTENDING,
    SUMMED,
    CallSite,
    Site,
    change_operand,
    find_line,
    find_site,
    run_inside,
)
from paceline.parallel.tensor.differentiable import second_gradient_error
from paceline.parallel.tensor.hooks import Path, change_argument, change_input, change_output, find_tensors
from paceline.parallel.tensor.sizes import LENGTHY, SIZED
from paceline.phrases import first_line
from paceline.torch_seams.dispatch import TorchDispatchMode
from paceline.torch_seams.fake import LOGGER, FakeTensorMode, run_fake
from paceline.torch_seams.trees import tree_leaves, tree_map_only

# torch's file with the implementations of operations for tensors without numbers.
_META_KERNELS = "torch/_meta_registrations.py"
# Number of samples in an example batch; 2, because a dimension of size 1 would disappear.
NUM_SAMPLES = 2
# Functions whose calls in the model's code may have to be changed.
WATCHED = SIZED | SUMMED | LENGTHY
Resize = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
# Gives the shape of a parameter or buffer in a trace, by name: a check uses it to see a rank's parts.
Reshape = Callable[[str, Tensor], tuple[int, ...]]


@dataclass
class TracedOp:
    """One operation of a forward.

    Attributes:
        name: of the dispatcher, without overload: `mm`, `view`, `native_layer_norm`.
        args: its arguments, with `Ref`s in place of tensors.
        kwargs: the same for keywords.
        outputs: numbers of the tensors that it returned, in order.
        module: full name of the innermost module that is being called.
        is_hooked: whether it ran in a hook of that module, not in its forward.
        is_outside: whether it ran outside of the model: in `forward=` or the loss.
        library: that defines it, `aten` for torch's own.
        line: file, line and function of the code that called it.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[int]
    module: str
    is_hooked: bool = False
    is_outside: bool = False
    library: str = "aten"
    line: tuple[str, int, str] | None = field(default=None, compare=False)

    @cached_property
    def inputs(self) -> list[int]:
        """The numbers of the tensors that it takes; of `new_zeros` none: it takes a type and a device."""
        given = () if self.name.startswith("new_") else (self.args, self.kwargs)
        return [leaf.number for leaf in tree_leaves(given) if isinstance(leaf, Ref)]


@dataclass(frozen=True)
class Ref:
    """A placeholder for a tensor in recorded arguments."""

    number: int


@dataclass
class ModuleCall:
    """One call of a module: the operations from `first` to `last` (excluded) ran inside it.

    Attributes:
        inputs: by argument (its place, or its name for keywords), the tensors' numbers; nested ones are
            left out.
        tensors: the same by path, with those in tuples and lists (`hooks.find_tensors`).
        outputs: numbers of the tensors that it returned, by their place among the leaves of the result.
    """

    module: str
    first: int
    inputs: dict[int | str, int]
    tensors: dict[Path, int] = field(default_factory=dict)
    last: int = -1
    outputs: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Detour:
    """A change of a tensor on its way into or out of a module, in a trace only.

    Attributes:
        module: full name.
        keys: arguments of its call that are the tensor; empty for its first output.
        change: returns the tensor to use instead; not recorded.
        spot: the call in the module's forward whose result is changed, in place of the module's.
        takes: whether the activation that this call takes is changed instead of its result. Of a call of
            attention, `change` gets all arguments and returns those to use.
        path: of a tensor among the arguments of the module's call, in place of `keys`.
        number: of the output among the tensors that the module returns.
    """

    module: str
    keys: tuple[int | str, ...]
    change: Callable[..., Any]
    spot: CallSite | None = None
    takes: bool = False
    path: Path = ()
    number: int = 0


@dataclass
class Written:
    """One call of a function of torch that a module's own forward makes (`calls.py`).

    Attributes:
        module: full name of the module.
        spot: the call among those of the forward.
        func: the function, of `WATCHED`.
        args, kwargs: as given, with `Ref`s in place of tensors.
        first: number of the first operation that ran inside,
        last: number after the last one.
        outputs: numbers of the tensors that it returned.
        taken: by place of an argument, the number of that tensor; `None` for anything else.
        named: the same for keywords.
    """

    module: str
    spot: CallSite
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: int
    last: int = -1
    outputs: list[int] = field(default_factory=list)
    taken: list[int | None] = field(default_factory=list)
    named: dict[str, int | None] = field(default_factory=dict)


@dataclass
class Trace:
    """A recorded forward.

    Attributes:
        ops: the operations in order.
        calls: the calls of modules, in the order in which they began; the first one is the model's.
        shapes: by number of a tensor.
        dtypes: by number of a tensor.
        names: by number, the full name of a parameter or buffer (the first, if it has several).
        parameters: the numbers of the tensors that are parameters.
        outputs: numbers of the tensors that the model returned, by index among the leaves.
        written: calls of functions that were given sizes or that may produce a sum, in order.
        drawn: by key of a dropout (`parallel/dropout/replacements.py`), the tensor that was dropped.
        attended: calls of attention as one function, in order.
        replaced: by number of a tensor that a detour has returned, that of the one it was given.
        leaving: by number of a tensor that code outside of the model gets other than as its result, how.
    """

    ops: list[TracedOp]
    calls: list[ModuleCall]
    shapes: dict[int, tuple[int, ...]]
    dtypes: dict[int, torch.dtype]
    names: dict[int, str]
    parameters: set[int]
    outputs: list[int]
    written: list[Written]
    drawn: dict[str, int]
    attended: list[Written] = field(default_factory=list)
    leaving: dict[int, str] = field(default_factory=dict)
    replaced: dict[int, int] = field(default_factory=dict)

    def list_produced(self) -> set[int]:
        """Return the tensors that the model's operations made; what `forward=` cuts is still the batch."""
        return {number for op in self.ops if not op.is_outside for number in op.outputs}


@leaves_as_found
def trace_forward(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    reshape: Reshape | None = None,
    *,
    partial_result: bool = False,
    resize: Resize | None = None,
    masks: Masks | None = None,
    detours: Sequence[Detour] = (),
    finds_kept: bool = False,
) -> Trace:
    """Run `run(model)` on fake tensors and record it.

    Args:
        model: in the mode (train or eval) that is to be traced; its parameters may be on meta.
        run: calls the model, with tensors of the batch that may be real. The loss of a `Trial` runs too, as
            far as it can without numbers, unless parts are traced.
        reshape: from name and tensor to the shape that the parameter or buffer has in this trace.
        partial_result: if the forward fails, return what was recorded until then instead of raising.
        resize: from the number of a sized call, its function and arguments, to the arguments to use.
        masks: the model's dropout, whose draws are recorded.
        detours: stand in for the hooks of a plan.
        finds_kept: whether to find which of the tensors that detours return still exist after the forward.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    seen: dict[int, Tensor] = {}
    with mode:
        for name, tensor in _list_tensors(model):
            if id(tensor) not in seen:
                shape = tuple(tensor.shape) if reshape is None else reshape(name, tensor)
                device = "cpu" if tensor.device.type == "meta" else tensor.device
                seen[id(tensor)] = torch.empty(shape, dtype=tensor.dtype, device=device)
            fakes[name] = seen[id(tensor)]
    recorder = _ForwardRecorder()
    functions = _Functions(recorder, resize, detours)
    for name, fake in fakes.items():
        names.setdefault(recorder.number(fake), name)
    parameters = {recorder.number(fakes[name]) for name, _ in model.named_parameters()}
    caller = _Caller(model, run, recorder)
    caller.runs_loss = not partial_result
    drawn: dict[str, int] = {}
    with ExitStack() as stack:
        if masks is not None:
            stack.enter_context(_listening(masks, recorder, drawn))
        stack.enter_context(torch.no_grad())
        stack.enter_context(mode)
        stack.enter_context(recorder.watching(model))
        stack.enter_context(recorder.taking(detours, model))
        stack.enter_context(recorder)
        stack.enter_context(functions)
        try:
            result = functional_call(
                caller, {f"model.{name}": fake for name, fake in fakes.items()}, (), tie_weights=False
            )
        except Exception as error:
            if not partial_result:
                if isinstance(error, PacelineError):
                    raise
                raise _forward_error(model, recorder, error) from error
            result = None
    trace = Trace(
        recorder.ops,
        recorder.calls,
        recorder.shapes,
        recorder.dtypes,
        names,
        parameters,
        recorder.list_outputs(result),
        functions.calls,
        drawn,
        functions.attended,
        replaced=recorder.replaced,
    )
    if not partial_result:
        trace.leaving = recorder.list_leaving(model, trace.outputs, is_whole=caller.is_whole)
    elif finds_kept and recorder.replaced:
        trace.leaving = recorder.list_held(model, dict.fromkeys(recorder.replaced, recorder.ops[-1]))
    return trace


def _forward_error(model: nn.Module, recorder: _ForwardRecorder, error: Exception) -> PacelineError:
    """Return the error for a failed trial forward: caused by torch's stand-in, or by the model or batch."""
    saw = f"a trial forward of {type(model).__name__} failed in {recorder.where()}: "
    saw += f"{type(error).__name__}: {first_line(error)}"
    rule = "To find what tensor parallelism can split, one forward is traced on tensors without values."
    fix = (
        "Pass an example batch that the forward accepts. If a value of a tensor decides what is computed "
        "(.item(), if x.any()), use dp_replicate or dp_shard, or move that out of the forward."
    )
    frames = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    if any(code.co_filename == torch.autograd.__file__ for code in frames):
        return second_gradient_error(saw)
    if frames and any(code.co_filename.endswith(_META_KERNELS) for code in frames):
        saw += " (in torch's stand-in for this operation on tensors without values)"
        rule += " For this operation torch's stand-in refuses the types that its kernel may take."
        fix = (
            "The model and the example are correct. Use another implementation of the operation, if the "
            'model has one (for mixtures of experts of transformers: experts_implementation="eager"), or '
            "leave tp out and use dp_shard."
        )
    return PacelineError("PL460", saw=saw, rule=rule, fix=fix)


def words(text: str) -> list[str]:
    """Return names of operations from a text that lists them."""
    return text.split()


def cut_batch(batch: Any) -> Any:
    """Return the first samples of nested tensors, as an example."""
    return tree_map_only(Tensor, lambda tensor: tensor[:NUM_SAMPLES] if tensor.dim() else tensor, batch)


@contextmanager
def _listening(masks: Masks, recorder: _ForwardRecorder, drawn: dict[str, int]) -> Iterator[None]:
    before, unsafe = masks.on_draw, list(masks.unsafe)
    masks.on_draw = lambda key, dropped, _: drawn.__setitem__(key, recorder.number(dropped))
    try:
        with masks.drawing(0, range(NUM_SAMPLES)):
            yield
    finally:
        # Draws marked unsafe by a trial do not count: its batch may not have been cut by samples.
        masks.on_draw, masks.unsafe[:] = before, unsafe


class _Caller(nn.Module):
    """A module whose forward calls a function of the model, as `functional_call` requires."""

    def __init__(self, model: nn.Module, run: Callable[[nn.Module], Any], recorder: _ForwardRecorder) -> None:
        super().__init__()
        self.model, self.run = model, run
        self.is_whole = False
        self._recorder, self.runs_loss = recorder, False

    def forward(self) -> Any:
        result = self.run(self.model)
        self._recorder.end_forward()
        if self.runs_loss and isinstance(self.run, Trial):
            # A loss that needs numbers (.item()) cannot be followed to its end.
            with suppress(Exception):
                self.run.loss(result)
                self.is_whole = True
        return result


class _ForwardRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[TracedOp] = []
        self.calls: list[ModuleCall] = []
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.dtypes: dict[int, torch.dtype] = {}
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []  # keeps tensors alive: a freed tensor's id would be reused
        self._open: list[ModuleCall] = []
        # The modules whose own forward is running, each with the number of calls made per site so far.
        self._forwards: list[tuple[str, Counter[Site]]] = []
        self._is_paused = False
        self.replaced: dict[int, int] = {}
        self._end: int | None = None  # of the forward; the operations behind are the loss's

    def end_forward(self) -> None:
        """Mark the begin of the loss."""
        self._end = len(self.ops)

    def list_outputs(self, result: Any) -> list[int]:
        """Return the tensors that the model returned, or that `run` did if it calls parts of it only."""
        called = [call for call in self.calls if call.module == ""]
        if called:
            return called[0].outputs
        for op in self.ops[: self._end]:
            op.is_outside = False  # code between the parts
        return [self.number(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    def list_leaving(self, model: nn.Module, outputs: list[int], *, is_whole: bool) -> dict[int, str]:
        """Return the tensors of the model that code outside of it gets, other than as its result, and how.

        Args:
            is_whole: whether the loss ran to its end. If not, it might use every tensor that still exists.
        """
        called = [call for call in self.calls if call.module == ""]
        found = {} if called else dict.fromkeys(outputs, "forward= returns it and does not call the model")
        given = {number for call in called for number in call.outputs}
        makers = {n: op for op in self.ops if not op.is_outside for n in op.outputs if n not in given}
        for op in self.ops if is_whole else self.ops[: self._end]:
            for number in makers.keys() & set(op.inputs if op.is_outside else ()):
                line = "" if op.line is None else f" ({describe_place(*op.line)})"
                where = makers[number].module or "the model"
                found.setdefault(number, f"{op.name} outside of the model uses a tensor of {where}{line}")
        if not is_whole:
            held = {number: op for number, op in makers.items() if op.name != "detach"}
            found = {**self.list_held(model, held), **found}
        return found

    def list_held(self, model: nn.Module, numbers: Mapping[int, TracedOp]) -> dict[int, str]:
        """Return those of some tensors that something other than this recorder refers to."""
        owners = {id(vars(module)): name for name, module in model.named_modules()}
        found: dict[int, str] = {}
        order = list(numbers)
        for place, holder in list_held([self._kept[number] for number in order], {id(self._kept)}):
            owner = owners.get(id(holder), owners.get(id(getattr(holder, "__dict__", None))))
            where = "" if owner is None else f", by {owner or 'the model'}"
            made = numbers[order[place]].module or "the model"
            found.setdefault(order[place], f"a tensor of {made} is kept after the forward{where}")
        return found

    def find_call(self, site: Site) -> tuple[str, CallSite]:
        """Return the module whose own forward is running, and the call in it that comes now."""
        module, passed = self._forwards[-1]
        passed[site] += 1
        return module, CallSite(site, passed[site] - 1)

    @contextmanager
    def _running(self, name: str) -> Iterator[None]:
        self._forwards.append((name, Counter()))
        try:
            yield
        finally:
            self._forwards.pop()

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Record nothing inside the context."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            number = self._numbers[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
            self.shapes[number], self.dtypes[number] = tuple(tensor.shape), tensor.dtype
        return self._numbers[id(tensor)]

    def where(self) -> str:
        return self._open[-1].module or "the model" if self._open else "the model"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if self._is_paused:
            return func(*args, **keywords)
        refs, ref_keywords = tree_map_only(
            Tensor, lambda tensor: Ref(self.number(tensor)), (tuple(args), keywords)
        )
        result = run_fake(func, args, keywords)
        outputs = [self.number(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        if outputs:  # not a query, such as for the device
            module = self._open[-1].module if self._open else ""
            is_hooked = not self._forwards or self._forwards[-1][0] != module
            library = getattr(func, "namespace", "aten")
            line = find_line()
            self.ops.append(
                TracedOp(name, refs, ref_keywords, outputs, module, is_hooked, not self._open, library, line)
            )
        return result

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record every call of a module."""
        handles: list[RemovableHandle] = []
        restores: list[Callable[[], None]] = []
        logger = logging.getLogger(LOGGER)
        # Paceline reports a failed trial itself.
        before = logger.level
        logger.setLevel(logging.CRITICAL)
        for name, module in model.named_modules():

            def enter(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                inputs: dict[int | str, int] = {}
                for key, value in [*enumerate(args), *kwargs.items()]:
                    if isinstance(value, Tensor):
                        inputs[key] = self.number(value)
                tensors = {path: self.number(x) for path, x in find_tensors(args, kwargs).items()}
                self._open.append(ModuleCall(name, len(self.ops), inputs, tensors))
                self.calls.append(self._open[-1])

            def leave(_module: nn.Module, _args: Any, result: Any) -> None:
                call = self._open.pop()
                call.last = len(self.ops)
                call.outputs = [self.number(x) for x in tree_leaves(result) if isinstance(x, Tensor)]

            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(leave))
            if not isinstance(module, torch.jit.ScriptModule):
                restores.append(run_inside(module, partial(self._running, name)))
        try:
            yield
        finally:
            logger.setLevel(before)
            for restore in restores:
                restore()
            for handle in handles:
                handle.remove()

    @contextmanager
    def taking(self, detours: Sequence[Detour], model: nn.Module) -> Iterator[None]:
        """Apply the detours to the tensors; this is not recorded."""
        handles = []
        for detour in detours:
            module = model.get_submodule(detour.module)

            def change(tensor: Tensor, detour: Detour = detour) -> Tensor:
                with self.pausing():
                    changed: Tensor = detour.change(tensor)
                self.replaced[self.number(changed)] = self.number(tensor)
                return changed

            if detour.spot is not None:
                continue  # done by `_Functions`
            if detour.path:
                handles.append(change_argument(module, detour.path, change, prepend=True))
            elif detour.keys:
                handles.append(change_input(module, detour.keys, change, prepend=True))
            else:
                handles.append(change_output(module, change, detour.number))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: _ForwardRecorder, resize: Resize | None, detours: Sequence[Detour]) -> None:
        super().__init__()
        self.calls: list[Written] = []
        self.attended: list[Written] = []
        self._recorder = recorder
        self._resize = resize
        self._detours = {(d.module, d.spot): d.change for d in detours if d.spot and not d.takes}
        self._entering = {(d.module, d.spot): d.change for d in detours if d.spot and d.takes}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        site = find_site(func) if func in WATCHED or func in ATTENDING else None
        if site is None:
            return func(*args, **kwargs)
        number = self._recorder.number
        shown = tree_map_only(Tensor, lambda tensor: Ref(number(tensor)), (args, kwargs))
        first = len(self._recorder.ops)
        call = Written(*self._recorder.find_call(site), func, shown[0], shown[1], first)
        call.taken = [x.number if isinstance(x, Ref) else None for x in shown[0]]
        if func in ATTENDING:
            return self._attend(call, func, args, kwargs)
        if self._resize is not None and func not in SUMMED:
            args, kwargs = self._resize(len(self.calls), func, args, kwargs)
        self.calls.append(call)
        entering = self._entering.get((call.module, call.spot))
        if entering is not None:
            with self._recorder.pausing():
                args = change_operand(func, args, entering)
        result = func(*args, **kwargs)
        call.last = len(self._recorder.ops)
        call.outputs = [number(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        detour = self._detours.get((call.module, call.spot))
        if detour is not None:
            with self._recorder.pausing():
                result = detour(result)
        return result

    def _attend(self, call: Written, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.attended.append(call)
        number = self._recorder.number
        call.named = {key: number(x) if isinstance(x, Tensor) else None for key, x in kwargs.items()}
        entering = self._entering.get((call.module, call.spot))
        if entering is not None:
            with self._recorder.pausing():
                args, kwargs = entering(args, kwargs)
        result: Tensor = func(*args, **kwargs)
        call.last = len(self._recorder.ops)
        call.outputs = [number(result)]
        return result


def _list_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by all names of one module each.

    torch's `functional_call` would leave a fake in a module that it gets under two names.
    """
    for name, module in model.named_modules():
        yield from module.named_parameters(name, recurse=False, remove_duplicate=False)
        yield from module.named_buffers(name, recurse=False, remove_duplicate=False)
