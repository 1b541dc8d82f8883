"""Builds the phases and the computation of a rank's training loop.

The recorder notes forwards, backwards, garbage collection and waiting by hooks; loaders and optimizers are
annotations of torch. Two gaps belong to a phase: from a forward to the backward that follows, which is the
loss, and from a backward to the optimizer's step, such as clipping.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from paceline.profiling.intervals import NOTHING, Spans, as_spans, subtract, unite
from paceline.profiling.rank.loop_phases import WAITING
from paceline.profiling.rank_trace import BACKWARD, COLLECTION, DATA, FORWARD, OPTIMIZER


def divide_loop(loop: Mapping[str, Spans], data: Spans, optimizer: Spans) -> tuple[dict[str, Spans], Spans]:
    """Return the spans of each phase, and those of computation.

    Args:
        loop: spans by phase, and of waiting.
        optimizer: of the optimizers, which may have several parts in a step.
    """
    forward, backward, collection, waiting = (
        unite(loop.get(name, NOTHING)) for name in (FORWARD, BACKWARD, COLLECTION, WAITING)
    )
    begins = sorted(int(begin) for spans in (data, forward, backward, optimizer) for begin in spans[:, 0])
    forward = unite(forward, _find_gaps(forward, backward, begins))
    optimizer = unite(optimizer, _find_gaps(backward, optimizer, begins))
    phases = {
        DATA: data,
        FORWARD: forward,
        BACKWARD: backward,
        OPTIMIZER: optimizer,
        COLLECTION: collection,
    }
    return phases, subtract(unite(forward, backward, optimizer), unite(waiting, data))


def _find_gaps(spans: Spans, following: Spans, begins: Sequence[int]) -> Spans:
    """Return the gaps between the end of a span and a following one, if this is what begins next.

    Args:
        spans: disjoint.
        following: disjoint spans of another phase.
        begins: of all phases, sorted.
    """
    firsts = set(following[:, 0].tolist())
    gaps = []
    for _, end in spans.tolist():
        place = bisect_left(begins, end)
        if place < len(begins) and begins[place] in firsts:
            gaps.append((end, begins[place]))
    return as_spans(gaps)
