"""Unmodified scripts under torchrun and under `paceline run`: the same output and exit code?

    python benchmarks/torchrun_scripts/run.py                          # all, some minutes on two cores
    python benchmarks/torchrun_scripts/run.py --only ddp fsdp2 --launchers torchrun cold

Prints a table and writes it to results.txt; exit code 1 where a script does something else than under
torchrun, with the difference. `--write-expected` keeps what torchrun gave in expected/, for the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, Case
from memory_group import NoMemoryGroupError, count_kills, enter, memory_group

HERE = Path(__file__).parent
LAUNCHERS = {"torchrun": ["torchrun"], "paceline": ["paceline", "run"], "cold": ["paceline", "run", "--cold"]}
TITLES = {name: " ".join(words) for name, words in LAUNCHERS.items()}
TIME_LIMIT_S = 120
# How long a process of a run may outlive the launcher before it counts as left behind.
GRACE_S = 3.0
# In the environment of every process of a run, to find them all: launchers give ranks sessions of their own.
MARK = "TORCHRUN_SCRIPTS_RUN"
# In front of what DeepSpeed logs where it is installed: Accelerate asks for it.
STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\]")
# Variables of a launcher, and of threads, that whoever runs this may have set.
DROPPED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
DROPPED_PREFIXES = ("TORCH", "PACELINE_", "GROUP_", "ROLE_", "PYTHON")


class SkippedError(Exception):
    """Raised if a script cannot be run here, with the reason."""


@dataclass(frozen=True)
class Outcome:
    """The result of one run of a script."""

    exit_code: int | None  # None: ended after TIME_LIMIT_S
    stdout: str
    stderr: str
    files: tuple[str, ...]  # that the run made in its working folder
    left_behind: tuple[str, ...]  # command lines of processes that outlived the launcher
    num_killed: int | None  # by the kernel for memory; None: without a limit
    missing: tuple[str, ...]  # text that standard error should have
    seconds: float

    def describe(self) -> list[str]:
        """All that has to be equal under two launchers. Ranks print in any order, so lines are sorted."""
        code = f"no end within {TIME_LIMIT_S} s" if self.exit_code is None else f"exit code {self.exit_code}"
        killed = [] if self.num_killed is None else [f"killed for memory: {self.num_killed}"]
        return [
            code,
            *killed,
            *(f"left behind: {command}" for command in self.left_behind),
            *(f"not on standard error: {text}" for text in self.missing),
            *(f"file {name}" for name in self.files),
            *(f"> {line}" for line in sorted(split_lines(self.stdout))),
        ]


def split_lines(text: str) -> list[str]:
    """Return the lines that the ranks printed.

    torchrun's ranks run with `-u`: print writes a line and its end apart, and another rank's line may come in
    between. Every line of a rank starts with its number in brackets, so text is cut there too.
    """
    lines = re.split(r"\n|(?=\[\d\] )", text)
    return [STAMP.sub("[<time>]", line) for line in lines if line]


def run_case(case: Case, launcher: str, folder: Path) -> Outcome:
    """Run a script in `folder`, which is made anew: scripts print its path, so it has to be the same one.

    Raises SkippedError if the script cannot be run here.
    """
    if case.requires and importlib.util.find_spec(case.requires) is None:
        raise SkippedError(f"{case.requires} is not installed")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(HERE / "scripts", folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = list_files(folder)
    program, *words = LAUNCHERS[launcher]
    command = [str(Path(sys.executable).parent / program), *words, *case.build_words(find_free_port())]
    with contextlib.ExitStack() as stack:
        group = None
        if case.memory_limit_bytes is not None:
            try:
                group = stack.enter_context(memory_group(case.memory_limit_bytes))
            except NoMemoryGroupError as error:
                raise SkippedError(str(error)) from None
            command = [*enter(group), *command]
        start = time.perf_counter()
        exit_code, stdout, stderr, left_behind = run_command(command, case, folder)
        seconds = time.perf_counter() - start
        num_killed = None if group is None else count_kills(group)
    files = tuple(sorted(list_files(folder) - before))
    missing = tuple(text for text in case.stderr_has if text not in stderr)
    return Outcome(exit_code, stdout, stderr, files, left_behind, num_killed, missing, seconds)


def run_command(command: list[str], case: Case, folder: Path) -> tuple[int | None, str, str, tuple[str, ...]]:
    """Exit code, standard output and error, and what was left behind; nothing of it runs any more."""
    mark = uuid.uuid4().hex
    environment = build_environment(case) | {MARK: mark}
    # Files: a process that is left behind would keep a pipe open.
    with tempfile.TemporaryFile("a+b") as out, tempfile.TemporaryFile("a+b") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            process.communicate(case.stdin.encode(), timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            left_behind = () if process.returncode is None else wait_for_rest(mark)
            kill_all(mark, process)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return (None if process.returncode == -signal.SIGKILL else process.returncode), *texts, left_behind


def build_environment(case: Case) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in DROPPED and not name.startswith(DROPPED_PREFIXES)
    }
    threads = {} if case.omp_num_threads is None else {"OMP_NUM_THREADS": case.omp_num_threads}
    # Python's streams take their encoding from the locale.
    return kept | threads | dict(case.variables) | {"LC_ALL": "C.UTF-8"}


def find_free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def find_marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_for_rest(mark: str) -> tuple[str, ...]:
    """Return command lines of the processes of a run that do not end soon after their launcher."""
    limit = time.monotonic() + GRACE_S
    while (rest := find_marked(mark)) and time.monotonic() < limit:
        time.sleep(0.1)
    commands = []
    for process in rest:
        with contextlib.suppress(psutil.Error):
            commands.append(" ".join(process.cmdline()))
    return tuple(sorted(commands))


def kill_all(mark: str, process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # Again until none is left: one of them may have started another in the meantime.
    while rest := find_marked(mark):
        for each in rest:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(rest, timeout=5)


def list_files(folder: Path) -> set[str]:
    """Return files below a folder, without compiled modules and the launcher's own logs."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if "__pycache__" not in path.parts and path.parts[0] != "logs"}


def find_difference(expected: list[str], got: list[str], titles: tuple[str, str]) -> str:
    """Return a unified diff, or nothing if both are equal."""
    return "\n".join(difflib.unified_diff(expected, got, *titles, lineterm="", n=1))


def read_expected(case: Case, folder: Path) -> list[str]:
    """Return the recorded output of torchrun, as if it had run in `folder`."""
    text = (HERE / "expected" / f"{case.name}.txt").read_text(encoding="utf-8")
    return text.replace("<folder>", str(folder)).splitlines()


def write_expected(case: Case, outcome: Outcome, folder: Path) -> None:
    (HERE / "expected").mkdir(exist_ok=True)
    text = "\n".join(outcome.describe()).replace(str(folder), "<folder>") + "\n"
    (HERE / "expected" / f"{case.name}.txt").write_text(text, encoding="utf-8")


def compare_case(case: Case, launchers: list[str], folder: Path, keep: bool) -> tuple[list[str], list[str]]:
    """Return cells of the table's row, and the differences. The first launcher's is expected."""
    cells, differences = [case.name, case.what], []
    outcomes = {name: run_case(case, name, folder) for name in launchers}
    first = outcomes[launchers[0]]
    if keep and launchers[0] == "torchrun":
        write_expected(case, first, folder)
    if first.exit_code != case.exit_code or first.missing:
        # Then there is nothing to compare with.
        tail = "\n".join(first.stderr.splitlines()[-25:])
        differences.append(
            f"{case.name} under {TITLES[launchers[0]]}: exit code {first.exit_code} instead of "
            f"{case.exit_code}, not on standard error: {first.missing}; its end:\n{tail}"
        )
    for name, outcome in outcomes.items():
        cells += ["none" if outcome.exit_code is None else str(outcome.exit_code), f"{outcome.seconds:.1f}"]
        if outcome is first:
            continue
        found = find_difference(first.describe(), outcome.describe(), (TITLES[launchers[0]], TITLES[name]))
        cells.append("NO" if found else "yes")
        if found:
            tail = "\n".join(outcome.stderr.splitlines()[-25:])
            differences.append(f"{case.name}:\n{found}\nstandard error of {TITLES[name]}, its end:\n{tail}")
    return cells, differences


def format_table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip() for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=[case.name for case in CASES], metavar="NAME", help="default: all"
    )
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--out", type=Path, help="default: results.txt if all scripts and launchers are run")
    parser.add_argument("--write-expected", action="store_true", help="keep torchrun's answers in expected/")
    args = parser.parse_args()

    heads = [["script", "what it does"]]
    for name in args.launchers:
        heads[0] += [TITLES[name], "s"] + (["same"] if name != args.launchers[0] else [])
    rows, skipped, differences = [], [], []
    with tempfile.TemporaryDirectory() as place:
        for case in CASES:
            if args.only and case.name not in args.only:
                continue
            try:
                cells, found = compare_case(case, args.launchers, Path(place) / "work", args.write_expected)
            except SkippedError as error:
                skipped.append(f"{case.name}  skipped: {error}")
                print(skipped[-1], flush=True)
                continue
            rows.append(cells)
            differences += [text.replace(str(Path(place) / "work"), "<folder>") for text in found]
            print("  ".join(cells), flush=True)
            print("\n\n".join(found), flush=True, end="\n" if found else "")
    import torch

    about = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, gloo"
    verdict = f"{len(rows)} scripts run, {len(skipped)} skipped, {len(differences)} differences"
    table = "\n".join([about, "", *format_table([*heads, *rows]), *skipped, "", verdict])
    print(f"\n{table}")
    out = args.out or (HERE / "results.txt" if not args.only and args.launchers == list(LAUNCHERS) else None)
    if out:
        out.write_text("\n\n".join([table, *differences]) + "\n", encoding="utf-8")
    return 1 if differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
