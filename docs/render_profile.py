"""Writes the report of docs/profile.md, of a job with a slow loader: docs/tables/profile.txt."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from generate import quote_tables

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "profile" / "slow_loader.py"


def main() -> None:
    paceline = [sys.executable, "-m", "paceline"]
    with tempfile.TemporaryDirectory() as name:
        traces = str(Path(name) / "traces")
        command = [*paceline, "profile", "--nproc-per-node", "2", "--out", traces, str(SCRIPT)]
        subprocess.run(command, cwd=name, check=True, capture_output=True)
        # Exit code 1: it has a finding.
        read = [*paceline, "profile", "read", traces]
        done = subprocess.run(read, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 1:
        raise SystemExit(done.stderr)
    docs = ROOT / "docs"
    (docs / "tables" / "profile.txt").write_text(done.stdout, encoding="utf-8")
    guide = docs / "profile.md"
    tables = {"tables/profile.txt": done.stdout}
    guide.write_text(quote_tables(guide.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
