"""Draws what a crash of one rank leaves on the screen, under torchrun and under `paceline run`, side by side.

    python docs/render_crash.py [OUT.svg]        # docs/pictures/run-crash.svg

Both run the same script in a terminal of their own, in an empty folder. Of what they print, only names of
places are changed: site-packages/, bin/ and python stand for where these are on this machine, and host for
its name. Lines that name the exception are drawn in yellow.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

from render_terminal import without_web_fonts
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "torchrun_scripts" / "scripts" / "fails_on_rank1.py"
COMMANDS = (
    ["torchrun", "--nproc-per-node", "2", "train.py"],
    ["paceline", "run", "--nproc-per-node", "2", "train.py"],
)
COLUMNS = 92
GAP = 16
DROPPED_PREFIXES = ("TORCH", "PACELINE_", "PET_", "SLURM_", "OMPI_", "PYTHON", "OMP_")
CAUSE = "ValueError: "


def capture(command: list[str], folder: Path) -> str:
    """What a command writes to a terminal."""
    ours, its = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED_PREFIXES)}
    program = [str(Path(sys.executable).parent / command[0]), *command[1:]]
    process = subprocess.Popen(
        program, cwd=folder, env=environ, stdin=its, stdout=its, stderr=its, start_new_session=True
    )
    os.close(its)
    data = b""
    with suppress(OSError):  # how the end of a pseudo-terminal shows
        while part := os.read(ours, 65536):
            data += part
    os.close(ours)
    if process.wait() != 1:
        raise RuntimeError(f"{command} ended with {process.returncode}:\n{data.decode()}")
    return data.decode().replace("\r\n", "\n")


def neutral(text: str, folder: Path) -> str:
    """Without the places of this machine."""
    prefix = str(Path(sys.executable).parent)
    names = {
        f"{folder}/": "",
        f"{sysconfig.get_path('purelib')}/": "site-packages/",
        f"{ROOT}/src/": "site-packages/",
        f"{prefix}/python": "python",
        f"{prefix}/": "bin/",
    }
    for name, short in names.items():
        text = text.replace(name, short)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "host", text)


def wrap(text: str) -> list[Text]:
    """The lines as a terminal of `COLUMNS` breaks them."""
    rows = []
    for line in text.rstrip("\n").splitlines():
        style = "bold yellow" if CAUSE in line else ""
        line = line.rstrip()
        rows += [Text(line[at : at + COLUMNS], style) for at in range(0, max(1, len(line)), COLUMNS)]
    return rows


def draw(rows: list[Text], title: str, num_rows: int) -> str:
    """The SVG of one screen."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    for row in [*rows, *[Text()] * (num_rows - len(rows))]:
        console.print(row, no_wrap=True, crop=False)
    return without_web_fonts(console.export_svg(title=title))


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
            text = neutral(capture(command, Path(name)), Path(name))
        screens.append(wrap(f"$ {' '.join(command)}\n{text}"))
        titles.append(f"{' '.join(command)}: {len(text.splitlines())} lines")
    highest = max(map(len, screens))
    out.write_text(
        join([draw(s, t, highest) for s, t in zip(screens, titles, strict=True)]), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
