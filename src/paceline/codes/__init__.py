"""The pages behind the codes that messages carry; `paceline explain CODE` prints one.

Ranges: PL1xx recipe and layout, PL2xx data, PL3xx processes and launching, PL4xx training,
PL5xx checkpoints and run folders, PL6xx command line and benchmarks, PL7xx comparing layouts, PL8xx watching
ranks. One file here per range or part of one; a new code's page goes into the file whose docstring names its
number.
"""

from __future__ import annotations

from paceline.codes import (
    checkpoints,
    commands,
    construct,
    data,
    layout,
    processes,
    random,
    sharding,
    splitting,
    training,
    verifying,
    watching,
)
from paceline.codes.page import Page

__all__ = ["PAGES", "Page"]

PARTS = (
    layout,
    data,
    processes,
    training,
    sharding,
    random,
    construct,
    splitting,
    checkpoints,
    commands,
    verifying,
    watching,
)


def _merge() -> dict[str, Page]:
    pages: dict[str, Page] = {}
    for part in PARTS:
        twice = pages.keys() & part.PAGES.keys()
        assert not twice, f"{', '.join(sorted(twice))} in {part.__name__} and in an earlier part"
        pages.update(part.PAGES)
    return pages


PAGES: dict[str, Page] = _merge()
