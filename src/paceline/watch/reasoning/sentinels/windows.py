"""Rules on the backward passes between two steps of an optimizer."""

from __future__ import annotations

from typing import Any

from paceline.watch.reasoning.sentinels.book import Facts, Proof
from paceline.watch.reasoning.sentinels.numbers import are_equal, differ

_NUM_WINDOWS = 3


def check_cleared(facts: Facts) -> Proof | None:
    """Report a gradient that a step has used and the next one uses again.

    Silent where it is cleared or changed before the next step, by whatever means.
    """
    for rank, fact in facts.items():
        if fact.values["stale"] >= _NUM_WINDOWS:
            saw = (
                f"the gradients of the step before were used again in {fact.values['stale']} of "
                f"{fact.values['of']} steps"
            )
            return Proof("PL030", saw, (rank,), fact.frames, "adds to them")
    return None


def check_divided(facts: Facts) -> Proof | None:
    """Report mean losses of several batches whose gradients are added and not divided.

    Silent where the loss is weighted, where gradients are changed before the step or by hooks, and where
    several losses have one batch.
    """
    for rank, fact in facts.items():
        windows = fact.values["windows"]
        count = windows[-1]["passes"]
        if len(windows) == _NUM_WINDOWS and count > 1 and all(_is_plain_sum(one, count) for one in windows):
            saw = f"each step adds the gradients of {count} mean losses"
            return Proof("PL031", saw, (rank,), fact.frames, "adds them")
    return None


def _is_plain_sum(window: dict[str, Any], count: int) -> bool:
    return bool(
        window["passes"] == window["batches"] == count
        and window["places"] == 1
        and window["is_mean"]
        and window["is_plain"]
    )


def check_exchanged(facts: Facts) -> Proof | None:
    """Report windows in which DDP sums the gradients of an early pass, and not those of the last.

    Silent where no pass is exchanged (local SGD) and where the weights are equal all the same.
    """
    values = [fact.values for fact in facts.values()]
    if len(values) < 2 or not all(
        len(one["windows"]) == _NUM_WINDOWS and all(_ends_alone(window) for window in one["windows"])
        for one in values
    ):
        return None
    first, *others = values
    if any(are_equal(first["sums"], one["sums"]) for one in others):
        return None
    if not any(differ(first["weights"], one["weights"]) for one in others):
        return None
    rank, fact = next(iter(facts.items()))
    count = fact.values["windows"][-1]["passes"]
    saw = f"DDP exchanges an early one of {count} backward passes before a step, and not the last"
    return Proof("PL829", saw, (rank,), fact.frames, "adds a gradient of its own")


def check_dropped(facts: Facts) -> Proof | None:
    """Report gradients of batches that are cleared before any step has used them.

    In each of three windows, where the step uses the gradient of the last pass by its values. Or once, after
    two windows that use all of theirs: the rest of an epoch. Silent where another line calls backward, and
    where passes share a batch (attacks, sharpness-aware steps).
    """
    for rank, fact in facts.items():
        windows = fact.values["windows"]
        *before, last = windows
        if len(windows) < _NUM_WINDOWS or not last["dropped"]:
            continue
        if not all(
            one["all_places"] == 1 and one["all_batches"] == one["passes"] + one["dropped"] for one in windows
        ):
            continue
        lost = last["dropped"]
        if not any(one["dropped"] for one in before):
            if {one["passes"] for one in windows} == {last["passes"]} and last["passes"] > lost:
                saw = f"the gradients of {lost} batches were cleared unused; other steps use {last['passes']}"
                return Proof("PL836", saw, (rank,), fact.frames, "makes them")
        elif {(one["passes"], one["dropped"]) for one in windows} == {(1, lost)} and all(
            are_equal(one, other)
            for one, other in zip(fact.values["latest"], fact.values["used"], strict=False)
        ):
            saw = f"of {lost + 1} batches per step, the gradients of {lost} are cleared before it"
            return Proof("PL835", saw, (rank,), fact.frames, "makes them")
    return None


def _ends_alone(window: dict[str, Any]) -> bool:
    exchanged = window["exchanged"]
    return True in exchanged and exchanged[-1] is False
