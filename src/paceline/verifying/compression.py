"""Settles how compressed runs are compared: in a type that codecs encode, with one number of slots."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.finding import Finding
from paceline.recipe import Layout
from paceline.verifying.subject import Subject


def settle_slots(subject: Subject, layouts: Sequence[Layout]) -> tuple[Subject, list[Finding]]:
    """Return the subject with its number of slots, and a remark; unchanged without compression.

    A run's slots are its ranks by default. One process and all layouts need one number to be comparable: the
    smallest that all of them can share.
    """
    section = subject.compress
    if section.kind == "none":
        return subject, []
    num_slots = section.slots or max(2, math.lcm(*(layout.dp for layout in layouts)))
    chosen = "" if section.slots else ", the smallest number that all of these layouts can share"
    remark = Finding(
        "PL732",
        "the comparison",
        f'Everything was trained and compared in {subject.dtype}, with compress.kind="{section.kind}" in '
        f"{num_slots} slots{chosen}.",
        "Codecs encode fp32 gradients, and the result of a compressed run depends on its number of slots.",
        "Nothing needs to be done. To compare in fp64, verify without compression.",
    )
    return subject.with_slots(num_slots), [remark]
