"""Rules on the copies of a model that ranks keep equal.

The ranks give the same gradients to the optimizer, up to the last bits. So the weights are equal too, unless
the optimizers differ or somebody has written the weights of a rank.
"""

from __future__ import annotations

from typing import Any

from paceline.phrases import name_ranks
from paceline.watch.reasoning.sentinels.book import Facts, Proof
from paceline.watch.reasoning.sentinels.numbers import are_equal, differ

_MANY_SIZES = 8
_LEAST_PASSES = 8
_FEW_SAMPLES = 16
_LEAST_LOOKS = 3  # beside the first
_HALF = 0.02  # what is left of a sum in a type of half the size; a mean is farther away


def check_copies(facts: Facts) -> Proof | None:
    """Report copies that drift apart although all ranks have the same gradients.

    Silent where weights are written beside the optimizer (broadcasts, averages), where gradients differ
    (local SGD, parallel parts of a model), and at the first sample.
    """
    values = {rank: fact.values for rank, fact in facts.items()}
    if len(facts) < 2 or not all(
        one["is_exchanged"] and one["before"] and one["is_unwritten"] for one in values.values()
    ):
        return None
    first, *others = values
    if len({one["before"] for one in values.values()}) > 1:
        return None
    far = [rank for rank in others if differ(values[first]["weights"], values[rank]["weights"])]
    if not far:
        return None
    one, other = values[first], values[far[0]]
    frames = facts[far[0]].frames
    ranks = first, far[0]
    where = f"in backward pass {facts[first].passes}"
    if one["steps"] != other["steps"]:
        stepped, not_stepped = (first, far[0]) if one["steps"] > other["steps"] else (far[0], first)
        saw = f"rank {stepped} has called optimizer.step() and rank {not_stepped} has not, {where}"
        return Proof("PL013", saw, (stepped,), facts[stepped].frames, "steps alone")
    if not are_equal(*(one["sums"] for one in values.values())):
        return None
    name, pair = _find_setting(one["settings"], other["settings"])
    if name:
        saw = f"{name} is {pair[0]} on rank {first} and {pair[1]} on rank {far[0]}, {where}"
        return Proof("PL825", saw, ranks, frames, "updates other weights")
    saw = f"the weights on {name_ranks(ranks)} differ although their gradients are the same, {where}"
    return Proof("PL826", saw, ranks, frames, "has weights of its own")


def _find_setting(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[str, tuple[Any, Any]]:
    """Return the first setting that differs between two optimizers, and its two values."""
    for mine, theirs in zip(one, other, strict=False):
        for name, value in mine.items():
            if name in theirs and value != theirs[name]:
                return name, (value, theirs[name])
    return "", (None, None)


def check_hook(facts: Facts) -> Proof | None:
    """Report a communication hook that returns the sum of the ranks' gradients instead of their mean.

    Silent where a loss is weighted (the sum may be meant) and where gradients are compressed or local.
    """
    values = [fact.values for fact in facts.values()]
    if len(values) < 2 or not all(
        one.get("has_hook") and one["is_mean"] and one["was_clear"] and one["is_exchanged"] for one in values
    ):
        return None
    if not all(one["own"] and len(one["own"]) == len(values[0]["own"]) for one in values):
        return None
    total = [sum(some) for some in zip(*(one["own"] for one in values), strict=True)]
    mean = [value / len(values) for value in total]
    if not any(mean) or not all(are_equal(total, one["sums"], within=_HALF) for one in values):
        return None
    fact = next(iter(facts.values()))
    saw = f"the communication hook returns {len(values)} times the mean of the ranks' gradients"
    return Proof("PL827", saw, tuple(facts), fact.frames, "uses this gradient")


def check_sizes(facts: Facts) -> Proof | None:
    """Report batches of different sizes whose mean losses count the same.

    Silent where sizes vary on a rank or the loss is weighted.
    """
    values = [fact.values for fact in facts.values()]
    sizes = _read_sizes(facts)
    if len(set(sizes)) < 2 or not all(one["is_mean"] and one["is_exchanged"] for one in values):
        return None
    words = ", ".join(f"{size} on rank {rank}" for rank, size in zip(facts, sizes, strict=True))
    fact = next(iter(facts.values()))
    saw = f"a batch has {words}, each loss is a mean, and DDP gives every rank the same weight"
    return Proof("PL828", saw, tuple(facts), fact.frames, "uses this gradient")


def _read_sizes(facts: Facts) -> list[int]:
    """Return each rank's batch size; nothing if one varies."""
    sizes = [fact.values.get("sizes", ())[-_MANY_SIZES:] for fact in facts.values()]
    is_constant = all(len(some) == _MANY_SIZES and len(set(some)) == 1 for some in sizes)
    return [some[0] for some in sizes] if is_constant else []


def advise_norm(facts: Facts) -> Proof | None:
    """Advise on BatchNorm over few samples."""
    sizes, fact = _read_sizes(facts), next(iter(facts.values()))
    if not sizes or not fact.values["norm"] or min(sizes) >= _FEW_SAMPLES:
        return None
    saw = f"{fact.values['norm']} normalises over the {min(sizes)} samples of a rank"
    return Proof("PL834", saw, tuple(facts), fact.frames, "normalises alone")


def advise_buffers(facts: Facts) -> Proof | None:
    """Advise against a broadcast of buffers in each forward that never change."""
    fact = next(iter(facts.values()))
    first, *others = fact.values.get("buffers") or [[]]
    if len(others) < _LEAST_LOOKS or not first or any(one != first for one in others):
        return None
    size = fact.values["buffer_bytes"]
    saw = f"each forward broadcasts {size} bytes of buffers, unchanged in {fact.values['forwards']} forwards"
    return Proof("PL066", saw, tuple(facts), fact.frames, "broadcasts them")


def advise_step(facts: Facts) -> Proof | None:
    """State the samples of a step and its learning rate."""
    sizes, fact = _read_sizes(facts), next(iter(facts.values()))
    values = fact.values
    if not sizes or not values["steps"] or not values["settings"]:
        return None
    per_step = max(1, values["forwards"] // 2 // values["steps"])  # since the sample at half as many
    saw = (
        f"a step has {sum(sizes) * per_step} samples ({len(sizes)} ranks with {sizes[0]}, "
        f"{per_step} backward pass{'es' * (per_step > 1)}), and lr is {values['settings'][0].get('lr')}"
    )
    return Proof("PL833", saw, tuple(facts), fact.frames, "takes this step")


def check_exchange(facts: Facts) -> Proof | None:
    """Report weights that differ at the end of a training that has exchanged less than one copy of them.

    Silent without a sign that ranks train one model (a DistributedSampler or DDP), and where ranks save
    models of their own.
    """
    values = [fact.values for fact in facts.values()]
    first, *others = values
    if not all(one["is_split"] and one["bytes"] < one["model_bytes"] for one in values):
        return None
    if first["at"] < _LEAST_PASSES or len({one["at"] for one in values}) > 1:
        return None
    if len({tuple(one["saved"]) for one in values if one["saved"]}) > 1:
        return None
    if not any(differ(first["weights"], one["weights"]) for one in others):
        return None
    fact = next(iter(facts.values()))
    saw = (
        f"in at least {first['at']} backward passes the ranks have exchanged at most "
        f"{max(one['bytes'] for one in values)} bytes, and a copy of the weights has {first['model_bytes']}"
    )
    return Proof("PL831", saw, tuple(facts), fact.frames, "trains a model of its own")
