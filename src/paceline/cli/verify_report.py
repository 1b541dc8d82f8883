"""Formats the results of `paceline verify`, for people and for programs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.units import format_seconds

if TYPE_CHECKING:
    from paceline.finding import Finding
    from paceline.recipe import Layout
    from paceline.verifying.check import LayoutResult, Verified
    from paceline.verifying.subject import Subject

_WORDS = {"ok": "ok", "differs": "DIFFERS", "refused": "refused", "failed": "FAILED"}
_FORWARD = {True: "every bit the same", False: "within rounding", None: ""}
_WIDTH = 44


@dataclass
class Asked:
    """The layouts to verify.

    Attributes:
        layouts: legal, with all degrees known.
        num_candidates: number of legal and refused ones; 0 without `--all`.
        refused: with the reasons.
    """

    layouts: list[Layout]
    num_candidates: int = 0
    refused: list[tuple[Layout, list[Finding]]] = field(default_factory=list)


def describe_begin(path: str, subject: Subject, asked: Asked) -> str:
    """Return a line on what will be compared."""
    count = f"{len(asked.layouts)} layout{'s' * (len(asked.layouts) != 1)}"
    of = f", the legal ones of {asked.num_candidates}" if asked.num_candidates else ""
    return (
        f"{path}: {count}{of}, against one process; {subject.num_steps} steps, {subject.dtype}, "
        f"{subject.reduction} reduction"
    )


def describe_layout(result: LayoutResult) -> str:
    """Return one layout in one line."""
    line = f"{result.layout:<{_WIDTH}} {_WORDS[result.status]:<8}"
    if result.status == "ok":
        what = "every bit the same" if result.same_bits else f"at {_ratio(result.worst)} of its tolerance"
        where = "" if result.same_bits else f", {_where(result.worst_where)}"
        if not result.same_bits and result.forward_bits is not None:
            where += f"; forward: {_FORWARD[result.forward_bits]}"
        return f"{line} {what}{where}  ({format_seconds(result.seconds)})"
    if result.status == "differs":
        return f"{line} {_ratio(result.worst)} times its tolerance, {_where(result.worst_where)}"
    return f"{line} {result.findings[0].saw if result.findings else ''}".splitlines()[0]


def describe_end(verified: Verified, asked: Asked) -> str:
    """Return the verdict, tolerances by kind, findings, remarks, and random draws to consider."""
    counts = Counter(result.status for result in verified.results)
    counted = ", ".join(f"{number} {_VERDICTS[status]}" for status, number in counts.items())
    count = f"{len(verified.results)} layout{'s' * (len(verified.results) != 1)}"
    parts = [f"{count}: {counted}.", _describe_kinds(verified)]
    if asked.num_candidates:
        parts.append(_describe_refused(asked))
    parts += [str(finding) for finding in [*verified.findings, *verified.remarks, *verified.draws]]
    return "\n" + "\n\n".join(parts)


_VERDICTS = {
    "ok": "the same as one process",
    "differs": "not the same",
    "refused": "refused while building",
    "failed": "failed",
}


def as_table(verified: Verified, asked: Asked) -> dict[str, Any]:
    """Return all results, JSON-able."""
    table: dict[str, Any] = as_plain(asdict(verified))
    table["ok"] = verified.ok
    if asked.num_candidates:
        table["num_candidates"] = asked.num_candidates
        table["illegal"] = [
            {"layout": str(layout), "findings": [asdict(finding) for finding in findings]}
            for layout, findings in asked.refused
        ]
    return table


def as_plain(value: Any) -> Any:
    """Return a nest with text in place of the values that JSON cannot hold (infinity)."""
    if isinstance(value, dict):
        return {key: as_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and value in (float("inf"), float("-inf")) else value


def _describe_kinds(verified: Verified) -> str:
    kinds: dict[str, list[tuple[float, float]]] = {}
    for key, (floor, scale, tolerance) in verified.tolerances.items():
        _, kind, _ = key.split("/", 2)
        if kind != "initial" and scale:
            kinds.setdefault(kind, []).append((floor / scale, tolerance / scale))
    lines = [
        f"tolerance: {verified.factor:g} x what a tensor moved by in reruns of one process, or its last bit, "
        f"in parts of its largest element (gradients clipped at {verified.clip_norm:.3g})",
        f"  {'':<20} {'number':>7} {'noise':>9} {'tolerance':>10} {'largest':>10}",
    ]
    for kind, pairs in kinds.items():
        noise, tolerances = [floor for floor, _ in pairs], [tolerance for _, tolerance in pairs]
        lines.append(
            f"  {kind:<20} {len(pairs):>7} {median(noise):>9.1e} {median(tolerances):>10.1e} "
            f"{max(tolerances):>10.1e}"
        )
    return "\n".join(lines)


def _describe_refused(asked: Asked) -> str:
    lines = [f"{len(asked.layouts)} of {asked.num_candidates} layouts are legal. The others:"]
    reasons: dict[str, list[str]] = {}
    for layout, findings in asked.refused:
        for finding in findings:
            reasons.setdefault(f"{finding.saw} {finding.rule} [{finding.code}]", []).append(str(layout))
    lines += [f"  {len(layouts):>4}  {reason}" for reason, layouts in reasons.items()]
    return "\n".join(lines)


def _ratio(value: float) -> str:
    return "inf" if math.isinf(value) else f"{value:.2g}"


def _where(key: str) -> str:
    """Return a key in words: `gradient of layers.0.weight, step 1` for `1/gradient/layers.0.weight`."""
    if not key:
        return ""
    step, kind, name = key.split("/", 2)
    what = f"{kind} {name}".strip() if kind != "gradient" else f"gradient of {name}"
    return f"{what}, step {step}" if step != "0" else what
