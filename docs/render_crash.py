"""Draws what a crash of one rank leaves on the screen, under torchrun and under `paceline run`, side by side.

    python docs/render_crash.py [OUT.svg]        # docs/pictures/run-crash.svg

Both run the same script in a terminal of their own, in an empty folder. Lines that name the exception are
drawn in yellow.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from terminal import ROOT, capture, draw, wrap

SCRIPT = ROOT / "benchmarks" / "torchrun_scripts" / "scripts" / "fails_on_rank1.py"
COMMANDS = (
    ["torchrun", "--nproc-per-node", "2", "train.py"],
    ["paceline", "run", "--nproc-per-node", "2", "train.py"],
)
COLUMNS = 92
GAP = 16


def join(screens: list[str]) -> str:
    """One picture of several, from left to right."""
    sizes = [
        tuple(map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())) for svg in screens
    ]
    parts, left = [], 0.0
    for svg, (width, height) in zip(screens, sizes, strict=True):
        parts.append(svg.replace("<svg ", f'<svg x="{left:g}" width="{width:g}" height="{height:g}" ', 1))
        left += width + GAP
    width, height = left - GAP, max(height for _, height in sizes)
    head = f'<svg viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg">'
    return "\n".join([head, *parts, "</svg>\n"])


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures" / "run-crash.svg"
    screens, titles = [], []
    for command in COMMANDS:
        with tempfile.TemporaryDirectory() as name:
            shutil.copy(SCRIPT, Path(name) / "train.py")
            text = capture(command, Path(name), exit_code=1)
        screens.append(wrap(f"$ {' '.join(command)}\n{text}", COLUMNS, "ValueError: "))
        titles.append(f"{' '.join(command)}: {len(text.splitlines())} lines")
    highest = max(map(len, screens))
    svgs = [draw(s, t, COLUMNS, highest) for s, t in zip(screens, titles, strict=True)]
    out.write_text(join(svgs), encoding="utf-8")


if __name__ == "__main__":
    main()
