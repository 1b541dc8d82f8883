"""Rules on wrapping a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.lint.rules.rule import Spot, WitnessTrace, at, rule, trains
from paceline.lint.trace import BranchItem, events


@rule("PL054")
def frozen_after_wrapping(witnesses: Sequence[WitnessTrace]) -> Iterator[Spot]:
    """Report requires_grad that changes after DDP has counted the parameters."""
    witness = witnesses[0]
    items = witness.all_events
    arms = [arm for item in witness.all_items if isinstance(item, BranchItem) for arm in item.arms]
    partly = {id(event.node) for arm in arms for event in events(arm, "requires_grad")}
    for wrap in [item for item in items if item.kind == "wrap" and item.what == "ddp"]:
        wrapper, later = wrap.wrapper, items[items.index(wrap) + 1 :]
        inner = {one for one in wrap.module.alternatives() if one.kind == "model"}
        again = any(one.kind == "wrap" and inner & set(one.module.alternatives()) for one in later)
        is_open = wrapper.fact("find_unused_parameters") or wrapper.fact("escaped")
        changes = [
            event
            for event in later
            if event.kind == "requires_grad" and event.value.is_known
            if ({wrapper} | inner) & {event.target, *event.target.deps}
        ]
        toggles = len({bool(event.value.const) for event in changes}) > 1
        if again or is_open or toggles or wrapper not in trains(witness):
            continue
        for event in changes:  # all of a model is a teacher: without any gradient there is no backward
            if event.value.const or event.target.fact("part") or id(event.node) in partly:
                yield at(event, "requires_grad changes after DDP has wrapped the model.")


@rule("PL065", "warning")
def data_parallel(witnesses: Sequence[WitnessTrace]) -> Iterator[Spot]:
    """Report DataParallel in a process that is one of several ranks."""
    for event in witnesses[0].events("wrap"):
        if event.what == "dp" and event.started is True:
            yield at(event, "each rank would run on all devices of its node.")
