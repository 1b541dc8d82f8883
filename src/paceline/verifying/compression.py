"""Settles how compressed runs and islands are compared: in a type that codecs encode, in few steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.finding import Finding
from paceline.recipe import Layout
from paceline.recipe.compress import CompressSection
from paceline.recipe.islands import IslandsSection
from paceline.verifying.subject import Subject


def settle_slots(subject: Subject, layouts: Sequence[Layout]) -> tuple[Subject, list[Finding]]:
    """Return the subject with its number of slots, and a remark; unchanged without compression.

    A run's slots are its ranks by default. One process and all layouts need one number to be comparable: the
    smallest that all of them can share.
    """
    section = subject.read(CompressSection)
    if section.kind == "none":
        return subject, []
    num_slots = section.slots or max(2, math.lcm(*(layout.dp for layout in layouts)))
    chosen = "" if section.slots else ", the smallest number that all of these layouts can share"
    remark = Finding(
        "PL724",
        "the comparison",
        f'Everything was trained and compared in {subject.dtype}, with compress.kind="{section.kind}" in '
        f"{num_slots} slots{chosen}.",
        "Codecs encode fp32 gradients, and the result of a compressed run depends on its number of slots.",
        "Nothing needs to be done. To compare in fp64, verify without compression.",
    )
    section = section.model_copy(update={"slots": num_slots})
    return subject.with_section(section, subject.num_steps), [remark]


def settle_islands(subject: Subject) -> tuple[Subject, list[Finding]]:
    """Return the subject with islands that exchange twice in few steps, and a remark; else unchanged."""
    section = subject.read(IslandsSection)
    if section.count == 1:
        return subject, []
    if section.codec != "none" and subject.dtype == "fp64":
        subject = subject.with_dtype("fp32")
    # The second exchange has momentum, and what the codec lost in the first.
    num_steps = max(subject.num_steps, 5)
    section = section.model_copy(update={"warmup_steps": 1, "every": 2})
    remark = Finding(
        "PL724",
        "the comparison",
        f"Everything was trained and compared in {subject.dtype} for {num_steps} steps, with "
        "islands.warmup_steps=1 and islands.every=2. After step 1, only the global weights and statistics "
        "were compared.",
        "Between two exchanges each island has weights, gradients and a loss of its own.",
        "Nothing needs to be done.",
    )
    return subject.with_section(section, num_steps), [remark]
