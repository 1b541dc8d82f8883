"""Draws what a command printed as a picture of a terminal.

COMMAND | python docs/render_terminal.py OUT.svg TITLE
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def render(text: str, title: str) -> str:
    """The SVG of a text, as wide as its longest line."""
    lines = text.rstrip("\n").splitlines()
    console = Console(record=True, width=max(map(len, lines)) + 1, file=io.StringIO(), highlight=False)
    for line in lines:
        console.print(Text(line), no_wrap=True, crop=False)
    return without_web_fonts(console.export_svg(title=title))


def without_web_fonts(svg: str) -> str:
    """rich names fonts on the web; a picture in a repository should fetch nothing."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(sys.stdin.read(), sys.argv[2]), encoding="utf-8")
