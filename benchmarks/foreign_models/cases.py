"""Runs cases one by one on the ranks of a pool, and writes what each gave as soon as it is known."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.dist.pool import Pool

Row = dict[str, Any]
# Of each run of the ranks, on a machine that may have much else to do.
TIMEOUT_S = 300.0


def run_cases(
    doc: str,
    results: Path,
    names: Iterable[str],
    *,
    run: Callable[[str, Pool], Row],
    show: Callable[[Row], str],
    describe: Callable[[dict[str, Row]], str],
) -> dict[str, Row]:
    """Carry out the command line of a program with many cases, and return its rows.

    Args:
        doc: the program's docstring, for `--help`.
        results: the JSON file that rows go to; the table goes beside it, as `.txt`.
        names: of all cases, in the order of the table.
        run: gives a case's row.
        show: puts a row into a line, printed when the case has ended.
        describe: puts all rows into the table.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--only", help="cases whose name has this in it; writes nothing")
    parser.add_argument("--missing", action="store_true", help=f"go on: leave out what {results.name} has")
    options = parser.parse_args()
    names = list(names)
    rows = json.loads(results.read_text(encoding="utf-8")) if options.missing and results.exists() else {}
    pool = Pool()
    for name in names:
        if name in rows or (options.only or "").lower() not in name.lower():
            continue
        rows[name] = run(name, pool)
        print(name, "|", show(rows[name]), flush=True)
        if not options.only:
            rows = {each: rows[each] for each in names if each in rows}
            results.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    pool.close()
    text = describe(rows)
    print(f"\n{text}")
    if not options.only:
        results.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    return rows
