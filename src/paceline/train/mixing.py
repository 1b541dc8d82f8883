"""Finds by trial steps on small tensors which parameters an optimizer must have whole.

Ranks that hold parts of a tensor can step them apart only if the optimizer is elementwise. Its name does not
show that, and users write optimizers of their own. So a copy of the optimizer steps small tensors, whole and
cut into pieces:

- If the results are equal, ranks step their parts.
- If they differ (Muon, LAMB, Adafactor), a rank must have the tensor whole (`whole_steps.py`).
- If the gradient of another parameter changes them (Prodigy), or random numbers do, the optimizer is refused:
  no rank has all parameters, or draws the random numbers of one process.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from paceline.errors import PacelineError
from paceline.torch_seams.dispatch import TorchDispatchMode

# Elementwise for sure; a trial would only take time.
_ELEMENTWISE = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop),
    *(optim.ASGD, optim.Adagrad, optim.Adadelta),
}
# The largest dimensions of a trial's matrices and of its other tensors. Some optimizers factor only matrices
# of at least 128 rows.
_MAX_SIZES = {1: 160, 2: 160}
_MAX_SIZE_OF_MANY = 12
# The steps of a trial: some optimizers adapt, clip or precondition only after the first ones.
_NUM_STEPS = 12
# Share of the largest number: kernels may round an element by its place.
_TOLERANCE = 1e-5

# By name of the state, and "" for the change of the parameter.
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Parted:
    """A trained parameter.

    Attributes:
        name: full name.
        parameter: as the optimizer has it.
        shape: of the whole tensor.
        dims: the dimensions along which the layout divides it.
    """

    name: str
    parameter: Tensor
    shape: tuple[int, ...]
    dims: frozenset[int]


@dataclass(frozen=True)
class _Tried:
    """A tensor of a trial, in place of a parameter in group number `group`; `gradients` has one per step."""

    group: int
    like: Parted
    start: Tensor
    gradients: Tensor


def find_mixing(optimizer: Optimizer, parameters: Sequence[Parted]) -> set[str] | None:
    """Return the names of the parameters that a rank must have whole; `None` if nothing had to be tried.

    Args:
        optimizer: as built, before its first step.
    """
    if type(optimizer) in _ELEMENTWISE or not parameters:
        return None
    failure: Exception | None = None
    for dtype in dict.fromkeys((torch.float64, parameters[0].parameter.dtype)):
        kinds = _choose(optimizer, parameters, dtype)
        try:
            return _compare(optimizer, kinds)
        except PacelineError:
            raise
        except Exception as error:  # a user's code may raise anything, for example for an unknown dtype
            failure = failure or error
    raise _error(
        optimizer, f"a trial step on small tensors raised {type(failure).__name__}: {failure}"
    ) from failure


def _choose(
    optimizer: Optimizer, parameters: Sequence[Parted], dtype: torch.dtype
) -> list[tuple[list[str], list[_Tried]]]:
    """Return the kinds of parameters: their names, and up to two tensors that stand for them."""
    by_id = {id(each.parameter): each for each in parameters}
    device = next((p.parameter.device for p in parameters if not p.parameter.is_meta), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    kinds: dict[Any, tuple[list[str], list[_Tried]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        # Rates and the like do not change what is mixed.
        options = repr([v for k, v in group.items() if k != "params" and not isinstance(v, float)])
        for parameter in group["params"]:
            if id(parameter) not in by_id:
                continue
            like = by_id[id(parameter)]
            most = _MAX_SIZES.get(len(like.shape), _MAX_SIZE_OF_MANY)
            shape = tuple(min(size, most) for size in like.shape)
            names, tried = kinds.setdefault((options, shape, like.dims), ([], []))
            names.append(like.name)
            if len(tried) < 2:
                start, mean = (_draw(shape, generator) for _ in range(2))
                # Mostly of one sign, in sizes that differ by element and step.
                noise = torch.randn(_NUM_STEPS, *shape, generator=generator, dtype=torch.float64)
                gradients = mean * noise.exp() + 0.1 * noise
                tried.append(_Tried(number, like, start.to(device, dtype), gradients.to(device, dtype)))
    return list(kinds.values())


def _draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return numbers whose size differs between rows and between columns."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    for dim, size in enumerate(shape):
        scale = 10 ** (2 * torch.rand(size, generator=generator, dtype=torch.float64) - 1)
        drawn *= scale.view([-1 if other == dim else 1 for other in range(len(shape))])
    return drawn


def _compare(optimizer: Optimizer, kinds: list[tuple[list[str], list[_Tried]]]) -> set[str]:
    tried = [each for _, both in kinds for each in both]
    whole, numbers = _run(optimizer, tried, seed=0)
    if any(not result[""].any() and len(result) == 1 for result in whole):
        raise _error(optimizer, "its step() does not change the tensors in its param_groups")
    for kept in (0, 1):  # the gradients of every second tensor change, and the others' results should not
        changed = [
            t if number % 2 == kept else replace(t, gradients=_disturb(t.gradients))
            for number, t in enumerate(tried)
        ]
        others, numbers_of_others = _run(optimizer, changed, seed=1)
        pairs = zip(whole[kept::2], others[kept::2], strict=True)
        if numbers != numbers_of_others or not all(_agrees(one, [other], 0) for one, other in pairs):
            raise _error(
                optimizer, "the update of a parameter depends on other parameters, or on random numbers"
            )
    found: set[str] = set()
    for dim in sorted({dim for each in tried for dim in each.like.dims}):
        cut = [_cut(each, dim) for each in tried]
        results = iter(_run(optimizer, [piece for pieces in cut for piece in pieces], seed=0)[0])
        names = (names for names, both in kinds for _ in both)
        for name_of_kind, one, pieces in zip(names, whole, cut, strict=True):
            if not _agrees(one, [next(results) for _ in pieces], dim):
                found.update(name_of_kind)
    return found


def _disturb(gradients: Tensor) -> Tensor:
    """Return larger gradients, whose sign changes from step to step."""
    factors = 7.0 * (-1.0) ** torch.arange(len(gradients), device=gradients.device)
    return gradients * factors.to(gradients.dtype).view(-1, *[1] * (gradients.dim() - 1))


def _cut(tried: _Tried, dim: int) -> list[_Tried]:
    """Return two unequal pieces, or the tensor itself if the layout does not divide it there."""
    if dim not in tried.like.dims or tried.start.shape[dim] < 2:
        return [tried]
    sizes = [tried.start.shape[dim] // 3 or 1, 0]
    sizes[1] = tried.start.shape[dim] - sizes[0]
    starts, gradients = torch.split(tried.start, sizes, dim), torch.split(tried.gradients, sizes, dim + 1)
    return [replace(tried, start=s, gradients=g) for s, g in zip(starts, gradients, strict=True)]


def _run(optimizer: Optimizer, tried: Sequence[_Tried], seed: int) -> tuple[list[Result], str]:
    """Step a copy of the optimizer on tensors; return their results, and its numbers as text."""
    tensors = [nn.Parameter(each.start.clone(memory_format=torch.contiguous_format)) for each in tried]
    stepped = _copy(optimizer, tried, tensors)
    step = type(stepped).step
    # Without the hooks that count steps.
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    device = tensors[0].device
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    alone = _NoCollectives()  # type: ignore[no-untyped-call]
    with forked, torch.compiler.set_stance("force_eager"), alone:
        torch.manual_seed(seed)
        for number in range(_NUM_STEPS):
            for tensor, each in zip(tensors, tried, strict=True):
                tensor.grad = each.gradients[number].clone(memory_format=torch.contiguous_format)
            step(stepped)
    results: list[Result] = []
    for tensor, each in zip(tensors, tried, strict=True):
        results.append({**stepped.state.get(tensor, {}), "": tensor.detach() - each.start})
    settings = [*stepped.param_groups, vars(stepped)]
    numbers = [(k, float(v)) for each in settings for k, v in each.items() if _is_number(v)]
    return results, repr(numbers)


def _copy(optimizer: Optimizer, tried: Sequence[_Tried], tensors: Sequence[nn.Parameter]) -> Optimizer:
    """Return a copy of an optimizer that has these tensors in its groups in place of the parameters."""
    made: Optimizer = object.__new__(type(optimizer))
    groups: list[dict[str, Any]] = []
    state: defaultdict[Any, Any] = defaultdict(dict)
    # References to parameters become empty tensors, so that nothing large is copied.
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty(0)) for g in optimizer.param_groups for p in g["params"]
    }
    memo |= {id(optimizer): made, id(optimizer.param_groups): groups, id(optimizer.state): state}
    for number, group in enumerate(optimizer.param_groups):
        options = {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}
        if options.get("lr") == 0:
            options["lr"] = 1e-3  # a warm-up may begin there
        own = [tensor for tensor, each in zip(tensors, tried, strict=True) if each.group == number]
        groups.append({**options, "params": own})
        memo[id(group)] = groups[-1]
    held: dict[Any, Any] = optimizer.state  # a state need not belong to a parameter
    for key, value in held.items():
        if not isinstance(key, Tensor):
            state[key] = copy.deepcopy(value, memo)
    for tensor, each in zip(tensors, tried, strict=True):
        parameter = each.like.parameter
        for key, value in held.get(parameter, {}).items():
            is_like = isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape
            state[tensor][key] = torch.zeros_like(tensor) if is_like else copy.deepcopy(value, memo)
    for key, value in vars(optimizer).items():
        try:
            vars(made)[key] = copy.deepcopy(value, memo)
        except Exception:  # such as a process group
            vars(made)[key] = value
    return made


def _agrees(whole: Result, pieces: Sequence[Result], dim: int) -> bool:
    """Return whether pieces have the same change and the same state as a whole tensor."""
    shape = whole[""].shape
    for key, value in whole.items():
        if not all(key in piece for piece in pieces):
            return False
        parts = [piece[key] for piece in pieces]
        if len(parts) > 1 and isinstance(value, Tensor) and value.shape == shape and value.dim():
            sizes = [piece[""].shape for piece in pieces]
            if [getattr(part, "shape", None) for part in parts] == sizes:
                parts = [torch.cat(parts, dim)]
        if not all(_is_same(value, part) for part in parts):
            return False
    return True


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            return False
        one, other = one.double(), other.double()
        finite = one[one.isfinite()].abs()
        tolerance = _TOLERANCE * float(finite.max()) if len(finite) else 0.0
        return bool(torch.allclose(one, other, rtol=0, atol=tolerance))
    if _is_number(one) and _is_number(other):
        return math.isclose(one, other, rel_tol=_TOLERANCE) or repr(float(one)) == repr(float(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    # An object of the user's, such as a preconditioner.
    return not hasattr(one, "__dict__") or callable(one) or _is_same(vars(one), vars(other))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses collectives: ranks call them in the optimizer's step for the tensors that they have."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError("it communicates with other ranks by itself")
        return function(*args, **(kwargs or {}))


def _error(optimizer: Optimizer, saw: str) -> PacelineError:
    return PacelineError(
        "PL466",
        saw=f"optimizer={type(optimizer).__name__}: {saw}.",
        rule="Under dp_shard, tp, ep and pp, each rank steps its own parameters or parts of them.",
        fix="Use another optimizer, or give the ranks to dp_replicate, where each one has all parameters.",
    )
