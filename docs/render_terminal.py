"""Draws what a command printed as a picture of a terminal.

COMMAND | python docs/render_terminal.py OUT.svg TITLE
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.text import Text
from terminal import draw

if __name__ == "__main__":
    lines = sys.stdin.read().rstrip("\n").splitlines()
    svg = draw([Text(line) for line in lines], sys.argv[2], max(map(len, lines)) + 1)
    Path(sys.argv[1]).write_text(svg, encoding="utf-8")
