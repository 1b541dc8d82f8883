"""Renders a verdict as text, for the end of a log, and as a table, for programs."""

from __future__ import annotations

import textwrap
from dataclasses import asdict

from paceline.finding import Finding
from paceline.launching.watcher import WatchMessage
from paceline.phrases import name_ranks
from paceline.watch.protocol.report import Frame, SharedPlace, Verdict
from paceline.watch.protocol.words import name_place, to_plural

WIDTH = 100
# Stacks with more lines of the user's code than this are shortened in the middle.
_MANY_FRAMES = 4


def build_message(verdict: Verdict) -> WatchMessage:
    """Return the verdict for people and for programs.

    The table is a `Finding`'s, with `places` (`ranks`, `what`, and `frames` from the innermost line on) and
    `more`, a list of sentences.
    """
    frames = [place.frames[0] for place in verdict.places if place.frames]
    where = name_place(frames[0]) if frames else name_ranks(verdict.places[0].ranks) if verdict.places else ""
    finding = Finding(verdict.code, where, verdict.headline, verdict.rule, verdict.fix)
    places = [asdict(place) for place in verdict.places]
    return WatchMessage(render(verdict), {**asdict(finding), "places": places, "more": list(verdict.more)})


def render(verdict: Verdict, width: int = WIDTH) -> str:
    """Return the verdict as lines for a terminal of `width` columns, without a line break at the end.

    The first line is the headline. It is not wrapped, so that a search through logs finds it whole.
    """
    blocks = [f"{verdict.headline} [{verdict.code}]"]
    for place in verdict.places:
        blocks.append(render_place(place, width))
    for text in (*verdict.more, verdict.rule, verdict.fix):
        blocks.append(_wrap(text, width, "  "))
    blocks.append(f"  paceline explain {verdict.code} prints more.")
    return "\n".join(blocks)


def render_place(place: SharedPlace, width: int = WIDTH) -> str:
    """Return some ranks' place: what they do, and the user's lines from the innermost outwards."""
    what = place.what if len(place.ranks) == 1 else to_plural(place.what)
    lines = [_wrap(f"{name_ranks(place.ranks)} {what}", width, "  ", "    ")]
    frames = list(place.frames)
    if len(frames) > _MANY_FRAMES:
        frames = [*frames[: _MANY_FRAMES - 1], frames[-1]]
    for n, frame in enumerate(frames):
        left_out = len(place.frames) - len(frames)
        if left_out and n == len(frames) - 1:
            lines.append(f"      ... {left_out} more")
        lines.append(_render_frame(frame, width, is_first=n == 0))
    return "\n".join(lines)


def _render_frame(frame: Frame, width: int, *, is_first: bool) -> str:
    line = f"      {'at' if is_first else 'from'} {name_place(frame)}"
    if not frame.text:
        return line
    room = width - len(line) - 2
    text = frame.text
    if len(text) > room:
        # A path may leave no room for the source; then the source is on its own line.
        line, room = f"{line}\n        ", width - 8
        return line + (text if len(text) <= room else text[: room - 4] + " ...")
    return f"{line}: {text}"


def _wrap(text: str, width: int, first: str, rest: str | None = None) -> str:
    return "\n".join(
        textwrap.wrap(
            text,
            width,
            initial_indent=first,
            subsequent_indent=first if rest is None else rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )
