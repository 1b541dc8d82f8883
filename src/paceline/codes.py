"""The pages behind the codes that messages carry; `paceline explain CODE` prints one.

Ranges: PL1xx recipe and layout, PL2xx data, PL3xx processes and launching, PL4xx training,
PL5xx checkpoints and run folders, PL6xx command line and benchmarks.
"""

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


PAGES: dict[str, Page] = {
    # recipe and layout
    # data
    # processes and launching
    # training
    # checkpoints and run folders
    # command line and benchmarks
}
