"""Runs a plan of cp on the shapes of one rank, and finds the sizes in a model's code that must change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from paceline.parallel.context.context_plan import SizeChange
from paceline.parallel.context.division import count_rows
from paceline.parallel.context.gather import POSITIONS, AttentionCall
from paceline.parallel.context.lengths import change_given
from paceline.parallel.context.refusals import cannot_divide_error, name_line
from paceline.parallel.context.walk import Walk
from paceline.parallel.context.whole_modules import resize_whole
from paceline.parallel.dropout.replacements import Masks
from paceline.parallel.tensor.calls import CallSite
from paceline.parallel.tensor.sizes import LENGTHY, SIZED
from paceline.parallel.tensor.trace import Detour, Trace, TracedOp, Written, trace_forward

_RANDOM = frozenset({"empty", "rand"})


class Rehearsal:
    """A forward on the shapes of the first rank.

    Args:
        walk: complete.
    """

    def __init__(self, walk: Walk) -> None:
        self._walk = walk

    def rehearse(self, example: Callable[[nn.Module], Any], masks: Masks | None) -> None:
        """Run the shapes of the first rank; raise PL630 if an operation has another one than planned."""
        found: dict[str, dict[CallSite, list[SizeChange]]] = {}

        def resize(number: int, func: Any, args: Any, kwargs: Any) -> Any:
            call = self._walk.trace.written[number] if number < len(self._walk.trace.written) else None
            if call is None or call.func is not func or not call.outputs:
                return args, kwargs
            changes: list[SizeChange] = []
            args, kwargs = self._resize(call, func, args, kwargs, changes)
            if changes:
                found.setdefault(call.module, {})[call.spot] = changes
                self._walk.plan.stretch_of[call.module] = self._walk.stretch_at.get(call.first, 0)
            return args, kwargs

        parts = trace_forward(
            self._walk.model,
            example,
            partial_result=True,
            resize=resize,
            masks=masks,
            detours=list(self._detours()),
        )
        self._compare(parts)
        self._walk.plan.sizes = found
        changed = {(name, spot.site) for name, sizes in found.items() for spot in sizes}
        changed |= {(c.module, c.spot.site) for c in self._walk.plan.crossings if c.spot is not None}
        changed |= {(call.module, call.spot.site) for call in self._walk.plan.attending}
        for call in [*self._walk.trace.written, *self._walk.trace.attended]:
            if (call.module, call.spot.site) in changed:
                sites = self._walk.plan.sites.setdefault(call.module, {})
                sites[call.spot.site] = max(sites.get(call.spot.site, 0), call.spot.number + 1)

    def _resize(
        self, call: Written, func: Any, args: Any, kwargs: Any, changes: list[SizeChange]
    ) -> tuple[Any, Any]:
        output = call.outputs[0]
        whole, expected = self._walk.trace.shapes[output], self.expected(output)
        if func not in SIZED and func not in LENGTHY:
            return args, kwargs
        for dim, (size, wanted) in enumerate(zip(whole, expected, strict=True)):
            local = self._local_size(call, size)

            def change(
                given: int, dim: int = dim, size: int = size, wanted: int = wanted, local: int = local
            ) -> int:
                if given == wanted:
                    return given
                if given == size and wanted < size and output in self._walk.heads and func in SIZED:
                    changes.append(SizeChange(dim, "heads"))
                    return wanted
                if given == local and wanted == size:
                    changes.append(SizeChange(dim, "whole"))
                    return wanted
                return given

            args, kwargs = change_given(func, args, kwargs, dim, change)
        unique = list(dict.fromkeys(changes))
        changes[:] = unique
        return args, kwargs

    def _lengths(self, call: Written) -> tuple[int, int]:
        index = self._walk.stretch_at.get(call.first)
        if index is None:
            return 0, 0
        length = self._walk.length(index)
        return count_rows(length, self._walk.num_ranks)[0], length

    def _local_size(self, call: Written, size: int) -> int:
        """Return a size that counts positions, on a rank; 0 if it does not count them."""
        local, length = self._lengths(call)
        return size // length * local if length and size % length == 0 else 0

    def _detours(self) -> Iterator[Detour]:
        for index, stretch in enumerate(self._walk.plan.stretches):
            length = self._walk.length(index)
            own = count_rows(length, self._walk.num_ranks)[0]
            yield Detour(stretch.first, stretch.keys, _resized(stretch.dim, own))
            yield Detour(stretch.last, (), _resized(stretch.dim, length))
        for crossing in self._walk.plan.crossings:
            length = self._walk.length(crossing.stretch)
            own = count_rows(length, self._walk.num_ranks)[0]
            dim = crossing.split.dim
            if crossing.kind == "take_heads":
                yield Detour(crossing.module, (), _scaled(dim, 1, self._walk.num_ranks), crossing.spot)
            elif crossing.kind == "to_heads":
                change = _both(_resized(crossing.dim, length), _scaled(dim, 1, self._walk.num_ranks))
                yield Detour(crossing.module, (), change, crossing.spot)
            else:
                change = _both(_resized(crossing.dim, own), _scaled(dim, self._walk.num_ranks, 1))
                yield Detour(crossing.module, crossing.keys, change, crossing.spot, takes=True)

        for entering in self._walk.plan.entering:
            if entering.dim is None:
                continue
            own = count_rows(self._walk.length(entering.stretch), self._walk.num_ranks)[0]
            change = _resized(entering.dim, own)
            yield Detour(entering.module, (), change, path=entering.path)
        for mixture in self._walk.plan.whole:
            length = self._walk.length(mixture.stretch)
            own = count_rows(length, self._walk.num_ranks)[0]
            for path, place in mixture.takes.items():
                yield Detour(mixture.module, (), resize_whole(place, own, length), path=path)
            for number, place in mixture.gives.items():
                yield Detour(mixture.module, (), resize_whole(place, length, own), number=number)
        for call in self._walk.plan.attending:
            length = self._walk.length(call.stretch)
            own = count_rows(length, self._walk.num_ranks)[0]
            yield Detour(call.module, (), _attending(call.gathers, own, length), call.spot, takes=True)

    def expected(self, number: int) -> tuple[int, ...]:
        """Return the shape of a tensor on the first rank, as the operation that makes it returns it."""
        shape = list(self._walk.trace.shapes[number])
        if number in self._walk.made_whole:
            return tuple(shape)
        index = self._walk.made_as_rows.get(
            number, self._walk.rows.get(number) if number not in self._walk.heads else None
        )
        if index is not None:
            length = self._walk.length(index)
            own = count_rows(length, self._walk.num_ranks)[0]
            place, _ = self._walk.find_rows(number, self._walk.sequence(index))
            shape[place] = shape[place] // length * own
        elif number in self._walk.heads and number not in self._walk.taken:
            shape[self._walk.heads[number].dim] //= self._walk.num_ranks
        return tuple(shape)

    def _compare(self, parts: Trace) -> None:
        """Raise unless both traces have the same operations, with the planned shapes."""
        last = len(self._walk.trace.ops) - 1
        random: set[int] = set()  # computed from nothing but sizes and random numbers: masks of dropouts
        by_rows = bool(self._walk.plan.attending)
        pairs = itertools.zip_longest(
            _compared(self._walk.trace, by_rows=by_rows), _compared(parts, by_rows=by_rows)
        )
        for one, other in pairs:
            _, mine = one or (last, self._walk.trace.ops[last])
            where = mine.module or "the model"
            if one is not None and other is None:
                raise cannot_divide_error(
                    f"{mine.name} in {where} does not run on a part of the sequence: it may combine it with "
                    f"a tensor of the whole length{name_line(mine)}"
                )
            if one is None or other is None or _kind(mine) != _kind(other[1]):
                raise cannot_divide_error(f"the code of {where} takes another path on a part of the sequence")
            if random.issuperset(mine.inputs) and (mine.inputs or mine.name in _RANDOM):
                random.update(mine.outputs)
                continue
            for whole, part in zip(mine.outputs, other[1].outputs, strict=True):
                wanted, got = self.expected(whole), parts.shapes[part]
                if wanted != got:
                    shown, given = ("x".join(map(str, shape)) for shape in (wanted, got))
                    raise cannot_divide_error(
                        f"{mine.name} in {where} makes a tensor {given} on a part of the sequence, where "
                        f"{shown} is needed: the code takes a length or a number of heads from "
                        f"elsewhere{name_line(mine)}"
                    )


def _compared(trace: Trace, *, by_rows: bool) -> Iterator[tuple[int, TracedOp]]:
    """Yield the operations that parts must go through as the whole does; copies and no-ops are left out.

    So are those inside of an attention by rows, which has another mask.
    """
    attended = {number for call in trace.attended if by_rows for number in range(call.first, call.last)}
    for number, op in enumerate(trace.ops):
        if number in attended or op.is_outside:
            continue
        same = bool(op.inputs) and trace.shapes[op.inputs[0]] == trace.shapes[op.outputs[0]]
        if not (same and op.name in ("clone", "contiguous", "expand", "view", "_unsafe_view", "slice")):
            yield number, op


def _kind(op: TracedOp) -> str:
    return "view" if op.name in ("_unsafe_view", "_reshape_alias", "reshape") else op.name


def _attending(gathers: bool, own: int, length: int) -> Callable[[Any, Any], Any]:
    """Return the arguments of an attention by rows, with tensors of the right shapes."""

    def change(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = AttentionCall(*args, **kwargs)
        dim = call.query.dim() + POSITIONS
        if gathers:
            whole = _resized(dim, length)
            call = call._replace(key=whole(call.key), value=whole(call.value))
        mask = call.attn_mask
        if mask is not None and mask.dim() > 1 and mask.shape[POSITIONS] == length:
            call = call._replace(attn_mask=_resized(mask.dim() + POSITIONS, own)(mask))
        return (), call._asdict()

    return change


def _resized(dim: int, size: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = size
        return tensor.new_empty(shape)

    return change


def _scaled(dim: int, times: int, parts: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: _resized(dim, tensor.shape[dim] * times // parts)(tensor)


def _both(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    return lambda tensor: second(first(tensor))
