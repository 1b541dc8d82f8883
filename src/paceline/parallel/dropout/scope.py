"""Tracks the running module, so that a random draw has a name: `layers.0.self_attn`, second call.

Hooks on the modules that may draw keep a stack of frames while masks are being drawn, and do nothing
otherwise. A frame counts the calls of each module in it and its own draws. A draw's name thus identifies its
call, and layers that share one module do not share one mask. Names follow from the model's code alone.

Recompute runs a part of a forward again in backward, when the frames above it are gone. So
`torch.utils.checkpoint` is patched to remember the frame in which it was called, with its counts, and to
restore it for the second run.

Under `torch.compile` hooks are traced once, and the values that they read become conditions for the compiled
code. A block's full name would limit that code to this one block. So inside a compiled block frames have
names relative to it, which are the same for all blocks. The block's own name is a tensor, an input of the
graph (`compiled`).

The state is per process, not per thread: on CUDA, backward runs in threads of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.compiler import is_compiling

from paceline.torch_seams.modules import list_forward_hooks
from paceline.torch_seams.recomputing import allow_repetition, find_generator, set_generator


class ScopeFrame:
    """One call of a module.

    Attributes:
        parent: the frame that was on top before; `None` at the bottom of a stack.
        hook: of the module that is called; `None` at the bottom of a drawing.
        number: of this call among the parent's calls of this module, from 0.
        counts: number of calls of modules in it, by `Enter.counted`, and of its draws, by kind.
        is_entered: whether the frame exists before its module's hook runs: for a block that is compiled or
            recomputed.
    """

    __slots__ = ("counts", "hook", "is_entered", "number", "parent")

    def __init__(self, parent: ScopeFrame | None, hook: Enter | None, number: int) -> None:
        self.parent = parent
        self.hook = hook
        self.number = number
        self.counts: dict[str, int] = {}
        self.is_entered = False

    def find_path(self) -> str:
        """Return the name of this call; "" at the bottom. Calls after the first have a number: `layer~1`."""
        if self.hook is None or self.parent is None:
            return ""
        path, above = self.parent.find_path(), self.parent.hook
        number = f"~{self.number}" if self.number else ""
        if is_compiling() or self.hook.belongs_below(above):
            called = self.hook.relative
            return f"{path}.{called}{number}" if path and called else f"{path}{called}{number}"
        # Called from a module other than the one that it belongs to.
        return f"{path}>{self.hook.name}{number}" if path else self.hook.name + number

    def name_draw(self, kind: str) -> str:
        """Return the name of the next draw."""
        kind = "/" + kind
        number = self.counts.get(kind, 0)
        self.counts[kind] = number + 1
        return f"{self.find_path()}{kind}#{number}"


class Scope:
    """The position of the process in the stack of calls.

    Attributes:
        top: the frame of the innermost call; `None` while nothing is being drawn.
        base: the name that the frames' paths are relative to.
    """

    def __init__(self) -> None:
        self.top: ScopeFrame | None = None
        self.base = Base("", "")


class Base:
    """A name to which paths are relative.

    Attributes:
        token: the laid-out model, see `Enter`.
        path: name of a call in it, "" for the whole model.
        number: represents both, int64 without dimensions.
    """

    def __init__(self, token: str, path: str) -> None:
        digest = hashlib.blake2b(f"{token}:{path}".encode(), digest_size=7).digest()
        self.token = token
        self.path = path
        self.number = torch.tensor(int.from_bytes(digest, "little"))

    def join(self, name: str) -> str:
        """Return the full name of a draw or a call whose name is relative to this base."""
        return self.path + ("." if self.path and name[:1] not in ("", "/") else "") + name


scope = Scope()
# All bases of this process, by number; they are kept, because a backward may need one late.
bases: dict[int, Base] = {}


def find_base(token: str, path: str) -> Base:
    """Return the one base of a name."""
    found = _bases_by_name.get((token, path))
    if found is None:
        found = _bases_by_name[token, path] = Base(token, path)
        bases[int(found.number)] = found
    return found


_bases_by_name: dict[tuple[str, str], Base] = {}


class Enter:
    """A hook before a module's forward; picklable, and holds nothing of the model.

    Attributes:
        token: identifies the laid-out model, also in copies of it.
        name: the module's full name.
        above: full name of the nearest module above that has such a hook, `None` at the top.
        relative: the name below that module.
        counted: the key under which a frame counts calls.
    """

    def __init__(self, token: str, name: str, above: str | None) -> None:
        self.token = token
        self.name = name
        self.above = above
        self.relative = name[len(above) + 1 :] if above else name
        self.counted = f"{token}:{self.relative}"

    def belongs_below(self, above: Enter | None) -> bool:
        """Return whether a hook belongs to the nearest module above this one."""
        return above is not None and above.token == self.token and above.name == self.above

    def __call__(self, module: nn.Module, args: Any) -> None:
        top = scope.top
        if top is None:
            return
        if top.is_entered:
            top.is_entered = False
            return
        counts = top.counts
        number = counts.get(self.counted, 0)
        counts[self.counted] = number + 1
        scope.top = ScopeFrame(top, self, number)


class Leave:
    """A hook after the forward, also one that raised; drops the frames that inner calls left behind."""

    def __init__(self, enter: Enter) -> None:
        self.enter = enter

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        frame = scope.top
        if frame is None:
            return
        if not is_compiling():
            while frame is not None and frame.hook is not self.enter:
                frame = frame.parent
        if frame is not None and frame.parent is not None:
            scope.top = frame.parent


@contextmanager
def standing_at(frame: ScopeFrame | None, base: Base) -> Iterator[None]:
    """Use another stack inside the context; restore the earlier one afterwards, also after an error."""
    saved = scope.top, scope.base
    scope.top, scope.base = frame, base
    try:
        yield
    finally:
        scope.top, scope.base = saved


def _find_enter(module: nn.Module) -> Enter | None:
    return next((hook for hook in list_forward_hooks(module)[0].values() if isinstance(hook, Enter)), None)


def compiled(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, a module's compiled forward, run in a scope where names are relative to the module.

    Without it the masks are the same, but each block is compiled separately, and torch stops compiling after
    eight of them.
    """
    enter = _find_enter(module)
    if enter is None:
        return call

    def run(*args: Any, **kwargs: Any) -> Any:
        if scope.top is None:
            return call(*args, **kwargs)
        enter(module, args)
        outer = scope.top
        base = find_base(enter.token, scope.base.join(outer.find_path()))
        bottom = ScopeFrame(None, enter, 0)
        bottom.is_entered = True
        scope.top = outer.parent  # the caller's frame is restored on leaving
        with standing_at(bottom, base):
            return call(*args, **kwargs)

    return run


def _remember(function: Callable[..., Any], *, is_second: bool) -> Callable[..., Any]:
    """Return `function`, whose second and later runs use the scope of this call.

    Args:
        is_second: whether the first run is made elsewhere, so that all runs of the result are repetitions.
    """
    top = scope.top
    if top is None:
        return function
    frame, base = _copy(top), scope.base
    # A module that is checkpointed by hooks of its own is already entered, and will be entered once more.
    frame.is_entered = isinstance(function, nn.Module) and top.hook is _find_enter(function)
    num_runs = int(is_second)

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 1:
            return function(*args, **kwargs)
        with standing_at(_copy(frame), base):
            return function(*args, **kwargs)

    return run


def _copy(frame: ScopeFrame) -> ScopeFrame:
    copied = ScopeFrame(frame.parent, frame.hook, frame.number)
    copied.counts.update(frame.counts)
    copied.is_entered = frame.is_entered
    return copied


def remember_in_checkpoints() -> None:
    """Make both kinds of torch's checkpointing restore frames; patches once per process.

    A forward that is repeated by hooks (`checkpoint` of a module) may then be repeated several times.
    """
    without_reentrant = find_generator()
    if getattr(without_reentrant, "_paceline", False):
        return
    forward = torch_checkpoint.CheckpointFunction.forward

    def generate(
        fn: Callable[..., Any], preserve: bool, make_contexts: Any, *args: Any, **kwargs: Any
    ) -> Any:
        again = allow_repetition(make_contexts)
        return without_reentrant(_remember(fn, is_second=True), preserve, again, *args, **kwargs)

    def run_forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, _remember(run_function, is_second=False), *args)  # type: ignore[no-untyped-call]

    generate._paceline = True  # type: ignore[attr-defined]
    set_generator(generate)
    torch_checkpoint.CheckpointFunction.forward = staticmethod(run_forward)  # type: ignore[method-assign]
