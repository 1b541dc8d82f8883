"""`paceline lint`: names mistakes of distributed training in scripts, before they run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

_DESCRIPTION = """
Reads scripts without running or importing them, as three ranks of 16 on two nodes would run them, and reports
what is proved to hang, crash or be wrong. Errors and warnings make the exit code 1.
"""
_FORMATS = ("text", "json", "sarif", "github")
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
        "--format", choices=_FORMATS, default="text", help="how findings are printed (default: text)"
    )
    parser.add_argument("--json", action="store_true", help="the same as --format json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    from paceline.lint.check_sources import check_sources
    from paceline.lint.sources import read_sources

    sources = list(read_sources(args.paths, sys.stdin.read))
    checked = check_sources(sources)
    findings = checked.findings
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
            lines = texts.get(finding.path, "").splitlines()
            if 0 < finding.line <= len(lines):
                print(f"    | {lines[finding.line - 1].strip()}")
            print(f"    {finding.rule}\n    Fix: {finding.fix}\n")
        _print_sum(findings, checked.num_files, checked.num_concerned)
    return 1 if any(finding.level in ("error", "warning") for finding in findings) else 0


def _print_sum(findings: Sequence[Any], num_files: int, num_concerned: int) -> None:
    counts = [
        f"{n} {level}{'s' * (n != 1)}"
        for level in ("error", "warning")
        if (n := sum(f.level == level for f in findings))
    ]
    files = f"{num_files} file{'s' * (num_files != 1)}"
    if counts:
        print(f"{' and '.join(counts)} in {files}.")
    elif num_concerned:
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
