"""Finds the types that a model really computes in, and records random draws.

A model trained in fp64 may compute parts in fp32: a norm, a scan, the logits. Rounding in fp64 hardly ever
flips a rounding to fp32, so reruns that move weights by a last bit of fp64 do not show it. A layout that adds
up such a part in another order does. `Rounding` lists the modules that compute so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.torch_seams.dispatch import TorchDispatchMode
from paceline.torch_seams.trees import tree_leaves
from paceline.train.trainer import Trainer
from paceline.verifying.observe import as_numbers, wrap_functions

# The owner of a narrow result of the loss function; no module has such a name.
LOSS = "the loss"
_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# From the widest to the narrowest.
KINDS_OF_TYPES = tuple(_NAMES.values())


def is_narrower(tensor: Tensor, eps: float) -> bool:
    """Return whether a tensor's type is floating or complex and coarser than a last bit of `eps`."""
    return _real_type(tensor) in _NAMES and torch.finfo(tensor.dtype).eps > eps


def _real_type(tensor: Tensor) -> torch.dtype:
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


class Modules:
    """A stack of the modules whose forwards run, by name.

    Args:
        model: its modules are followed by permanent hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: list[str] = []
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks; its caller counts in its place
                continue
            module.register_forward_pre_hook(lambda _module, _args, name=name: self._names.append(name))
            module.register_forward_hook(lambda _module, _args, _output: self._leave(), always_call=True)

    def _leave(self) -> None:
        if self._names:
            self._names.pop()

    @property
    def current(self) -> str:
        """The innermost module's name, empty for the model itself."""
        return self._names[-1] if self._names else ""

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Attribute the operations inside the context to `name`."""
        self._names.append(name)
        try:
            yield
        finally:
            self._names.clear()


class Rounding(TorchFunctionMode):
    """A torch function mode that lists modules computing in a narrower type.

    Only results that need a gradient count: a table of angles made of positions is the same on every layout,
    however narrow. A view or an in-place change has no result of its own.

    Args:
        trainer: of one process; its forward and loss are observed from then on.
        eps: smallest step of the training's type.

    Attributes:
        narrow: by module, the narrowest type that its own code computes in.
    """

    def __init__(self, trainer: Trainer, eps: float) -> None:
        super().__init__()
        self.narrow: dict[str, str] = {}
        self._eps = eps
        self._modules = Modules(trainer.model)
        wrap_functions(trainer, self._observe, self._observe_loss)

    def _observe(self, inner: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
        with self:
            return inner(model, batch)

    def _observe_loss(self, inner: Callable[..., Any], output: Any, batch: Any) -> Any:
        with self, self._modules.at(LOSS):
            return inner(output, batch)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Observe one call of torch."""
        result = func(*args, **(kwargs or {}))
        for each in result if type(result) in (tuple, list) else (result,):
            if isinstance(each, Tensor):
                self._note(each, args, kwargs)
        return result

    def _note(self, result: Tensor, args: Any, kwargs: Any) -> None:
        if not is_narrower(result, self._eps) or not result.requires_grad or result.is_leaf:
            return
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        if result.untyped_storage().data_ptr() not in given:
            keep_narrowest(self.narrow, self._modules.current, result)


class Types(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that lists the narrowest type of every operation, by module in forward.

    Unlike `Rounding` it sees backward, collectives and the operations that a layout adds around a module.

    Args:
        modules: tracks the running module.
        eps: smallest step of the training's type.

    Attributes:
        forward: by module.
        outside: outside of any forward, under `""`.
        draws: digests of random numbers drawn in forwards, by `microbatch/module`.
        is_forward: whether a forward runs; set by the caller.
        microbatch: the running microbatch; set by the caller.
    """

    def __init__(self, modules: Modules, eps: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward: dict[str, str] = {}
        self.outside: dict[str, str] = {}
        self.draws: dict[str, list[str]] = {}
        self.is_forward = False
        self.microbatch = -1
        self._modules, self._eps = modules, eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Observe one operation."""
        result = func(*args, **(kwargs or {}))
        if self.is_forward and torch.Tag.nondeterministic_seeded in func.tags:
            self._note_draw(func, result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.numel() > 1 and is_narrower(leaf, self._eps):
                if self.is_forward:
                    keep_narrowest(self.forward, self._modules.current, leaf)
                else:
                    keep_narrowest(self.outside, "", leaf)
        return result

    def _note_draw(self, func: Any, result: Any) -> None:
        drawn = next((leaf for leaf in reversed(tree_leaves(result)) if isinstance(leaf, Tensor)), None)
        if drawn is not None and drawn.numel():
            plain = as_numbers(drawn.detach()).to(torch.float64).flatten()
            places = torch.arange(1, len(plain) + 1, dtype=torch.float64, device=plain.device)
            digest = f"{func} {list(drawn.shape)} {float((plain * places).sum())!r}"
            self.draws.setdefault(f"{self.microbatch}/{self._modules.current}", []).append(digest)


def keep_narrowest(table: dict[str, str], name: str, tensor: Tensor) -> None:
    """Record a tensor's type if it is narrower than the type that the table has."""
    found = _NAMES[_real_type(tensor)]
    if name not in table or KINDS_OF_TYPES.index(table[name]) < KINDS_OF_TYPES.index(found):
        table[name] = found
