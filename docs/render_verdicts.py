"""Draws what `paceline run` says of three scripts that can't go on, as pictures of a terminal.

    python docs/render_verdicts.py [FOLDER]        # docs/pictures/

Each is run as train.py in a terminal of its own, in an empty folder. The line with the verdict is yellow.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from terminal import ROOT, capture, draw, wrap

SCRIPTS = ROOT / "tests" / "watch" / "scripts" / "faulty"
COLUMNS = 104
# What the tests mark lines with.
MARK = re.compile(r"  # (WAITS|CAUSE)( CAUSE)?$", re.MULTILINE)
# By the picture's name: the script, and its number of ranks.
VERDICTS = {
    "hang-branch": ("rank0_property", 3),
    "hang-order": ("order_operations", 2),
    "hang-circle": ("mesh_cycle", 4),
}


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures"
    for name, (script, nproc) in VERDICTS.items():
        command = ["paceline", "run", "--nproc-per-node", str(nproc), "--hang-after", "5", "train.py"]
        with tempfile.TemporaryDirectory() as folder:
            source = (SCRIPTS / f"{script}.py").read_text(encoding="utf-8")
            (Path(folder) / "train.py").write_text(MARK.sub("", source), encoding="utf-8")
            text = capture(command, Path(folder), exit_code=1)
        rows = wrap(f"$ {' '.join(command)}\n{text}", COLUMNS, "[PL8")
        (out / f"{name}.svg").write_text(draw(rows, " ".join(command), COLUMNS), encoding="utf-8")


if __name__ == "__main__":
    main()
