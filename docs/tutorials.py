"""Run the tutorials of docs/tutorials/ and put what their commands print into the pages.

    python docs/tutorials.py                 # all of them
    python docs/tutorials.py 02-collectives  # one page

A block of Python whose first line is a comment with a file's name (`# train.py`) goes to that file, in a
folder that is the page's own. In a block of the kind `console`, every line that begins with `$ ` is a command
of bash there; the lines below it are what it printed. A command that ends with `# exit 1` must end so, the
others with 0.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PAGES = Path(__file__).parent / "tutorials"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_FILE = re.compile(r"# ([\w./-]+\.\w+)\n")
_EXIT = re.compile(r"\s+# exit (-?\d+)$")
_LIMIT_S = 300
# Of the machine, of torch at its start, or of a rank's own prefix: nothing that a reader looks for.
_NOISE = re.compile(r"USDT:|Warning: .*CUDA|^\s*$")


class UnexpectedEndError(Exception):
    """A command ended otherwise than its page says."""


@dataclass(frozen=True)
class Command:
    """A command of a page with its comments, and the exit code that the page expects."""

    line: str
    code: int


def read_commands(block: str) -> list[Command]:
    """Return the commands of a console block."""
    found = []
    for line in block.splitlines():
        if line.startswith("$ "):
            ending = _EXIT.search(line)
            found.append(Command(line[2:], 0 if ending is None else int(ending[1])))
    return found


def run_page(path: Path, folder: Path) -> str:
    """Run a page's blocks in a folder, from top to bottom; return the page with what its commands print.

    Raises:
        UnexpectedEndError: if a command ends with another code than the page says.
    """

    def run_block(match: re.Match[str]) -> str:
        kind, text = match[1], match[2]
        name = _FILE.match(text)
        if kind == "python" and name is not None:
            file = folder / name[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.partition("\n")[2], encoding="utf-8")
        if kind != "console":
            return match[0]
        printed = [f"$ {command.line}\n{run_command(command, folder)}" for command in read_commands(text)]
        return f"```console\n{''.join(printed)}```"

    return _BLOCK.sub(run_block, path.read_text(encoding="utf-8"))


def run_command(command: Command, folder: Path) -> str:
    """Run one command; return what it printed, without what only this machine prints."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": tools, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        ["bash", "-c", command.line],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode != command.code:
        raise UnexpectedEndError(f"{command.line}\n{done.stdout}\nended with {done.returncode}")
    shown = done.stdout.replace(f"{folder}/", "").replace(str(folder), ".")
    lines = [line.rstrip() for line in shown.splitlines() if not _NOISE.search(line)]
    return "".join(f"{line}\n" for line in lines)


def main(names: list[str]) -> int:
    """Renew the pages."""
    for path in sorted(PAGES.glob("[0-9]*.md")):
        if names and path.stem not in names:
            continue
        with tempfile.TemporaryDirectory(prefix="tutorial-") as folder:
            page = run_page(path, Path(folder))
        path.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
