"""Runs a loop over experts in two halves: the calls of experts first, and then what needs their answers.

The user's code calls one expert after the other, and goes on with each answer at once. Under ep the answers
are on other ranks, so it goes on with a stand-in: a tensor with a shape and no numbers. A function of torch
that gets a stand-in is postponed, and returns a stand-in too. So is every function that reads a tensor which
a postponed function writes. When the code has ended, all inputs of experts are known. Their answers are
fetched at once, and the postponed functions run in their order with the answers.

The code runs once and builds the same graph as in one process, so its gradients are added in the same order.

It cannot be followed where it decides by the numbers of an answer, or calls an expert with the answer of
another one: such experts are not a mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.errors import PacelineError
from paceline.torch_seams.dispatch import without_functions, without_modes
from paceline.torch_seams.tensors import identify, is_fake, read_version
from paceline.torch_seams.trees import tree_leaves, tree_map_only

_WRITING_OPERATORS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__"}
_WRITING_OPERATORS |= {"__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__"}
_MAKING = (torch.zeros, torch.empty, torch.ones, torch.full)
_SEARCHES = (torch.nonzero, Tensor.nonzero)
_READS: dict[str, Callable[[int], Any]] = {"__bool__": bool, "is_nonzero": bool, "item": int, "__int__": int}
_READS |= {"__index__": int}
# It ends with an underscore, and changes no number.
_NOT_WRITING = frozenset({"requires_grad_"})
# From a mode of tensors without numbers, and the input of an expert, to a tensor like its answer.
MakeStandIn = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class _Postponed:
    """A call of a function that waits for answers, and the state of torch in which it was made."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: list[Tensor]
    has_grad: bool
    autocast: tuple[str, bool, torch.dtype]

    def run(self, real: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the tensors of the result, with the tensors of `real` in place of stand-ins."""
        args, kwargs = tree_map_only(Tensor, lambda t: real.get(id(t), t), (self.args, dict(self.kwargs)))
        kind, is_enabled, dtype = self.autocast
        with torch.set_grad_enabled(self.has_grad), torch.autocast(kind, dtype=dtype, enabled=is_enabled):
            found = self.func(*args, **kwargs)
        return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


class ExpertLoop(TorchFunctionMode):
    """One run of a mixture's own code.

    Args:
        name: of the mixture, for messages.
        make_stand_in: makes the stand-in for an answer.

    Attributes:
        calls: by number of an expert, the input that it was called with.

    Usage: run the code inside the context, with calls of experts passed to `call`; then `check` and `finish`.
    """

    def __init__(self, name: str, make_stand_in: MakeStandIn) -> None:
        super().__init__()
        from paceline.torch_seams.fake import FakeTensorMode  # here, because its import is slow

        self.calls: dict[int, Tensor] = {}
        self._name = name
        self._make_stand_in = make_stand_in
        self._answers: dict[int, Tensor] = {}
        self._waiting: dict[int, Tensor] = {}
        self._written: set[int] = set()
        self._postponed: list[_Postponed] = []
        self._versions: list[tuple[Tensor, int]] = []
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def call(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Note the call of an expert, and return a stand-in for its answer.

        Raises:
            PacelineError: PL662 for a second call, more than one tensor, or the answer of another expert.
        """
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise self._refuse(f"expert {number} is called with more than one tensor.")
        [given] = args
        with without_functions():
            if number in self.calls:
                raise self._refuse(f"expert {number} is called twice in one forward.")
            if self._waits(given):
                raise self._refuse(f"expert {number} is called with another expert's output.")
            self.calls[number] = given
            self._versions.append((given, read_version(given)))
            answer = self._make_stand_in(self._fake, given)
        self._answers[number] = self._waiting[id(answer)] = answer
        return answer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with without_functions():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if not any(self._waits(tensor) for tensor in tensors):
                return func(*args, **kwargs)
            return self._postpone(func, args, kwargs, tensors)

    def _waits(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a stand-in, or one that a postponed function writes."""
        return is_fake(tensor) or (bool(self._written) and _find_storage(tensor) in self._written)

    def _postpone(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], used: list[Tensor]
    ) -> Any:
        if "out" in kwargs:
            raise self._refuse(
                f"{_name(func)} writes a result that depends on an expert's output to its argument out."
            )
        if _writes(func):
            # Nothing is written yet. The result is the tensor itself.
            if not is_fake(args[0]):
                self._written.add(_find_storage(args[0]))
            results: list[Tensor] = []
            found = None if _name(func) == "__setitem__" else args[0]
        else:
            found = self._find_shape(func, args, kwargs)
            results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            if not results:
                return found  # such as a size
        for tensor in used:
            if not is_fake(tensor):
                self._versions.append((tensor, read_version(tensor)))
        self._waiting |= {id(tensor): tensor for tensor in results}
        kind = used[0].device.type
        autocast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        grad = torch.is_grad_enabled()
        self._postponed.append(_Postponed(func, tuple(args), dict(kwargs), results, grad, autocast))
        return found

    def _find_shape(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            with self._fake, torch.no_grad():
                without_numbers = tree_map_only(Tensor, like, (args, dict(kwargs)))
                return func(*without_numbers[0], **without_numbers[1])
        except Exception as error:
            # torch's errors for results that depend on numbers have many types.
            if type(error).__module__.startswith("torch."):
                raise self._refuse(f"{_name(func)} depends on the values of an expert's output.") from error
            raise

    def check(self) -> None:
        """Raise if a postponed call would read other numbers than at its place in the code.

        Raises:
            PacelineError: PL662 if a tensor was changed in place that one reads.
        """
        if any(read_version(tensor) != version for tensor, version in self._versions):
            raise self._refuse(
                "a tensor is changed in place before an expert, or a function of its output, has used it."
            )

    def finish(self, answers: Mapping[int, Tensor], output: Any) -> Any:
        """Run what was postponed, and return the output with real tensors.

        Args:
            answers: of the experts that were called, by number.
            output: of the mixture's code.

        Raises:
            PacelineError: PL662 if the output has an answer that went through code which is not torch's.
        """
        real = {id(self._answers[number]): answer for number, answer in answers.items()}
        with without_functions():
            for each in self._postponed:
                found = each.run(real)
                if each.results:  # a function that only writes has changed a tensor that is known
                    real |= {id(fake): leaf for fake, leaf in zip(each.results, found, strict=True)}
            found = tree_map_only(Tensor, lambda tensor: real.get(id(tensor), tensor), output)
        if any(isinstance(leaf, Tensor) and is_fake(leaf) for leaf in tree_leaves(found)):
            raise self._refuse("an expert's output goes through a function that cannot be followed.")
        return found

    def _refuse(self, saw: str) -> PacelineError:
        return loop_error(self._name, saw)


class TrialLoop(TorchFunctionMode):
    """A mode in which a loop over experts runs on tensors without numbers.

    Which tokens an expert gets depends on numbers. In a trial forward each expert gets as many as there are.
    If they are counted, they are divided evenly. No expert is left out.

    Args:
        fake: the mode of these tensors.
    """

    def __init__(self, fake: Any) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], Tensor) or not is_fake(args[0]):
            found = func(*args, **kwargs)
            if func in _MAKING and not is_fake(found):
                # The loop adds answers to it, which have no numbers.
                with without_functions():
                    found = self._fake.from_tensor(found)
            return found
        given, name = args[0], _name(func)
        if name in _READS and not given.dim() and not given.is_floating_point():
            return _READS[name](1)  # an expert has tokens
        if name == "bincount":
            length = max(1, kwargs.get("minlength", args[2] if len(args) > 2 else 0))
            with without_functions(), without_modes():
                return torch.bincount(torch.arange(given.numel()) % length, minlength=length)
        if name in ("__getitem__", "__setitem__") and isinstance(args[1], Tensor | tuple):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (given, tuple(each for part in index for each in _search(part, given)), *args[2:])
        elif given.dim() and (func in _SEARCHES or (func is torch.where and len(args) == 1)):
            places = _find(given)
            return places if func is torch.where or kwargs.get("as_tuple") else torch.stack(places, 1)
        return func(*args, **kwargs)


def _find(mask: Tensor, num_found: int | None = None) -> tuple[Tensor, ...]:
    """Return places where a mask might be true: as many as its longest dimension has."""
    return tuple(mask.new_zeros(num_found or max(mask.shape), dtype=torch.int64) for _ in mask.shape)


def _search(index: Any, given: Tensor) -> tuple[Any, ...]:
    """Return a part of an index with places instead of a mask without numbers."""
    if not isinstance(index, Tensor) or index.dtype != torch.bool or not index.dim() or not is_fake(index):
        return (index,)
    # A mask of rows may be true everywhere; one of single numbers says which of a token's choices it is.
    return _find(index, index.numel() if index.dim() < given.dim() else None)


def like(tensor: Tensor) -> Tensor:
    """Return a tensor without numbers like this one, in a mode of such tensors; itself if it is one."""
    if is_fake(tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def loop_error(name: str, saw: str) -> PacelineError:
    """Return the error for a mixture whose loop over experts cannot be followed."""
    return PacelineError(
        "PL662",
        saw=f"in {name or 'the model'}, {saw}",
        rule='Under ep, the modules of a list whose name has "expert" in it are the experts of a mixture. '
        "Its forward calls each of them at most once, with one tensor that depends on no expert's output.",
        fix="Write the mixture as such a loop, rename the list if its modules are not experts, or leave ep "
        "out.",
    )


def _writes(func: Any) -> bool:
    name = _name(func)
    is_method = name.endswith("_") and not name.endswith("__") and name not in _NOT_WRITING
    return is_method or name in _WRITING_OPERATORS


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _find_storage(tensor: Tensor) -> int:
    return identify(tensor.untyped_storage())
