"""Rules on files that ranks write and read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.lint.rules.rule import Spot, WitnessTrace, at, rule
from paceline.lint.trace import BranchItem, Item, TraceEvent, events, walk
from paceline.lint.values import Taint, Value


def _states(value: Value | None, depth: int = 0) -> Iterator[Value]:
    """Yield the state dicts in what is saved."""
    if value is None or depth > 3:
        return
    if value.kind == "state":
        yield value
    for part in (value.fact("entries") or {}).values():
        yield from _states(part, depth + 1)


@rule("PL040", "warning")
def saves_wrapped(witness: WitnessTrace) -> Iterator[Spot]:
    """Report a saved state dict of a wrapper, whose keys start with `module.`."""
    if any(event.model.kind in ("ddp", "dp", "union", "") for event in witness.events("load_state")):
        return
    for event in witness.events("save"):
        for state in _states(event.value):
            if isinstance(state.ref, Value) and state.ref.kind in ("ddp", "dp"):
                saw = 'the saved keys start with "module.", so a model without the wrapper cannot load them.'
                yield at(event, saw)
                break


@rule("PL007")
def saves_one_shard(first: WitnessTrace) -> Iterator[Spot]:
    """Report a state of shards that rank 0 alone saves."""
    others = {id(event.node) for witness in first.all[1:] for event in witness.events("save")}
    for event in first.events("save"):
        states = () if id(event.node) in others else _states(event.value)
        if any(isinstance(one.ref, Value) and one.ref.fact("sharded") for one in states):
            yield at(event, "rank 0 saves its own shards, and those of the other ranks are lost.")


def _path_key(value: Value | None) -> Any:
    """Return what tells two paths apart, or None if that is not known."""
    if value is None or value.taint:
        return None
    if value.is_known:
        return value.const if isinstance(value.const, str) else None
    return "?" if value.kind == "" else None


@rule("PL041")
def saves_on_every_rank(first: WitnessTrace) -> Iterator[Spot]:
    """Report a file that ranks of one node write at the same time."""
    second = first.all[1]
    others = {id(event.node): event for event in second.events("save")}
    unsure = {id(event.node) for event in _under_unread_conditions(first.items, "save")}
    for event in first.events("save"):
        if id(event.node) in unsure:  # such as a file that is there already
            continue
        other = others.get(id(event.node))
        if other is None or event.started is not True or _path_key(event.target) is None:
            continue
        if _path_key(event.target) == _path_key(other.target):
            name = f" {event.target.const!r}" if event.target.is_known else ""
            yield at(event, f"every rank writes the file{name}.")


def _under_unread_conditions(items: Sequence[Item], kind: str) -> Iterator[TraceEvent]:
    for item in walk(list(items)):
        if not isinstance(item, BranchItem):
            continue
        if Taint.RANK & item.taint or (Taint.UNKNOWN & item.taint and not Taint.LOCAL & item.taint):
            for arm in item.arms:
                yield from events(arm, kind)


@rule("PL060", "advice")
def prints_on_every_rank(first: WitnessTrace) -> Iterator[Spot]:
    """Report a line that every rank prints in the loop that trains a wrapped model."""
    second = first.all[1]
    rounds = {number for event in first.events("backward") if any(event.quiet) for number in event.loops}
    others = {id(event.node) for event in second.events("print")}
    unsure = {id(event.node) for event in _under_unread_conditions(first.items, "print")}
    for item in first.all_items:
        if isinstance(item, BranchItem) and Taint.LOCAL & item.taint:
            unsure |= {id(event.node) for arm in item.arms for event in events(arm, "print")}
    for event in first.events("print"):
        if event.names_rank or event.started is not True or not rounds & set(event.loops):
            continue
        if id(event.node) in others - unsure:
            yield at(event, "every rank prints this line.")


@rule("PL064", "warning")
def setting_too_late(witness: WitnessTrace) -> Iterator[Spot]:
    """Report a variable that is set after the library that reads it once has been loaded."""
    computes = any(witness.events("init")) or any(witness.events("backward"))
    if any(witness.events("threads")) or witness.spawns or not computes:  # or it is for other processes
        return
    for event in witness.events("setenv"):
        if event.late and event.key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            yield at(event, f"{event.key} is read when torch or numpy is imported, which was before.")


@rule("PL043", "warning")
def load_without_map_location(first: WitnessTrace) -> Iterator[Spot]:
    """Report weights that are loaded to the device from which they were saved, on every rank."""
    witness = first.all[1]
    if "nccl" not in [event.backend.const for event in witness.events("init") if event.backend is not None]:
        return
    for event in witness.events("load_state"):
        state = event.state
        load = state.fact("event") if state is not None and state.kind == "loaded" else None
        if load is not None and not load.mapped and load.started and event.model.kind in ("model", "ddp"):
            saw = "torch.load puts tensors on the device that they were saved from, the same on every rank."
            yield at(load, saw)
