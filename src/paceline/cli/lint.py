"""`paceline lint`: names mistakes of distributed training in scripts, before they run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.errors import PacelineError

_DESCRIPTION = """
Reads scripts without running or importing them, as three ranks of 16 on two nodes would run them, and reports
what is proved to hang, crash or be wrong. Errors and warnings make the exit code 1.
"""
# The last ones are for `paceline run`: errors, and the rest with its --advice, a line each on standard error.
_BESIDE = ("beside", "beside-json")
_OF_NODES = ("PL022", "PL055", "PL056")  # wrong on several nodes only
_FORMATS = ("text", "json", "sarif", "github")
_MOST_BYTES = 1_000_000
_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "lint",
        help="name mistakes of distributed training in a script, before it runs",
        description=_DESCRIPTION,
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="scripts, notebooks, folders, or - for standard input"
    )
    parser.add_argument(
        "--format",
        choices=(*_FORMATS, *_BESIDE),
        metavar="|".join(_FORMATS),
        default="text",
        help="how findings are printed (default: text)",
    )
    parser.add_argument("--json", action="store_true", help="the same as --format json")
    parser.add_argument("--fix", action="store_true", help="write the fixes that have one right form")
    parser.add_argument("--diff", action="store_true", help="print these fixes as a diff, and write nothing")
    parser.add_argument("--one-node", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--advice", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    from paceline.lint.check import check_sources, concerns_ranks
    from paceline.lint.sources import read_sources

    warnings.simplefilter("ignore", SyntaxWarning)  # of the parser, on strings of the scripts
    sources = list(read_sources(args.paths, sys.stdin.read))
    findings = check_sources(sources)
    if args.diff or args.fix:
        changed = _fix(sources, findings, write=args.fix and not args.diff)
        if args.diff:
            return 1 if changed else 0
        sources = list(read_sources(args.paths, sys.stdin.read))
        findings = check_sources(sources)
    if args.format in _BESIDE:
        for finding in findings:
            if (args.advice or finding.level == "error") and not (
                args.one_node and finding.code in _OF_NODES
            ):
                line = f"{finding.path}:{finding.line}: {finding.saw} {finding.fix} [{finding.code}]"
                text = (
                    f"paceline: {line}" if args.format == "beside" else json.dumps({"lint": asdict(finding)})
                )
                print(text, file=sys.stderr, flush=True)
        return 0
    if args.json or args.format == "json":
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    elif args.format == "sarif":
        print(json.dumps(_sarif(findings), indent=1))
    elif args.format == "github":
        for finding in findings:
            kind = {"error": "error", "warning": "warning"}.get(finding.level, "notice")
            place = f"file={finding.path},line={finding.line},col={finding.column},title={finding.code}"
            print(f"::{kind} {place}::{finding.saw} {finding.rule} {finding.fix}".replace("%", "%25"))
    else:
        texts = {source.place(1)[0]: source.text for source in sources if not source.cells}
        for finding in findings:
            place = f"{finding.path}:{finding.line}:{finding.column}"
            print(f"{place}: {finding.level}: {finding.saw} [{finding.code}]")
            lines = texts.get(finding.path, "").split("\n")
            if 0 < finding.line <= len(lines):
                print(f"    | {lines[finding.line - 1].strip()[:160]}")
            print(f"    {finding.rule}\n    Fix: {finding.fix}\n")
        _print_sum(
            findings, len(sources), any(concerns_ranks(source.text, source.path) for source in sources)
        )
    return 1 if any(finding.level in ("error", "warning") for finding in findings) else 0


def _fix(sources: Sequence[Any], findings: Sequence[Any], *, write: bool) -> int:
    """Write or print the fixes, and return how many there are."""
    import difflib
    from pathlib import Path

    from paceline.lint.fix import fix_text

    count = 0
    for source in sources:
        mine = [finding for finding in findings if finding.path == source.path]
        if not mine or source.cells:
            continue
        text, fixed = fix_text(source.text, mine)
        count += fixed
        if fixed and write and source.path == "<stdin>":
            raise PacelineError(
                "PL095",
                saw="--fix with standard input.",
                rule="Fixes are written into the file.",
                fix="Pass the path of a script, or use --diff.",
            )
        if fixed and write:
            Path(source.path).write_text(text, encoding=source.encoding, newline="")
        elif fixed:
            lines = source.text.splitlines(keepends=True), text.splitlines(keepends=True)
            sys.stdout.writelines(difflib.unified_diff(*lines, source.path, source.path))
    if write and count:
        print(f"{count} fixed.", file=sys.stderr)
    return count


def lint_beside(script: str, *, as_json: bool, one_node: bool, advice: bool) -> threading.Thread | None:
    """Lint a script in a process beside the job that starts with it, if it has to do with ranks.

    Returns:
        a thread that waits for the process, or None without one.
    """
    try:
        with open(script, "rb") as file:
            text = file.read(_MOST_BYTES)
        if not script.endswith(".py") or not (b"torch" in text or b"Accelerator" in text):
            return None
        words = [sys.executable, "-m", "paceline", "lint", script, "--format", _BESIDE[as_json]]
        words += ["--one-node"] * one_node + ["--advice"] * advice
        beside = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    except OSError:
        return None  # the job itself reports a script that cannot be read
    reaper = threading.Thread(target=beside.wait, daemon=True, name="reap the linter")
    reaper.start()
    return reaper


def _print_sum(findings: Sequence[Any], num_files: int, is_concerned: bool) -> None:
    counts = [
        f"{n} {level}{'s' * (n != 1)}"
        for level in ("error", "warning")
        if (n := sum(f.level == level for f in findings))
    ]
    files = f"{num_files} file{'s' * (num_files != 1)}"
    if counts:
        print(f"{' and '.join(counts)} in {files}.")
    elif is_concerned:
        print(f"No mistake found in {files}.")
    else:
        print(f"Nothing to check: no word of distributed training in {files}.")


def _sarif(findings: Sequence[Any]) -> dict[str, Any]:
    from paceline.codes import read_pages

    pages = read_pages()
    rules = [
        {
            "id": code,
            "shortDescription": {"text": pages[code].title},
            "fullDescription": {"text": pages[code].why},
        }
        for code in sorted({finding.code for finding in findings})
    ]
    results = [
        {
            "ruleId": finding.code,
            "level": {"error": "error", "warning": "warning"}.get(finding.level, "note"),
            "message": {"text": f"{finding.saw} {finding.rule} {finding.fix}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": finding.path.partition("#")[0]},
                        "region": {
                            "startLine": finding.line,
                            "startColumn": finding.column,
                            "endLine": finding.end_line,
                        },
                    }
                }
            ],
        }
        for finding in findings
    ]
    return {
        "$schema": _SARIF,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": {"name": "paceline", "rules": rules}}, "results": results}],
    }
