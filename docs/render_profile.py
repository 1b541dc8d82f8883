"""Writes the report that docs/profile.md quotes: of a job in which one rank's loader is slow.

python docs/render_profile.py      # docs/tables/profile.txt
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "profile" / "slow_loader.py"


def main() -> None:
    paceline = [sys.executable, "-m", "paceline"]
    with tempfile.TemporaryDirectory() as name:
        traces = str(Path(name) / "traces")
        command = [*paceline, "run", "--nproc-per-node", "2", "--profile", traces, str(SCRIPT)]
        subprocess.run(command, cwd=name, check=True, capture_output=True)
        # Exit code 1: it has a finding.
        done = subprocess.run(
            [*paceline, "profile", "read", traces], capture_output=True, text=True, check=False
        )
    if done.returncode != 1:
        raise SystemExit(done.stderr)
    (ROOT / "docs" / "tables" / "profile.txt").write_text(done.stdout, encoding="utf-8")


if __name__ == "__main__":
    main()
