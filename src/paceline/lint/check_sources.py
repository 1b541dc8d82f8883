"""Checks sources: findings without those that the project or a comment silences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.codes import read_pages
from paceline.lint.check import LintFinding, check_text, concerns_ranks
from paceline.lint.rules import RULES
from paceline.lint.sources import LintSettings, ScriptSource, read_ignores, read_settings


@dataclass
class LintReport:
    """What was found in some sources.

    Attributes:
        findings: sorted by place.
        num_files: the scripts that were read.
        num_concerned: those with a word of distributed training.
    """

    findings: list[LintFinding]
    num_files: int = 0
    num_concerned: int = 0


def check_sources(sources: Sequence[ScriptSource], settings: LintSettings | None = None) -> LintReport:
    """Return the findings of scripts; those in a module that several of them import are reported once."""
    found: dict[tuple[str, int, int, str], LintFinding] = {}
    checked = LintReport([])
    for source in sources:
        here = settings if settings is not None else read_settings(Path(source.path).parent, list(RULES))
        if here.leaves_out(source.path):
            continue
        checked.num_files += 1
        checked.num_concerned += concerns_ranks(source.text)
        for finding in _check_source(source, here):
            found.setdefault((finding.path, finding.line, finding.column, finding.code), finding)
    checked.findings = sorted(found.values())
    return checked


def _check_source(source: ScriptSource, settings: LintSettings) -> list[LintFinding]:
    try:
        findings = check_text(source.text, source.path)
    except (SyntaxError, ValueError) as error:
        line, column = getattr(error, "lineno", 1) or 1, getattr(error, "offset", 1) or 1
        return [_own(source, line, column, "PL099", "error", f"{getattr(error, 'msg', error)}.")]
    ignores = {source.path: read_ignores(source.text)}
    used: set[tuple[int, str]] = set()
    kept = []
    for finding in findings:
        level = settings.level_of(finding.code, finding.path, finding.level)
        if finding.path not in ignores:
            ignores[finding.path] = read_ignores(Path(finding.path).read_text(encoding="utf-8"))
        silenced = False
        for line in (finding.line, finding.end_line):
            codes = ignores[finding.path].get(line)
            if codes is not None and (not codes or finding.code in codes):
                silenced = True
                used.add((line, finding.code if codes else ""))
        if not silenced and level != "off":
            moved = finding
            if finding.path == source.path:
                path, line = source.place(finding.line)
                moved = replace(
                    finding, path=path, line=line, end_line=finding.end_line - finding.line + line
                )
            kept.append(replace(moved, level=level))  # type: ignore[arg-type]
    for line, codes in ignores[source.path].items():
        for code in codes or ("",):
            if (line, code) not in used and (not code or code in RULES):
                what = f"`paceline: ignore[{code}]`" if code else "`paceline: ignore`"
                kept.append(_own(source, line, 1, "PL098", "warning", f"{what} silences nothing."))
    return kept


def _own(source: ScriptSource, line: int, column: int, code: str, level: str, saw: str) -> LintFinding:
    page = read_pages()[code]
    path, line = source.place(line)
    return LintFinding(path, line, column, line, column, code, level, saw, page.why, page.fix)  # type: ignore[arg-type]
