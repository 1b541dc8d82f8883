"""Counts the pitfalls of tutorials on distributed training that are named for a script of the user's own.

    python benchmarks/pitfalls/count.py        # the rows that are not named in full, and the count

Each row of rows.tsv has what names the pitfall, its code, and a proof: a design, script or test of this
repository that fails if it is not named. A proof must exist and have the code.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
LEAST = 51


def read_rows() -> list[dict[str, str]]:
    """Return the rows of the table."""
    with (HERE / "rows.tsv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def find_wrong(rows: list[dict[str, str]]) -> list[str]:
    """Return the rows whose proof does not exist or is about something else."""
    wrong = []
    for row in rows:
        path, _, name = row["proof"].partition("::")
        if row["named"] in ("no", "right") or not path:
            continue
        file = REPOSITORY / path
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        if row["code"] not in text or (name and f"def {name}(" not in text):
            wrong.append(f"{row['number']} {row['pitfall']}: {row['proof']} has no {name or row['code']}")
    return wrong


def main() -> int:
    """Print the count; return 1 if a proof is missing or fewer than `LEAST` are named."""
    rows = read_rows()
    wrong = find_wrong(rows)
    counts = Counter(row["named"] for row in rows)
    for row in rows:
        if row["named"] != "yes":
            print(f"{row['number']:>3} {row['named']:6}{row['pitfall']} {row['by']} {row['code']}".rstrip())
    for line in wrong:
        print(line)
    print(f"{counts['yes']} of {len(rows)} named, {counts['part']} in part, {counts['right']} needs no word")
    return int(bool(wrong) or counts["yes"] < LEAST)


if __name__ == "__main__":
    sys.exit(main())
