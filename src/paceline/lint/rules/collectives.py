"""Rules that compare the collectives of the simulated ranks."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from paceline.lint.rules.rule import Spot, WitnessTrace, at, rule
from paceline.lint.trace import BranchItem, CallItem, ExitItem, Item, LoopItem, TraceEvent, events
from paceline.lint.values import Taint, Value, WitnessPlace, words

_CODE_OF = {"": "PL001", "framework": "PL001", "group": "PL006", "state": "PL007", "forward": "PL008"}
_BROAD = words(
    "None Exception BaseException RuntimeError OutOfMemoryError CudaError AcceleratorError DistBackendError"
)
_SIZED = {"all_reduce", "broadcast", "reduce", "all_gather"}


@dataclass(eq=False)
class Token:
    """A collective, or a loop or branch around some, of a witness."""

    signature: tuple[Any, ...]
    event: TraceEvent | None = None
    loop: LoopItem | None = None
    branch: BranchItem | None = None
    parts: list[list[Token]] = field(default_factory=list)

    @property
    def leaf(self) -> TraceEvent:
        """The first collective."""
        return next(token.event for token in self.leaves() if token.event is not None)

    def leaves(self) -> Iterator[Token]:
        """Yield the collectives."""
        if self.event is not None:
            yield self
        for part in self.parts:
            for token in part:
                yield from token.leaves()


_Tokens: TypeAlias = Sequence[Token]


def list_tokens(items: Sequence[Item], place: WitnessPlace, other: WitnessPlace | None = None) -> list[Token]:
    """Return the collectives of a witness in known groups, which have another witness too."""
    found: list[Token] = []
    for item in items:
        key = place.rank, other.rank if other is not None else None
        if key not in item.tokens:
            item.tokens[key] = _read_tokens(item, place, other)
        found += item.tokens[key]
    return found


def _read_tokens(item: Item, place: WitnessPlace, other: WitnessPlace | None) -> list[Token]:
    if isinstance(item, TraceEvent):
        return list(tokens_of(item, place, other))
    if isinstance(item, CallItem):
        return list_tokens(item.body, place, other)
    if isinstance(item, LoopItem):
        body = list_tokens(item.body, place, other)
        return [Token(("loop", id(item.node)), loop=item, parts=[body])] if body else []
    arms = [list_tokens(arm, place, other) for arm in item.arms] if isinstance(item, BranchItem) else []
    if not any(arms):
        return []
    if len({_shape(arm) for arm in arms}) == 1:
        return arms[0]
    assert isinstance(item, BranchItem)
    return [Token(("branch", id(item.node)), branch=item, parts=arms)]


def _shape(tokens: list[Token]) -> tuple[Any, ...]:
    return tuple((token.signature, *(_shape(part) for part in token.parts)) for token in tokens)


def _members(event: TraceEvent, place: WitnessPlace) -> tuple[int, ...] | None:
    """Return the ranks of a group; None if they are not known, or a witness is not among them."""
    if event.group is None or event.group.is_none:
        return tuple(range(place.world))
    members: tuple[int, ...] | None = event.group.fact("members") if event.group.kind == "group" else None
    return members if members is not None and place.rank in members else None


def tokens_of(event: TraceEvent, place: WitnessPlace, other: WitnessPlace | None = None) -> Iterator[Token]:
    if event.kind == "coll":
        members = _members(event, place)
        if members is None or len(members) == 1 or (other is not None and other.rank not in members):
            return
        yield Token((event.op, "world" if len(members) == place.world else members), event)
    elif event.kind == "forward":
        model = event.model
        if model.fact("group") is not None:
            return
        is_sharded = model.kind == "fsdp" or (model.kind == "model" and model.fact("sharded"))
        if is_sharded or (event.buffers and event.is_quiet is False):
            yield Token(("forward", id(model.node)), event)
    elif event.kind == "backward":
        for model, quiet in sorted(event.quiet.items(), key=_place_of):
            if quiet is False and model.fact("group") is None:
                yield Token(("backward", id(model.node)), event)


def _place_of(pair: tuple[Value, bool | None]) -> tuple[int, int]:
    node = pair[0].node
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _op(token: Token) -> str:
    return "the wrapped model" if token.signature[0] in ("forward", "backward") else str(token.signature[0])


def _compare(a: list[Token], b: list[Token], places: tuple[WitnessPlace, WitnessPlace]) -> Iterator[Spot]:
    i = j = 0
    while i < len(a) or j < len(b):
        one, other = a[i] if i < len(a) else None, b[j] if j < len(b) else None
        if one is not None and other is not None and one.signature == other.signature:
            yield from _compare_same(one, other, places)
            i, j = i + 1, j + 1
            continue
        ops = [{leaf.signature for token in side for leaf in token.leaves()} for side in (a[i:], b[j:])]
        alone = one is not None and not {leaf.signature for leaf in one.leaves()} & ops[1]
        other_alone = other is not None and not {leaf.signature for leaf in other.leaves()} & ops[0]
        if one is not None and other is not None and one.event and other.event and alone == other_alone:
            ranks = places[0].rank, places[1].rank
            saw = f"rank {ranks[0]} calls {_op(one)} here, while rank {ranks[1]} calls {_op(other)} "
            if "forward" not in (one.signature[0], other.signature[0]) or alone:
                yield at(one.event, f"{saw}(line {other.event.line}).", "PL002")
            return
        if alone and one is not None:
            yield _missing(one, places[0], places[1])
            i += 1
        elif other_alone and other is not None:
            yield _missing(other, places[1], places[0])
            j += 1
        else:
            if one is not None and other is not None:
                yield from _skipped(a[i:], b[j:], places)
                yield from _skipped(b[j:], a[i:], places[::-1])
            return


def _skipped(a: list[Token], b: list[Token], places: Sequence[WitnessPlace]) -> Iterator[Spot]:
    """Report a collective that a rank leaves out by a condition of its own, which another always calls."""
    branch = b[0].branch
    if branch is None or a[0].event is None or not Taint.RANK & branch.taint or Taint.UNKNOWN & branch.taint:
        return
    op = a[0].signature
    counts = [sum(leaf.signature == op for token in side for leaf in token.leaves()) for side in (a, b)]
    if counts[0] == counts[1] and [] in b[0].parts and any(op == t.signature for p in b[0].parts for t in p):
        saw = f"rank {places[0].rank} always calls {_op(a[0])}, and rank {places[1].rank} on a condition "
        code = _CODE_OF["forward" if a[0].event.kind != "coll" else ""]
        yield at(next(b[0].leaves()).leaf, f"{saw}of its own (line {branch.line}).", code)


def _missing(token: Token, here: WitnessPlace, there: WitnessPlace) -> Spot:
    event = token.leaf
    via = "forward" if event.kind in ("forward", "backward") else event.via or ""
    saw = f"rank {here.rank} calls {_op(next(token.leaves()))} here, and rank {there.rank} does not."
    return at(event, saw, _CODE_OF[via])


def _compare_same(one: Token, other: Token, places: tuple[WitnessPlace, WitnessPlace]) -> Iterator[Spot]:
    if one.loop is not None and other.loop is not None:
        counts = one.loop.count, other.loop.count
        if None not in counts and counts[0] != counts[1] and not one.loop.is_joined:
            rounds = f"{counts[0]} rounds on rank {places[0].rank} and {counts[1]} on rank {places[1].rank}"
            saw = f"this loop has {rounds}, and there is a collective in it."
            yield at(one.loop, saw, "PL004")
    for part, other_part in zip(one.parts, other.parts, strict=False):
        yield from _compare(part, other_part, places)
    a, b = one.event, other.event
    if a is None or b is None or a.node is not b.node or a.kind != "coll":
        return
    ranks = f"on rank {places[0].rank} and {{}} on rank {places[1].rank}."
    if a.op in _SIZED and a.shape and b.shape and a.shape != b.shape:
        yield at(a, f"the tensor has shape {a.shape} {ranks.format(b.shape)}", "PL009")
    for what, pair in (("operation", (a.reduce_op, b.reduce_op)), ("dtype", (a.dtype, b.dtype))):
        names = [_names_of(value) for value in pair]
        if "?" not in names and names[0] != names[1]:
            yield at(a, f"the {what} is {names[0]} {ranks.format(names[1])}", "PL009")
    sources = [one.source.const for one in (a, b) if one.source is not None]
    if len(sources) == 2 and all(isinstance(one, int) for one in sources) and sources[0] != sources[1]:
        yield at(a, f"the source is {sources[0]} {ranks.format(sources[1])}", "PL009")


def _names_of(value: Value | None) -> str:
    """Return the members of libraries that a value may be; "?" if it may be something else."""
    found = value.alternatives() if value is not None else ()
    names = [one.ref.rpartition(".")[2] for one in found if one.kind == "lib"]
    return " or ".join(sorted(names)) if names and len(names) == len(found) else "?"


@rule("PL001 PL002 PL004 PL006 PL007 PL008 PL009")
def unlike_collectives(first: WitnessTrace) -> Iterator[Spot]:
    """Report a collective that a rank lacks, calls in another order, or gives something else."""
    told: set[int] = set()
    for one, two in itertools.combinations(first.all, 2):
        places = one.place, two.place
        tokens = list_tokens(one.items, *places), list_tokens(two.items, *reversed(places))
        for spot in _compare(*tokens, places):
            if id(spot.node) not in told:
                told.add(id(spot.node))
                yield spot


@rule("PL009")
def unlike_settings(first: WitnessTrace) -> Iterator[Spot]:
    """Report a number of microbatches that depends on the rank."""
    for one, other in itertools.combinations(first.all, 2):
        theirs = {id(event.node): event.value for event in other.events("alike")}
        for event in one.events("alike"):
            pair = [value.const for value in (event.value, theirs.get(id(event.node))) if value is not None]
            if len(pair) == 2 and all(isinstance(one, int) for one in pair) and pair[0] != pair[1]:
                ranks = f"{pair[0]} on rank {one.place.rank} and {pair[1]} on rank {other.place.rank}"
                yield at(event, f"{event.what} is {ranks}.")


@rule("PL003 PL004")
def decided_by_one_rank(first: WitnessTrace) -> Iterator[Spot]:
    """Report a branch, an exit or a loop that is decided by one rank, if collectives depend on it."""
    for witness in first.all:
        yield from _local(witness.items, witness.place)


def _local(
    items: Sequence[Item], place: WitnessPlace, turn: _Tokens = (), loop: _Tokens = (), function: _Tokens = ()
) -> Iterator[Spot]:
    """Report these in items; the other ranks go on to the tokens of the round, the loop and the function."""
    for i, item in enumerate(items):
        if isinstance(item, CallItem):
            yield from _local(item.body, place)
        if not isinstance(item, (LoopItem, BranchItem)):
            continue
        rest = list_tokens(items[i + 1 :], place)
        if isinstance(item, LoopItem):
            body = list_tokens(item.body, place)
            if Taint.LOCAL & item.taint and body and isinstance(item.node, ast.While):
                saw = "the loop has a collective, and ends by a value that differs between ranks."
                yield at(item, saw, "PL003")
            if item.is_uneven and not item.is_joined and body:
                saw = "this loop has a collective, and its data are split by rank without padding."
                yield at(item, saw, "PL004")
            yield from _local(item.body, place, [], body, [*function, *turn, *rest, *loop, *body])
            continue
        inner = [*rest, *turn], loop, function
        if Taint.LOCAL & item.taint and len(item.arms) == 2:
            yield from _decided(item, place, *inner)
        for arm in item.arms:
            yield from _local(arm, place, *inner)


def _decided(
    branch: BranchItem, place: WitnessPlace, turn: _Tokens, loop: _Tokens, function: _Tokens
) -> Iterator[Spot]:
    exits = [arm[-1] if arm and isinstance(arm[-1], ExitItem) else None for arm in branch.arms]
    if all(one is None for one in exits):
        arms = [list_tokens(arm, place) for arm in branch.arms]
        if _shape(arms[0]) != _shape(arms[1]):
            leaf = next(leaf for arm in arms for token in arm for leaf in token.leaves())
            saw = f"{_op(leaf)} depends on a value that differs between ranks (line {branch.line})."
            yield at(leaf.leaf, saw)
        return
    for one, other in (exits, exits[::-1]):
        if one is None or other is not None or one.kind == "raise":
            continue
        if {"continue": turn, "break": loop}.get(one.kind, [*turn, *function] or loop):
            saw = (
                f"`{one.kind}` depends on a value that differs between ranks (line {branch.line}), "
                "and the others go on to a collective."
            )
            yield at(one, saw)


@rule("PL005")
def swallowed_error(first: WitnessTrace) -> Iterator[Spot]:
    """Report an error handler around a collective that lets this rank alone go on."""
    for witness in first.all:
        for event in witness.events("try"):
            waits = list_tokens(event.last, witness.place)
            is_all = event.is_manager and any(events(event.last, "destroy"))  # a manager of the whole job
            if waits and (is_all or list_tokens(event.body, witness.place)):
                op = _op(waits[0])
                saw = f"after an error on one rank, {op} waits for the others, which are elsewhere."
                yield at(waits[0].leaf, saw)
            if not event.is_retried or not list_tokens(event.body, witness.place):
                continue
            for handler, arm, ends in event.handlers:
                if not ends - {"raise", "break"} or list_tokens(arm, witness.place):
                    continue
                names = _names(handler.type)
                if names & _BROAD:
                    listed = ", ".join(sorted(names - {"None"}))
                    saw = f"`except{' ' * bool(listed)}{listed}` goes on after a failed collective, "
                    yield Spot(handler, event.path, f"{saw}on the ranks where it failed.")


def _names(node: ast.AST | None) -> set[str]:
    if node is None:
        return {"None"}
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "?") for part in parts}
