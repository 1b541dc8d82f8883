"""Which module is running, so that a random draw has a name: `layers.0.self_attn`, second call.

Hooks on the modules that may draw keep a stack of frames while masks are being drawn, and do nothing
otherwise. A frame counts how often each module is called in it and how many draws it made, so a draw's name
says which call it belongs to (layers that share one module don't share one mask). Names follow from the
model's code alone.

Recompute runs a part of a forward again in backward, when the frames above it are gone. So
`torch.utils.checkpoint` is made to remember the frame in which it was called, with its counts, and to put it
back for the second run.

Under `torch.compile` hooks are traced once, and what they read becomes a condition for the compiled code. A
block's full name would make that code good for this one block. So inside of a compiled block frames have
names relative to it, which are the same for all blocks, and the block's own name travels as a tensor, an
input of the graph (`compiled`).

All of it is per process, not per thread: backward runs in threads of its own on CUDA.
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
from paceline.torch_seams.recomputing import find_generator, set_generator


class ScopeFrame:
    """One call of a module.

    Attributes:
        parent: the frame that was on top before; `None` at the bottom of a stack.
        hook: whose call it is; `None` at the bottom of a drawing.
        number: which call of this module by the parent it is, from 0.
        counts: how often modules were called in it, by `Enter.counted`, and draws made, by kind.
        is_entered: this call is known already when its module's hook comes: of a block that is compiled, or
            run again.
    """

    __slots__ = ("counts", "hook", "is_entered", "number", "parent")

    def __init__(self, parent: ScopeFrame | None, hook: Enter | None, number: int) -> None:
        self.parent = parent
        self.hook = hook
        self.number = number
        self.counts: dict[str, int] = {}
        self.is_entered = False

    def find_path(self) -> str:
        """The name of this call; "" at the bottom. Calls after the first have their number: `layer~1`."""
        if self.hook is None or self.parent is None:
            return ""
        path, above = self.parent.find_path(), self.parent.hook
        number = f"~{self.number}" if self.number else ""
        if is_compiling() or self.hook.belongs_below(above):
            called = self.hook.relative
            return f"{path}.{called}{number}" if path and called else f"{path}{called}{number}"
        # Called from elsewhere than from the module that it belongs to.
        return f"{path}>{self.hook.name}{number}" if path else self.hook.name + number

    def name_draw(self, kind: str) -> str:
        """The name of the next draw."""
        kind = "/" + kind
        number = self.counts.get(kind, 0)
        self.counts[kind] = number + 1
        return f"{self.find_path()}{kind}#{number}"


class Scope:
    """Where the process stands.

    Attributes:
        top: the frame of the innermost call; `None` while nothing is being drawn.
        base: what the frames' paths are relative to.
    """

    def __init__(self) -> None:
        self.top: ScopeFrame | None = None
        self.base = Base("", "")


class Base:
    """A name that paths are relative to.

    Attributes:
        token: the laid-out model, see `Enter`.
        path: name of a call in it, "" for all of it.
        number: stands for both, int64 without dimensions.
    """

    def __init__(self, token: str, path: str) -> None:
        digest = hashlib.blake2b(f"{token}:{path}".encode(), digest_size=7).digest()
        self.token = token
        self.path = path
        self.number = torch.tensor(int.from_bytes(digest, "little"))

    def join(self, name: str) -> str:
        """The full name of a draw or a call whose name is relative to this."""
        return self.path + ("." if self.path and name[:1] not in ("", "/") else "") + name


scope = Scope()
# Of all names that were a base in this process, by number; they stay, as backwards may ask late.
bases: dict[int, Base] = {}


def find_base(token: str, path: str) -> Base:
    """The one base of a name."""
    found = _bases_by_name.get((token, path))
    if found is None:
        found = _bases_by_name[token, path] = Base(token, path)
        bases[int(found.number)] = found
    return found


_bases_by_name: dict[tuple[str, str], Base] = {}


class Enter:
    """A hook before a module's forward; picklable, and holds nothing of the model.

    Attributes:
        token: which laid-out model it is, also in copies of it.
        name: the module's full name.
        above: full name of the nearest module above that has such a hook, `None` at the top.
        relative: the name below that one.
        counted: by what a frame counts calls.
    """

    def __init__(self, token: str, name: str, above: str | None) -> None:
        self.token = token
        self.name = name
        self.above = above
        self.relative = name[len(above) + 1 :] if above else name
        self.counted = f"{token}:{self.relative}"

    def belongs_below(self, above: Enter | None) -> bool:
        """Whether a hook is that of the nearest module above this one."""
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
    """The hook after the forward, also of one that raised; drops what inner calls left behind."""

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
    """Inside, the stack is another one; afterwards it is as it was, whatever was raised."""
    saved = scope.top, scope.base
    scope.top, scope.base = frame, base
    try:
        yield
    finally:
        scope.top, scope.base = saved


def _find_enter(module: nn.Module) -> Enter | None:
    return next((hook for hook in list_forward_hooks(module)[0].values() if isinstance(hook, Enter)), None)


def compiled(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, the compiled forward of a module with hooks, run where names are relative to the module.

    Without this around it the masks are the same, but each block is compiled for itself, and after
    eight of them torch gives up.
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
        scope.top = outer.parent  # where this is left again
        with standing_at(bottom, base):
            return call(*args, **kwargs)

    return run


def _remember(function: Callable[..., Any], *, is_second: bool) -> Callable[..., Any]:
    """`function`, whose second and later runs stand where this was called.

    Args:
        function: the forward of a block.
        is_second: whether the first run is another's, and all that come are repetitions.
    """
    top = scope.top
    if top is None:
        return function
    frame, base = _copy(top), scope.base
    # A module that is checkpointed by hooks of its own has been entered by now, and will be once more.
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
    """Makes torch's checkpointing, of both kinds, put frames back; does so once per process."""
    without_reentrant = find_generator()
    if getattr(without_reentrant, "_paceline", False):
        return
    forward = torch_checkpoint.CheckpointFunction.forward

    def generate(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return without_reentrant(_remember(fn, is_second=True), *args, **kwargs)

    def run_forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, _remember(run_function, is_second=False), *args)  # type: ignore[no-untyped-call]

    generate._paceline = True  # type: ignore[attr-defined]
    set_generator(generate)
    torch_checkpoint.CheckpointFunction.forward = staticmethod(run_forward)  # type: ignore[method-assign]
