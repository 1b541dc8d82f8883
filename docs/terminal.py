"""What a command writes to a terminal, and that as a picture: for the scripts that draw docs/pictures/.

Of what is printed only names of places are changed: site-packages/, bin/ and python stand for where these are
on this machine, and host for its name.
"""

from __future__ import annotations

import io
import os
import pty
import re
import socket
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
_DROPPED_PREFIXES = ("TORCH", "PACELINE_", "PET_", "SLURM_", "OMPI_", "PYTHON", "OMP_")


def capture(command: list[str], folder: Path, *, exit_code: int) -> str:
    """What a command writes to a terminal of its own, in a folder.

    Raises:
        RuntimeError: it ended with another exit code.
    """
    ours, its = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED_PREFIXES)}
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
    if process.wait() != exit_code:
        raise RuntimeError(f"{command} ended with {process.returncode}:\n{data.decode()}")
    return _neutral(data.decode().replace("\r\n", "\n"), folder)


def _neutral(text: str, folder: Path) -> str:
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


def wrap(text: str, columns: int, yellow: str) -> list[Text]:
    """The lines as a terminal of so many columns breaks them; those with some words are drawn in yellow."""
    rows = []
    for line in text.rstrip("\n").splitlines():
        style = "bold yellow" if yellow in line else ""
        line = line.rstrip()
        rows += [Text(line[at : at + columns], style) for at in range(0, max(1, len(line)), columns)]
    return rows


def draw(rows: list[Text], title: str, columns: int, num_rows: int = 0) -> str:
    """The SVG of one screen, of so many rows at least."""
    console = Console(record=True, width=columns, file=io.StringIO(), highlight=False)
    for row in [*rows, *[Text()] * (num_rows - len(rows))]:
        console.print(row, no_wrap=True, crop=False)
    # rich names fonts on the web; a picture in a repository should fetch nothing.
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL)
