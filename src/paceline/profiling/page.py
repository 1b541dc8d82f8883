"""Draws a profile as one HTML page without any other file: the timelines of all ranks, and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np

from paceline.profiling.analysis import Profile
from paceline.profiling.intervals import Spans, as_spans, clip, intersect, subtract, unite
from paceline.profiling.matching import Waiting, find_meetings
from paceline.profiling.trace import PHASES, RankTrace, divide_time

_WIDTH, _LEFT, _LANE, _GAP, _HEAD = 1200, 70, 14, 12, 48
_COLORS = {
    "data": "#b279a2",
    "forward": "#72b7b2",
    "backward": "#4c78a8",
    "optimizer": "#9d9d9d",
    "reading values": "#eeca3b",
    "garbage collection": "#9c755f",
}
_WAITING, _EXPOSED, _HIDDEN, _COMPUTE = "#e45756", "#f58518", "#bcd9a5", "#54a24b"
_LEGEND = {
    **_COLORS,
    "computes": _COMPUTE,
    "communication, hidden": _HIDDEN,
    "exposed": _EXPOSED,
    "waiting for another rank": _WAITING,
}
# An arrow for each wait of at least this share of the step.
_LEAST_ARROW = 0.02
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:24px;color:#222;background:#fff}"
    "pre{background:#f6f6f6;padding:12px;white-space:pre-wrap}"
)


def draw_page(traces: Sequence[RankTrace], profile: Profile, report: str) -> str:
    """Return the page: the median and the longest step of all ranks, and the report.

    Args:
        traces: of the ranks, which `profile` was made from.
        profile: the numbers.
        report: the text below the pictures.
    """
    waits = find_meetings(traces).waits
    parts = []
    steps = {"median": profile.median_step, "longest": profile.worst_step}
    for word, step in steps.items():
        if word == "longest" and step == profile.median_step:
            continue
        parts.append(f"<h2>Step {step}, the {word}: {profile.step_ns(step) / 1e6:.1f} ms</h2>")
        parts.append(_draw_step(traces, step, waits))
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Paceline profile</title>'
        f"<style>{_STYLE}</style></head><body><h1>Where the time of a step goes</h1>\n"
        f"{chr(10).join(parts)}\n<h2>Report</h2><pre>{escape(report)}</pre></body></html>\n"
    )


def _draw_step(traces: Sequence[RankTrace], step: int, waits: Mapping[int, Sequence[Waiting]]) -> str:
    windows = {t.rank: next((s.begin_ns, s.end_ns) for s in t.steps if s.number == step) for t in traces}
    begin, end = min(b for b, _ in windows.values()), max(e for _, e in windows.values())
    scale = (_WIDTH - _LEFT) / (end - begin)
    tops = {trace.rank: _HEAD + number * (3 * _LANE + _GAP) for number, trace in enumerate(traces)}
    height = _HEAD + len(traces) * (3 * _LANE + _GAP)
    parts = [*_draw_keys(), *_draw_axis(end - begin, scale, height)]
    for trace in traces:
        top = tops[trace.rank]
        parts.append(f'<text x="0" y="{top + 2 * _LANE - 3}">rank {trace.rank}</text>')
        own = [wait for wait in waits[trace.rank] if begin <= wait.begin_ns < end]
        for lane, name, color, spans in _list_lanes(trace, own):
            y = top + lane * _LANE
            for first, last in _thin(clip(spans, begin, end), 0.5 / scale).tolist():
                x, width = _LEFT + (first - begin) * scale, max(0.5, (last - first) * scale)
                text = f"{name}: {(last - first) / 1e6:.2f} ms"
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_LANE - 1}" fill="{color}">'
                    f"<title>{escape(text)}</title></rect>"
                )
    for rank, all_waits in waits.items():
        for wait in all_waits:
            if begin <= wait.begin_ns < end and wait.exposed_ns > _LEAST_ARROW * (end - begin):
                x = _LEFT + (min(wait.end_ns, end) - begin) * scale
                middle = tops[rank] + 2.5 * _LANE, tops[wait.collective.last] + 2.5 * _LANE
                parts.append(_draw_arrow(x, *middle))
    arrow = (
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{_WAITING}"/></marker></defs>'
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%" xmlns="http://www.w3.org/2000/svg" '
        f'font-family="sans-serif" font-size="12">{arrow}'
        f"{''.join(parts)}</svg>"
    )


def _list_lanes(trace: RankTrace, waits: Sequence[Waiting]) -> Iterator[tuple[int, str, str, Spans]]:
    """Return lane, name, color and spans of what to draw of a rank: phases, computation, communication."""
    divided = divide_time(trace, as_spans([]))
    for phase in PHASES:
        if phase in divided:
            yield 0, phase, _COLORS[phase], divided[phase].spans
    yield 1, "computes", _COMPUTE, trace.compute
    comm = unite(as_spans((part.issued_ns, part.end_ns) for part in trace.collectives))
    exposed = subtract(comm, trace.compute)
    waiting = intersect(unite(as_spans((wait.begin_ns, wait.end_ns) for wait in waits)), exposed)
    yield 2, "communication, hidden", _HIDDEN, intersect(comm, trace.compute)
    yield 2, "exposed", _EXPOSED, subtract(exposed, waiting)
    yield 2, "waiting for another rank", _WAITING, waiting


def _thin(spans: Spans, least_ns: float) -> Spans:
    """Return spans with gaps closed that are too short to be seen."""
    if not len(spans):
        return spans
    is_first = np.concatenate(([True], spans[1:, 0] - spans[:-1, 1] > least_ns))
    firsts = np.flatnonzero(is_first)
    lasts = np.concatenate((firsts[1:] - 1, [len(spans) - 1]))
    return np.stack((spans[firsts, 0], spans[lasts, 1]), axis=1)


def _draw_keys() -> Iterator[str]:
    x = 0
    for name, color in _LEGEND.items():
        yield f'<rect x="{x}" y="2" width="10" height="10" fill="{color}"/>'
        yield f'<text x="{x + 14}" y="12">{escape(name)}</text>'
        x += 26 + 7 * len(name)


def _draw_axis(length_ns: int, scale: float, height: int) -> Iterator[str]:
    for number in range(11):
        at = length_ns * number / 10
        x = _LEFT + at * scale
        yield f'<line x1="{x:.1f}" y1="{_HEAD - 6}" x2="{x:.1f}" y2="{height}" stroke="#ddd"/>'
        anchor = "end" if number == 10 else "middle"
        yield f'<text x="{x:.1f}" y="{_HEAD - 10}" text-anchor="{anchor}">{at / 1e6:.3g} ms</text>'


def _draw_arrow(x: float, start: float, stop: float) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{start:.1f}" x2="{x:.1f}" y2="{stop:.1f}" stroke="{_WAITING}" '
        'stroke-width="1.5" marker-end="url(#tip)"/>'
    )
