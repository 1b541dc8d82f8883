"""What the page behind a code has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """What one code means.

    Attributes:
        title: the fact in a few words.
        why: the rule and its reason.
        fix: what to do, with an example.
    """

    title: str
    why: str
    fix: str
