"""Steps optimizers that need whole tensors (Muon) under layouts that divide them.

Each divided tensor has an owner among the ranks that hold its parts. In a step, the owner receives the parts
of the parameter, its gradient and its state, and the optimizer steps the whole tensor as in one process. Then
the parts return to their ranks. So each matrix is computed once, with the bits of one process, and a
checkpoint has the state as the layout divides it. State of another shape (the factors of Adafactor and
Shampoo) is copied to all ranks that hold a part.

Owners are chosen by the shapes alone, to share out the operations of products of matrices.

Communication: two all-to-alls per axis that divides the tensors (all parts to owners, and back), and a
collective of small objects. Memory during the step: the owner's whole tensors, for n ranks about 1/n of the
parameters, gradients and state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.comm.one_tensor import gather_objects
from paceline.errors import PacelineError
from paceline.mesh import Axis, Mesh
from paceline.parallel.placement import Placement, lay_out_like, local
from paceline.parallel.split import Split
from paceline.train.mixing import Parted, find_mixing
from paceline.train.several import list_parts

# Names of the parameter itself and of its gradient, beside the names of its state.
_VALUE, _GRADIENT = "\0value", "\0gradient"
_OWN = (_VALUE, _GRADIENT)


@dataclass
class _Item:
    """A parameter that is stepped as a plain tensor.

    Attributes:
        name: full name.
        parameter: as the layout has it.
        axes: those whose ranks hold its parts, in the order in which parts are joined; none if each rank
            steps its own part.
        owner: by axis, the rank that steps it.
        split: over tp or ep.
        tensors: what this rank has of it at the moment, by name: its part, or all on the way to the owner.
        is_here: whether the parts went to this rank so far.
        stepped: the plain tensor in the optimizer's group.
    """

    name: str
    parameter: nn.Parameter
    axes: tuple[Axis, ...]
    owner: Mapping[str, int]
    split: Split | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    is_here: bool = True
    stepped: nn.Parameter | None = None

    def shapes(self, axis: Axis) -> list[tuple[int, ...]]:
        """Return the shape of the part of each rank of an axis."""
        shape = tuple(self.parameter.shape)
        if axis.name == "dp_shard":
            most = -(-shape[0] // axis.size)
            return [(max(0, min(most, shape[0] - r * most)), *shape[1:]) for r in range(axis.size)]
        return [shape] * axis.size

    def join(self, axis: Axis, parts: list[Tensor]) -> Tensor:
        if axis.name == "dp_shard":
            return torch.cat(parts)
        assert self.split is not None
        return self.split.join(parts)

    def take(self, axis: Axis, whole: Tensor) -> list[Tensor]:
        """Return the parts of all ranks of an axis."""
        if axis.name == "dp_shard":
            return list(torch.split(whole, [shape[0] for shape in self.shapes(axis)]))
        assert self.split is not None
        return [self.split.take(whole, rank) for rank in range(axis.size)]


class WholeSteps:
    """The steps of one optimizer on plain tensors, whole where it needs that.

    Args:
        named: the model's parameters by full name.
        whole: by name of a parameter that is stepped as a plain tensor, whether it must be whole. The
            parts of the others are stepped where they are.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], placement: Placement, whole: Mapping[str, bool]
    ) -> None:
        self._placement = placement
        self._items: dict[int, _Item] = {}
        costs: dict[tuple[str, ...], list[tuple[float, _Item]]] = defaultdict(list)
        for name, must in whole.items():
            if not placement.holds(name):
                continue
            parameter = named[name]
            split = placement.splits.get(name)
            axes = placement.part_axes(name, parameter)
            item = _Item(name, parameter, axes, {}, split)
            is_whole = must or any(0 in shape for axis in axes for shape in item.shapes(axis))
            item.axes = axes if is_whole else ()
            self._items[id(parameter)] = item
            shape = placement.whole_shape(name, parameter)
            cost = prod(shape) * (min(shape[-2:]) if len(shape) > 1 else 1)
            costs[tuple(axis.name for axis in item.axes)].append((cost, item))
        for each in costs.values():
            _choose_owners(each)

    @contextmanager
    def plain(self, optimizer: Optimizer) -> Iterator[None]:
        """Put plain tensors into the groups that need it for one step, and move the results back; collective.

        Args:
            optimizer: whose step is called inside of the context.
        """
        groups = [g for g in optimizer.param_groups if any(id(p) in self._items for p in g["params"])]
        parameters = [group["params"] for group in groups]
        items = [self._items[id(p)] for ps in parameters for p in ps if id(p) in self._items]
        items = [i for i in items if i.parameter.grad is not None]
        self._collect(optimizer, items)
        stepped = {id(item.parameter): item.stepped for item in items if item.stepped is not None}
        try:
            for group, own in zip(groups, parameters, strict=True):
                group["params"] = [stepped[id(p)] for p in own if id(p) in stepped]
            yield
        finally:
            for group, own in zip(groups, parameters, strict=True):
                group["params"] = own
        self._return(optimizer, items)
        for item in items:
            item.tensors, item.stepped, item.is_here = {}, None, True

    @torch.no_grad()
    def _collect(self, optimizer: Optimizer, items: Sequence[_Item]) -> None:
        """Send parts to the owners, and make there the tensors to step, with their state."""
        for item in items:
            parameter = item.parameter
            item.tensors = {_VALUE: local(parameter.detach())}
            if parameter.grad is not None:
                item.tensors[_GRADIENT] = local(parameter.grad)
            for key, value in optimizer.state.get(parameter, {}).items():
                if self._placement.lies_as(value, parameter):
                    item.tensors[key] = local(value)
        for axis in _list_axes(items):
            _join(axis, [item for item in items if axis in item.axes and item.is_here])
        for item in items:
            if not item.is_here or _GRADIENT not in item.tensors:
                continue
            parameter = item.parameter
            if not item.axes and not isinstance(parameter, DTensor):
                item.stepped = parameter
                continue
            item.stepped = nn.Parameter(item.tensors[_VALUE], requires_grad=parameter.requires_grad)
            vars(item.stepped).update(vars(parameter))  # such as marks of the user's
            item.stepped.grad = item.tensors[_GRADIENT]
            if state := optimizer.state.get(parameter):
                parts = {key: each for key, each in item.tensors.items() if key not in _OWN}
                optimizer.state[item.stepped] = state | parts

    @torch.no_grad()
    def _return(self, optimizer: Optimizer, items: Sequence[_Item]) -> None:
        """Send the parts of the owners' results to their ranks, and put them in place."""
        items = [item for item in items if item.stepped is not item.parameter]
        known: dict[str, dict[str, Any]] = {}
        for item in items:
            stepped, item.tensors = item.stepped, {}
            if stepped is None:
                continue
            state = optimizer.state.pop(stepped, {})
            lies = {k: v for k, v in state.items() if self._placement.lies_as(v, stepped)}
            self._check_others(item, {k: v for k, v in state.items() if k not in lies})
            item.tensors = {_VALUE: stepped.detach(), **lies}
            known[item.name] = {k: lies[k].dtype if k in lies else _Copied.of(v) for k, v in state.items()}
        for axis in reversed(_list_axes(items)):
            names = {item.name for item in items if axis in item.axes}
            gathered = gather_objects({n: k for n, k in known.items() if n in names}, axis.group)
            known = {name: each for some in gathered for name, each in some.items()} | known
            _part(axis, [item for item in items if axis in item.axes and item.name in known], known)
        for item in items:
            if item.name in known:
                self._put(optimizer, item, known[item.name])

    def _put(self, optimizer: Optimizer, item: _Item, known: Mapping[str, Any]) -> None:
        parameter = item.parameter
        target = local(parameter.detach())
        if target.data_ptr() != item.tensors[_VALUE].data_ptr():
            target.copy_(item.tensors[_VALUE])
        if not known:
            return
        old, new = optimizer.state.get(parameter, {}), {}
        for key, value in known.items():
            if isinstance(value, torch.dtype):
                new[key] = _lay_out(item.tensors[key], parameter, old.get(key))
            else:
                new[key] = value.place(parameter.device)
        optimizer.state[parameter] = new

    def _check_others(self, item: _Item, others: Mapping[str, Any]) -> None:
        """Raise PL466 for state that a checkpoint would take for a part of the parameter's size."""
        for key, value in others.items():
            if item.split is not None and item.axes and self._placement.lies_as(value, item.parameter):
                raise PacelineError(
                    "PL466",
                    saw=f"the optimizer's state {key!r} of {item.name} has the shape {list(value.shape)}, "
                    "as this rank's part of the parameter.",
                    rule="It would be taken for a part of a tensor of the parameter's shape.",
                    fix="Use another degree of tp or ep.",
                )


def build_whole_steps(
    optimizer: Optimizer, model: nn.Module, placement: Placement, mesh: Mesh | None
) -> WholeSteps | None:
    """Return the steps of an optimizer that needs whole tensors under this layout, or `None`."""
    if mesh is None or not placement.is_divided:
        return None
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    whole: dict[str, bool] = {}
    for part in list_parts(optimizer):
        ids = {id(p) for group in part.param_groups for p in group["params"]}
        own = [_describe(name, p, placement) for name, p in named if id(p) in ids]
        mixing = find_mixing(part, own)
        if mixing is not None and (mixing or any(each.dims for each in own)):
            whole |= {each.name: each.name in mixing for each in own}
    return WholeSteps(dict(named), placement, whole) if whole else None


def _describe(name: str, parameter: nn.Parameter, placement: Placement) -> Parted:
    split = placement.splits.get(name)
    dims = {0} if isinstance(parameter, DTensor) else set()
    if split is not None:
        dims.add(split.dim)
    return Parted(name, parameter, tuple(placement.whole_shape(name, parameter)), frozenset(dims))


@dataclass(frozen=True)
class _Copied:
    """State that every rank has whole: a tensor in CPU memory, or another value."""

    value: Any
    on_device: bool

    @classmethod
    def of(cls, value: Any) -> _Copied:
        if not isinstance(value, Tensor):
            return cls(value, on_device=False)
        return cls(value.detach().cpu(), value.device.type != "cpu")

    def place(self, device: torch.device) -> Any:
        return self.value.to(device) if self.on_device else self.value


def _choose_owners(costs: Sequence[tuple[float, _Item]]) -> None:
    """Choose the owner of each item, dearest first, each at the place with the least to do."""
    axes = costs[0][1].axes
    places = list(product(*(range(axis.size) for axis in axes)))
    loads = [0.0] * len(places)
    for cost, item in sorted(costs, key=lambda each: -each[0]):
        place = loads.index(min(loads))
        loads[place] += cost
        item.owner = {axis.name: rank for axis, rank in zip(axes, places[place], strict=True)}


def _list_axes(items: Sequence[_Item]) -> list[Axis]:
    """Return the axes that divide the items, in the order in which parts are joined."""
    found = {axis.name: axis for item in items for axis in item.axes}
    return [found[name] for name in ("dp_shard", "tp", "ep") if name in found]


def _join(axis: Axis, items: Sequence[_Item]) -> None:
    """Join the tensors of items at their owners on an axis."""
    if not items:
        return
    entries = [(item, key) for item in items for key in sorted(item.tensors)]
    sent: list[list[Tensor]] = [[] for _ in range(axis.size)]
    mine = []
    for item, key in entries:
        owner = item.owner[axis.name]
        sent[owner].append(item.tensors[key])
        if owner == axis.rank:
            mine.append((item, key))
    forms = [[(i.shapes(axis)[r], i.tensors[k].dtype) for i, k in mine] for r in range(axis.size)]
    received = _exchange(axis, items[0].parameter.device, sent, forms)
    for place, (item, key) in enumerate(mine):
        item.tensors[key] = item.join(axis, [parts[place] for parts in received])
    for item in items:
        item.is_here = item.owner[axis.name] == axis.rank


def _part(axis: Axis, items: Sequence[_Item], known: Mapping[str, Mapping[str, Any]]) -> None:
    """Send the parts of items from their owners on an axis to all of its ranks."""
    if not items:
        return
    sent: list[list[Tensor]] = [[] for _ in range(axis.size)]
    forms: list[list[tuple[tuple[int, ...], torch.dtype]]] = [[] for _ in range(axis.size)]
    entries = []
    for item in items:
        dtypes = {_VALUE: item.parameter.dtype}
        dtypes |= {k: v for k, v in known[item.name].items() if isinstance(v, torch.dtype)}
        owner = item.owner[axis.name]
        for key, dtype in dtypes.items():
            entries.append((item, key, owner))
            forms[owner].append((item.shapes(axis)[axis.rank], dtype))
            if owner == axis.rank:
                for rank, part in enumerate(item.take(axis, item.tensors[key])):
                    sent[rank].append(part)
    device = items[0].parameter.device
    received = [iter(each) for each in _exchange(axis, device, sent, forms)]
    for item, key, owner in entries:
        item.tensors[key] = next(received[owner])


def _exchange(
    axis: Axis,
    device: torch.device,
    sent: list[list[Tensor]],
    forms: list[list[tuple[tuple[int, ...], torch.dtype]]],
) -> list[list[Tensor]]:
    """Send tensors to each rank of an axis, and receive others; one all-to-all.

    Args:
        sent: by rank.
        forms: shape and dtype of what each rank sends to this one.
    """
    packed = [[t.detach().contiguous().reshape(-1).view(torch.uint8) for t in each] for each in sent]
    lengths = [sum(map(len, each)) for each in packed]
    # Not `cat` of an empty list: a rank may own nothing.
    flat = torch.cat(
        [torch.empty(0, dtype=torch.uint8, device=device), *(t for each in packed for t in each)]
    )
    sizes = [[prod(shape) * dtype.itemsize for shape, dtype in each] for each in forms]
    totals = [sum(each) for each in sizes]
    target = torch.empty(sum(totals), dtype=torch.uint8, device=device)
    dist.all_to_all_single(target, flat, totals, lengths, group=axis.group)
    found = []
    for part, of_rank, wanted in zip(torch.split(target, totals), sizes, forms, strict=True):
        pieces = zip(torch.split(part, of_rank), wanted, strict=True)
        # Copied, because numbers must begin at a multiple of their size.
        found.append([piece.clone().view(dtype).view(shape) for piece, (shape, dtype) in pieces])
    return found


def _lay_out(part: Tensor, parameter: Tensor, old: Any) -> Tensor:
    """Return a part of the state, laid out like its parameter, in the memory of the old one if any."""
    if isinstance(old, Tensor) and old.dtype == part.dtype and local(old).shape == part.shape:
        own = local(old)
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        return old
    return lay_out_like(part, parameter)
