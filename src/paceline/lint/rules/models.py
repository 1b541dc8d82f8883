"""Rules on wrapping a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.lint.rules.rule import Spot, WitnessTrace, at, rule
from paceline.lint.trace import BranchItem, TraceEvent, events, walk
from paceline.lint.values import Value


@rule("PL054")
def frozen_after_wrapping(witnesses: Sequence[WitnessTrace]) -> Iterator[Spot]:
    """Report requires_grad that changes after DDP has counted the parameters."""
    witness = witnesses[0]
    items = [item for item in walk(witness.items) if isinstance(item, TraceEvent)]
    arms = [arm for item in walk(witness.items) if isinstance(item, BranchItem) for arm in item.arms]
    partly = {id(event.node) for arm in arms for event in events(arm, "requires_grad")}
    for i, event in enumerate(items):
        if event.kind != "requires_grad" or not event.value.is_known:
            continue
        touched = {event.target, *event.target.deps}
        for wrapper in _wrappers(items[:i]):
            if wrapper.fact("find_unused_parameters") or wrapper.kind != "ddp" or wrapper.fact("escaped"):
                continue
            inner = set(wrapper.attrs["module"].alternatives())
            if wrapper not in touched and not {one for one in inner if one.kind == "model"} & touched:
                continue
            if not event.value.const and not event.target.fact("part") and id(event.node) not in partly:
                continue  # a teacher: without any gradient there is no backward
            later = items[i:]
            if any(other.kind == "wrap" and inner & set(other.module.alternatives()) for other in later):
                continue
            toggled = [
                other
                for other in items
                if other.kind == "requires_grad" and ({wrapper} | inner) & {other.target, *other.target.deps}
            ]
            values = {
                bool(other.value.const)
                for other in toggled
                if other.value.is_known and wrapper in _wrappers(items[: items.index(other)])
            }
            if len(values) == 1 and any(
                other.kind == "backward" and wrapper in other.deps for other in items
            ):
                yield at(event, "requires_grad changes after DDP has wrapped the model.")


def _wrappers(items: Sequence[TraceEvent]) -> list[Value]:
    return [item.wrapper for item in items if item.kind == "wrap"]


@rule("PL065", "warning")
def data_parallel(witnesses: Sequence[WitnessTrace]) -> Iterator[Spot]:
    """Report DataParallel in a process that is one of several ranks."""
    for event in witnesses[0].events("wrap"):
        if event.what == "dp" and event.started is True:
            yield at(event, "each rank would run on all devices of its node.")
