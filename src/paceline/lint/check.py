"""Runs simulated ranks over a file, and the rules over what they did."""

from __future__ import annotations

import ast
import gc
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from paceline.codes import read_pages
from paceline.lint.evaluation import GaveUp
from paceline.lint.facts import KnownCall
from paceline.lint.interpreter import Interpreter, list_files
from paceline.lint.library import instantiate
from paceline.lint.rules import CHECKS, RULES, WitnessTrace
from paceline.lint.rules.rule import Level
from paceline.lint.scopes import Module, ScriptFrame
from paceline.lint.sources import LintSettings, ScriptSource, read_ignores, read_settings
from paceline.lint.values import WITNESSES, Value, WitnessPlace, unknown

# Without one of these words, in it or in a module beside it that it imports, a file is not about ranks.
_WORDS = re.compile(
    r"torch\.distributed|from torch import [(\w\s,]*\bdistributed|DataParallel|Accelerator"
    r"|^\s*(?:import|from)\b.*\bpaceline\b",
    re.M,
)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import\b[ \t]*(\([\w,\s]*|[\w, \t]*)|import[ \t]+([\w., \t]+))",
    re.M,
)
_UNCONCERNED: set[str] = set()  # files known to have no such word, nor what they import
_SPAWNS = re.compile(r"\bspawn\(|\bProcess\(|\bstart_processes\(")
_MOST_MEANT = 2  # further witnesses: ranks that a script names


@dataclass(frozen=True, order=True)
class LintFinding:
    """A mistake in a script.

    Attributes:
        path, line, column: its place, from 1.
        end_line, end_column: where it ends.
        code: the page's code.
        level: "error" (hangs, crashes or is silently wrong), "warning" or "advice".
        saw: the fact.
        rule: why it matters.
        fix: the next move.
    """

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    code: str
    level: Level
    saw: str
    rule: str
    fix: str


def concerns_ranks(text: str, path: str) -> bool:
    """Return whether a file, or a module beside it that it imports, has a word of distributed training."""
    ahead, met = [(text, os.path.abspath(path))], set[str]()
    while ahead and ahead[0][1] not in _UNCONCERNED:
        text, place = ahead.pop()
        if _WORDS.search(text):
            return True
        for dots, base, names, plain in _IMPORT.findall(text):
            folder = os.path.join(os.path.dirname(place), *[".."] * (len(dots) - 1))
            for name in plain.split(",") if plain else ["", *names.lstrip("(").split(",")]:
                full = f"{base}.{name.split()[0] if name.strip() else ''}".strip(".")
                files = {*list_files(folder, full), *list_files(os.path.dirname(path), full)}
                for file in files - met - _UNCONCERNED:
                    met.add(file)
                    with suppress(OSError, UnicodeDecodeError):
                        ahead.append((Path(file).read_text(encoding="utf-8"), file))
    _UNCONCERNED.update(met)
    return False


def check_text(text: str, path: str) -> list[LintFinding]:
    """Return the findings in a script.

    Raises:
        SyntaxError: it is no Python.
    """
    if not concerns_ranks(text, path):
        return []
    was_enabled = gc.isenabled()
    gc.disable()  # a third of the time, for nothing: almost all is kept until the end
    try:
        return _apply(_run_all(ast.parse(text, path), text, path))
    except (GaveUp, RecursionError, MemoryError):
        saw = "it is too large or too deeply nested to simulate, so it was not checked."
        return [_own(ScriptSource(path, text), 1, 1, "PL094", "advice", saw)]
    finally:
        if was_enabled:
            gc.enable()


def _run_all(tree: ast.Module, text: str, path: str) -> WitnessTrace:
    named = cache(lambda: {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(tree)})
    places = list(WITNESSES)
    runs = [_run_main(places[0], tree, path)]
    called = set(runs[0].visited)
    if not runs[0].has_asked:
        _run_the_rest(runs[0], named)
    if not runs[0].has_asked:
        runs *= len(places)  # the script is the same on all ranks
    else:
        runs += [_run_main(place, tree, path) for place in places[1:]]
        meant = set[int]().union(*(run.meant for run in runs)) - {place.rank for place in places}
        places += [WitnessPlace.of(rank) for rank in sorted(meant)[:_MOST_MEANT]]
        runs += [_run_main(place, tree, path) for place in places[len(runs) :]]
        called |= set[int]().union(*(run.visited for run in runs[1:]))
        for run in runs:
            run.visited |= called  # what only some ranks call has been seen where they call it
            _run_the_rest(run, named)
    spawns = _SPAWNS.search(text) is not None
    traces = [WitnessTrace(at, run.trace, run.reads, spawns) for at, run in zip(places, runs, strict=True)]
    # A rank that the script names and that joins no group has another role: a server, say.
    is_server = [any(traces[0].events("init")) and not any(one.events("init")) for one in traces]
    traces[0].all = [one for i, one in enumerate(traces) if i < len(WITNESSES) or not is_server[i]]
    return traces[0]


def _run_main(place: WitnessPlace, tree: ast.Module, path: str) -> Interpreter:
    run = Interpreter(place, Module(path, tree))
    run.run_module(run.main, is_main=True)
    return run


def _run_the_rest(run: Interpreter, named: Callable[[], set[str]]) -> None:
    """Run what nobody in the file has called, with unknown arguments; those that others call come last."""
    initialized, left = bool(run.initialized), []
    for name, value in run.main.names.items():
        if isinstance(value, Value) and value.kind in ("func", "class") and value.ref.module is run.main:
            members = [value] if value.kind == "func" else value.ref.names.values()
            functions = [one for one in members if isinstance(one, Value) and one.kind == "func"]
            if not _has_visited(run, functions):
                left.append((name, value, functions))
    if len(left) > 1:
        left.sort(key=lambda one: one[0] in named())
    for _, value, functions in left:
        me = None
        if value.kind == "class" and not _has_visited(run, functions):
            run.frame = ScriptFrame(run.main.names, run.main)
            call = KnownCall(run, [Value("*", ref=unknown())], {}, value.ref.node, "")
            me = run.into([], partial(instantiate, call, value))
        for one in functions:
            if _has_visited(run, [one]) or getattr(one.ref.node, "name", "") == "__init__":
                continue
            run.frame = ScriptFrame(one.ref.module.names, one.ref.module)
            run.initialized, run.is_assumed, run.seed = True, True, None
            run.num_unread_calls += not initialized
            run.no_sync, run.no_grad, run.loops = [], 0, ()
            run.call_function(one, [Value("*", ref=unknown())], {}, one.ref.node, owner=me)


def _has_visited(run: Interpreter, functions: list[Value]) -> bool:
    return all(id(one.ref.node) in run.visited for one in functions)


def _apply(witness: WitnessTrace) -> list[LintFinding]:
    found: dict[tuple[Any, ...], LintFinding] = {}
    for first, check in CHECKS:
        for one in check(witness):
            code, node = one.code or first, cast(ast.expr, one.node)
            end = node.end_lineno or node.lineno, (node.end_col_offset or 0) + 1
            span = node.lineno, node.col_offset + 1, *end
            place = one.path, *span[:2], code
            found.setdefault(place, _finding(one.path, span, code, RULES[code], one.saw))
    return sorted(found.values())


def _finding(path: str, span: tuple[int, int, int, int], code: str, level: Level, saw: str) -> LintFinding:
    page = read_pages()[code]
    return LintFinding(path, *span, code, level, saw, page.why, page.fix)


def check_sources(sources: Sequence[ScriptSource]) -> list[LintFinding]:
    """Return the findings of scripts; those in a module that several of them import are reported once."""
    found: dict[tuple[Any, ...], LintFinding] = {}
    settings: dict[Path, LintSettings] = {}
    for source in sources:
        folder = Path(source.path).parent
        if folder not in settings:
            settings[folder] = read_settings(folder, list(RULES))
        for finding in _check_source(source):
            level = settings[folder].level_of(finding.code, finding.path.partition("#")[0], finding.level)
            place = (finding.path, finding.line, finding.column, finding.code)
            if level != "off":
                found.setdefault(place, replace(finding, level=level))  # type: ignore[arg-type]
    return sorted(found.values())


def _check_source(source: ScriptSource) -> list[LintFinding]:
    if source.problem:
        is_told = not source.text or concerns_ranks(source.text, source.path)
        return [_own(source, 1, 1, "PL097", "warning", f"it cannot be read: {source.problem}.")] * is_told
    try:
        findings = check_text(source.text, source.path)
    except (SyntaxError, ValueError) as error:
        line, column = getattr(error, "lineno", 1) or 1, getattr(error, "offset", 1) or 1
        wrong = f"{getattr(error, 'msg', error)}".rstrip("?")
        return [_own(source, line, column, "PL099", "error", f"{wrong}.")]
    ignores = {source.path: read_ignores(source.text)}
    used: set[tuple[int, str]] = set()
    kept = []
    for finding in findings:
        if finding.path not in ignores:
            ignores[finding.path] = read_ignores(Path(finding.path).read_text(encoding="utf-8"))
        silent = {
            (line, finding.code if codes else "")
            for line in (finding.line, finding.end_line)
            if (codes := ignores[finding.path].get(line)) is not None
            if not codes or finding.code in codes
        }
        used |= silent
        if not silent:
            path, line = (
                source.place(finding.line) if finding.path == source.path else (finding.path, finding.line)
            )
            end = finding.end_line - finding.line + line
            kept.append(replace(finding, path=path, line=line, end_line=end))
    for line, codes in ignores[source.path].items():
        for code in codes or ("",):
            if (line, code) not in used and (not code or code in RULES):
                what = f"`paceline: ignore[{code}]`" if code else "`paceline: ignore`"
                kept.append(_own(source, line, 1, "PL098", "warning", f"{what} silences nothing."))
    return kept


def _own(source: ScriptSource, line: int, column: int, code: str, level: Level, saw: str) -> LintFinding:
    path, line = source.place(line)
    return _finding(path, (line, column, line, column), code, level, saw)
