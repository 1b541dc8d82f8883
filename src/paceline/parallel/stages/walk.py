"""Follows a forward: the modules that are called, the functions that they call, and how many blocks began.

A forward is named by its calls: a function call is the n-th call of that function in the call of a module (so
further reads of a shape or a device, which the trial forward may need, count for nothing else), and a
call of a module is named by those above it (`layers.3~0/mlp~0`). So the same call has the same name on every
stage, whatever was left out before it. The *segment* is the number of blocks that have been called so far:
blocks are where a model may be cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.torch_seams.modules import read_compiled_call
from paceline.torch_seams.trees import tree_leaves

# The path of a module's call, the name of a function, and the number of its call in it.
Call = tuple[str, str, int]


class CompiledBlock:
    """A block's calls, if it has compiled code: what follows the forward decides which code runs.

    Args:
        call: calls its hooks and its forward.
        compiled_call: the same, compiled.
    """

    def __init__(self, name: str, call: Callable[..., Any], compiled_call: Callable[..., Any]) -> None:
        self.name = name
        self.call = call
        self.compiled_call = compiled_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if Walker.current is None:  # outside of a stage
            return self.call(*args, **kwargs)
        return Walker.current.run_block(self, args, kwargs)


class Walker(TorchFunctionMode):
    """A mode that follows one forward; see the module's docstring.

    Args:
        modules: all of the model's, with their full names.
        blocks: full names of the modules that begin a segment.

    Attributes:
        current: the one that follows a forward at the moment.
        segment: the number of blocks that have been called.
    """

    current: ClassVar[Walker | None] = None

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], blocks: Collection[str]) -> None:
        super().__init__()
        self.segment = 0
        self._modules = modules
        self._blocks = frozenset(blocks)
        self._stack: list[str] = []
        self._numbers: list[Counter[str]] = [Counter()]
        self._calls: list[Counter[str]] = [Counter()]
        self._is_hidden = False
        self._is_inside = False
        self._begun = ""
        # The modules that are followed, with their own forwards in the instance, if they have any.
        self._followed: list[tuple[nn.Module, Any]] = []

    @property
    def path(self) -> str:
        """The name of the innermost call of a module; "" outside of all."""
        return "/".join(self._stack)

    @property
    def module_name(self) -> str:
        """The full name of the innermost module, for messages."""
        return self._stack[-1].rpartition("~")[0] if self._stack else ""

    def enter_block(self, name: str) -> None:
        """Note that a block begins. None of its hooks has run."""
        self.segment += 1

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Follow no calls of modules inside the context, which is a block that is followed as a whole."""
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Follow no functions inside the context; other modes still see them."""
        before, self._is_hidden = self._is_hidden, True
        try:
            yield
        finally:
            self._is_hidden = before

    def run_module(self, name: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a module's forward, in `calling_module` unless in `inside`; called in its place."""
        raise NotImplementedError

    def run_block(self, block: CompiledBlock, args: Any, kwargs: Any) -> Any:
        """Run a block that has compiled code, uncompiled."""
        self.enter_block(block.name)
        self._begun = block.name
        return block.call(*args, **kwargs)

    def run_function(self, call: Call, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of torch."""
        return function(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_hidden:
            return func(*args, **(kwargs or {}))
        name = name_function(func)
        number = self._numbers[-1][name]
        self._numbers[-1][name] += 1
        return self.run_function((self.path, name, number), func, args, kwargs or {})

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the forward inside the context."""
        handles = []
        for name, module in self._modules:
            if name in self._blocks and not isinstance(read_compiled_call(module), CompiledBlock):
                handles.append(module.register_forward_pre_hook(self._begin(name), prepend=True))
            self._followed.append((module, vars(module).get("forward")))
            # __setattr__ takes much longer.
            vars(module)["forward"] = partial(self.run_module, name, module.forward)
        before, Walker.current = Walker.current, self
        try:
            with self:
                yield
        finally:
            Walker.current = before
            for handle in handles:
                handle.remove()
            for module, own in self._followed:
                _set_forward(module, own)
            self._followed.clear()

    @contextmanager
    def calling_module(self, name: str) -> Iterator[None]:
        """Enter a module's call inside the context, and a block that is called without its hooks."""
        if name in self._blocks and self._begun != name:
            self.enter_block(name)
        self._begun = ""
        with self.calling(name):
            yield

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Name a module's call inside the context."""
        number = self._calls[-1][name]
        self._calls[-1][name] += 1
        self._stack.append(f"{name}~{number}")
        self._numbers.append(Counter())
        self._calls.append(Counter())
        try:
            yield
        finally:
            self._stack.pop()
            self._numbers.pop()
            self._calls.pop()

    @contextmanager
    def unfollowed(self) -> Iterator[None]:
        """Restore all modules' own forwards inside the context, because a compiler must see these."""
        wrapped = [vars(module)["forward"] for module, _ in self._followed]
        for module, own in self._followed:
            _set_forward(module, own)
        try:
            yield
        finally:
            for (module, _), forward in zip(self._followed, wrapped, strict=True):
                _set_forward(module, forward)

    def _begin(self, name: str) -> Callable[..., None]:
        """Return a hook that runs before all others of a block: they belong to its segment."""

        def begin(*_: Any) -> None:
            self._begun = name
            self.enter_block(name)

        return begin


def _set_forward(module: nn.Module, forward: Any) -> None:
    """Set a module's forward in the instance; `None` for that of its class."""
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def name_function(function: Any) -> str:
    """Return the name of a function of torch; of a property that is read or set, with the property's."""
    name: str = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):
        return f"{getattr(getattr(function, '__self__', None), '__name__', '')}.{name}"
    return name
