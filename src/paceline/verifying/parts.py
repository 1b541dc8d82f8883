"""Finds which part of a whole tensor a rank has at a module's boundary, from the shapes alone.

Along tp, a rank has a run of columns or heads. Along cp, it has some positions (rows) between the blocks,
consecutive ones or in zigzag, and some heads inside of an attention. Several parts may have the same shape.
Then the nearest one is the expected one, so a difference is never exaggerated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.parallel.context.division import Division
from paceline.parallel.split import Split
from paceline.recipe import Layout
from paceline.verifying.closeness import measure_distance

# The axes that divide activations, in the order in which they divide the heads.
_AXES = ("tp", "cp")
# Queries alone; keys and values, or gate and up, packed into one matrix; queries, keys and values.
_PACKINGS = (1, 2, 3)


@dataclass(frozen=True)
class Place:
    """A rank's place along an axis that divides activations.

    Attributes:
        rank: the rank's number along it.
    """

    axis: str
    size: int
    rank: int


def find_places(layout: Layout, rank: int) -> tuple[Place, ...]:
    """Return a rank's places along the axes of a layout that divide activations."""
    places = layout.find_place(rank)
    return tuple(
        Place(axis, layout.degrees[axis], places[axis]) for axis in _AXES if layout.degrees[axis] > 1
    )


def find_part(whole: Tensor, part: Tensor, places: Sequence[Place]) -> Tensor | None:
    """Return the expected tensor at a module's boundary: the whole one, or this rank's part of it.

    It is `None` if the shapes do not determine it.
    """
    if whole.shape == part.shape:
        return whole
    if whole.dim() != part.dim():
        return None
    candidates = list(_list_parts(whole, part, places))
    return min(candidates, key=lambda one: measure_distance(one, part)) if candidates else None


def _list_divisions(length: int, num_ranks: int) -> list[Division]:
    """Return the ways in which cp may divide a length."""
    return [Division.of(length, num_ranks, zigzag=zigzag) for zigzag in (False, True)]


def _list_parts(whole: Tensor, part: Tensor, places: Sequence[Place]) -> Iterator[Tensor]:
    """Yield all parts that a rank may have, of the shape that it has; none for a shape without meaning."""
    if whole.shape == part.shape:
        yield whole
        return
    if not places:
        return
    yield from _list_parts(whole, part, places[1:])  # this axis has not divided it
    for dim in range(whole.dim()):
        if whole.shape[dim] > part.shape[dim]:
            for piece in _cut(whole, dim, places[0]):
                if piece.shape[dim] >= part.shape[dim]:
                    yield from _list_parts(piece, part, places[1:])


def _cut(whole: Tensor, dim: int, place: Place) -> Iterator[Tensor]:
    size = whole.shape[dim]
    for outer in _PACKINGS:
        if size % (outer * place.size) == 0:
            yield Split(dim, outer, place.size).take(whole, place.rank)
    if place.axis == "cp" and size >= place.size:
        for division in _list_divisions(size, place.size):
            if division.is_zigzag or size % place.size:
                yield division.take(whole, dim, place.rank)
