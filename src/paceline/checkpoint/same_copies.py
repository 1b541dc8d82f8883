"""Compares digests of tensors that several ranks hold copies of.

Each rank computes its own digests (`train/equal_copies.py`). They are compared by the ranks, or by the writer
that commits a save, which has neither torch nor the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.errors import PacelineError
from paceline.phrases import name_ranks

_MAX_SHOWN = 4

# One rank's digests of one model; JSON-able: `model`, and `groups` of `ranks` that hold the same tensors,
# each with `digests` by the tensor's name.
Digests = dict[str, Any]


def find_difference(by_rank: Mapping[int, Iterable[Digests]]) -> PacelineError | None:
    """Return the error PL418 if copies differ, naming the tensors and the ranks.

    Raises:
        KeyError, TypeError, AttributeError: these are no digests.
    """
    found: dict[str, dict[tuple[str, tuple[int, ...]], dict[int, int]]] = {}
    for rank, models in by_rank.items():
        for each in models:
            tensors = found.setdefault(each["model"], {})
            for group in each["groups"]:
                for name, digest in group["digests"].items():
                    tensors.setdefault((name, tuple(group["ranks"])), {})[rank] = digest
    for model, tensors in found.items():
        differing = []
        for (name, ranks), values in tensors.items():
            held = [values.get(rank) for rank in ranks]
            if held.count(held[0]) < len(held):
                differing.append((name, ranks, held))
        if differing:
            return _differing_error(model, differing)
    return None


def _differing_error(
    model: str, differing: Sequence[tuple[str, Sequence[int], Sequence[int | None]]]
) -> PacelineError:
    described = [_describe_difference(*each) for each in differing[:_MAX_SHOWN]]
    more = f"; and {len(differing) - _MAX_SHOWN} more tensors" if len(differing) > _MAX_SHOWN else ""
    return PacelineError(
        "PL418",
        saw=f"copies of {model} differ between ranks: {'; '.join(described)}{more}.",
        rule="Ranks that hold the same tensor apply the same update to it, so all have the same bits.",
        fix="Look for code that changes weights, gradients or optimizer state on some ranks only: a "
        "hook, an in-place change between steps, torch's clip_grad_norm_ under tp in place of "
        "step.clip_grad_norm_, another version of a library. If there is none, check the memory and the "
        "processor of that rank's machine. Resume from the newest checkpoint.",
    )


def _describe_difference(name: str, ranks: Sequence[int], values: Sequence[int | None]) -> str:
    shown = " of ".join(reversed(name.split("/")))
    members: dict[int | None, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        members.setdefault(value, []).append(rank)
    groups = sorted(members.values(), key=len)
    if len(groups) == 2 and len(groups[0]) < len(groups[1]):
        return f"{shown} on {name_ranks(groups[0])} differs from {name_ranks(groups[1])}"
    return f"{shown} differs between " + " and ".join(
        name_ranks(group) for group in sorted(groups)[:_MAX_SHOWN]
    )
