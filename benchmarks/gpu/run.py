"""Everything that one GPU can show, in at most 9 minutes: ten parts in the order of their value.

    make gpu                       one card; writes docs/tables/gpu.md
    make gpu RANKS=2               also NCCL between ranks: every axis, its hash beside that of one rank
    python benchmarks/gpu/run.py --device cpu --tiny       tries the script itself, without a GPU

Each part has a time limit of its own, so a part that hangs or fails costs the others nothing. Its results are
the JSON objects that its commands print. After each part, results.jsonl and gpu.md are written into --out (by
default a new folder), which also gets the output of every part and the recorded profile. It needs what
`pip install -e .` installs. Without `.[dev]`, the tests marked gpu are left out, and the profile is not read.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHECKS = Path(__file__).with_name("checks.py")
TABLE = ROOT / "docs" / "tables" / "gpu.md"
LIMIT_S = 540.0
AXES = {
    "dp_replicate": "",
    "dp_shard": "",
    "tp": "",
    "pp": "",
    "cp": "cp_by=gather",
}


@dataclass(frozen=True)
class Part:
    """A part of the run.

    Attributes:
        name: for the table.
        limit_s: of all its commands together.
        commands: run one after the other; without any, the part is left out.
        is_same: whether all hashes that they print have to be equal.
    """

    name: str
    limit_s: float
    commands: tuple[tuple[str, ...], ...]
    is_same: bool = False


def list_parts(args: argparse.Namespace, folder: Path) -> Iterator[Part]:
    """Yield the parts in the order of their value."""
    python = sys.executable
    tiny = ("--tiny",) if args.tiny else ()

    def check(*words: str) -> tuple[str, ...]:
        return (python, str(CHECKS), *words, "--device", args.device, *tiny)

    def spread(num_ranks: int, *words: str) -> tuple[str, ...]:
        return (python, "-m", "paceline", "run", f"--nproc-per-node={num_ranks}", *check(*words)[1:])

    def train(out: str, *settings: str) -> tuple[str, ...]:
        given = (f"train.device={args.device}", *settings)
        words = [word for setting in given for word in ("--set", setting)]
        recipe = str(ROOT / "recipes" / "gpt-stdlib.toml")
        base = (python, "-m", "paceline", "train", recipe, "--nproc", "1", "--json")
        return (*base, "--out", str(folder / out), *words)

    short = ("train.eval_samples=16", "train.steps=4" if args.tiny else "train.steps=30")
    short += ("train.eval_every=4" if args.tiny else "train.eval_every=30",)
    yield Part("versions", 20, (check("versions"),))
    pytest = (python, "-m", "pytest", "-m", "gpu", "-W", "ignore", "-p", "no:cacheprovider")
    needed = ("pytest", "pytest_timeout", "hypothesis")
    can_test = all(importlib.util.find_spec(name) for name in needed)
    yield Part("tests marked gpu", 60, ((*pytest, *find_marked()),) if can_test else ())
    yield Part("claims of single modules", 60, (check("units"),))
    kinds = ("fp32",) if args.tiny else ("bf16", "fp16", "fp32")
    yield Part("train", 90, tuple(train(f"train-{kind}", f"train.dtype={kind}", *short) for kind in kinds))
    again = (check("bits"), check("bits"), spread(2, "bits", "--layout", "dp_replicate=2"))
    yield Part("same bits: twice, and two ranks", 100, again, is_same=True)
    yield Part("speed beside a plain loop", 120, (check("speed"),))
    yield Part("asynchronous saves", 60, (check("save"),))
    yield Part("out of memory", 30, (check("oom"),))
    steps = ("train.steps=12", "checkpoint.every=4", "train.eval_every=12", "train.eval_samples=16")
    hashes = [(python, "-m", "paceline", "checkpoint", "hash", str(folder / run), "--json") for run in "ab"]
    runs = (train("a", *steps), train("a", *steps), train("b", *steps))
    yield Part("killed and resumed", 90, (*runs, *hashes), is_same=True)
    first, count = ("3", "2") if args.tiny else ("17", "5")
    profile = ("profile", "--out", str(folder / "profile"), "--from", first, "--steps", count)
    words = train("profiled", *short)
    at = words.index("--nproc")
    profiled = (python, "-m", "paceline", *profile, *words[1:at], *words[at + 2 :])
    read = (python, "-m", "paceline", "profile", "read", str(folder / "profile"), "--json")
    yield Part("profile", 60, (profiled, read))
    if args.ranks > 1:
        for axis, settings in AXES.items():
            layout = f"{axis}={args.ranks} {settings}".strip()
            command = spread(args.ranks, "bits", "--layout", layout)
            yield Part(f"{axis} over {args.ranks} ranks", 60, (command,))


def find_marked() -> list[str]:
    """Return the files with tests that are marked gpu."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(path.relative_to(ROOT)) for path in files if "\n@pytest.mark.gpu" in path.read_text())


def run_part(part: Part, limit_s: float, folder: Path, log: Path) -> dict[str, Any]:
    """Run a part's commands; return its results, and how it ended. All output is added to `log`."""
    began_s, results, ended, lines = time.monotonic(), [], "ok", []
    for number, command in enumerate(part.commands):
        left_s = min(part.limit_s, limit_s) - (time.monotonic() - began_s)
        is_killed = part.name.startswith("killed") and number == 0
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )
        try:
            if is_killed:
                _await_checkpoint(folder / "a", process, left_s)
                os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate(timeout=max(1.0, left_s))
        except subprocess.TimeoutExpired:
            ended = f"over its limit of {part.limit_s:g} s"
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        finally:  # what it has started may outlive it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        with log.open("a") as file:
            file.write(f"$ {' '.join(command)}\n{output}\n")
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        results += [found for line in lines if (found := _read_object(line)) is not None]
        if ended == "ok" and process.returncode and not is_killed:
            ended = f"exit code {process.returncode}: {lines[-1][:300] if lines else ''}"
        if ended != "ok":
            print("\n".join(lines[-25:]))
            break
    if part.commands and not results:  # pytest's counts
        results = [{"said": line} for line in lines[-1:]]
    hashes = {result[key] for result in results for key in ("hash", "sha256") if key in result}
    if ended == "ok" and part.is_same and len(hashes) != 1:
        ended = "hashes differ" if hashes else "no hash"
    if ended == "ok" and any(result.get("holds") is False for result in results):
        ended = "a claim does not hold"
    return {
        "part": part.name,
        "ended": ended if part.commands else "left out",
        "seconds": round(time.monotonic() - began_s, 1),
        "results": results,
    }


def _read_object(line: str) -> dict[str, Any] | None:
    with contextlib.suppress(json.JSONDecodeError):
        found = json.loads(line)
        return found if isinstance(found, dict) else None
    return None


def _await_checkpoint(run: Path, process: subprocess.Popen[str], limit_s: float) -> None:
    """Wait until a run has saved, or has ended."""
    deadline_s = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline_s:
        if list(run.glob("checkpoints/step-*")):
            return
        time.sleep(0.05)


def find_commit() -> str:
    """Return the commit of this clone; empty where there is no git."""
    with contextlib.suppress(OSError):
        git = subprocess.run(
            ("git", "rev-parse", "--short", "HEAD"), cwd=ROOT, capture_output=True, text=True
        )
        return git.stdout.strip()
    return ""


def write_table(found: list[dict[str, Any]], commit: str) -> str:
    """Return the results as a page."""
    about = next((result for part in found for result in part["results"] if "torch" in result), {})
    lines = ["# On a GPU", "", "`make gpu` writes this page.", ""]
    lines += [f"- {name}: {value}" for name, value in {**about, "commit": commit}.items()]
    lines += ["", "| part | ended | s | results |", "|---|---|--:|---|"]
    for part in found:
        shown = "<br>".join(_shorten(result) for result in part["results"]) or "-"
        lines.append(f"| {part['part']} | {part['ended']} | {part['seconds']} | {shown} |")
    return "\n".join(lines) + "\n"


def _shorten(result: dict[str, Any]) -> str:
    text = ", ".join(f"{key} {value}" for key, value in result.items() if value not in (None, [], {}))
    return text.replace("|", "/").replace("\n", " ")[:400]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script itself")
    parser.add_argument("--ranks", type=int, default=1, help="cards of this machine to use")
    parser.add_argument("--out", type=Path, help="folder for results.jsonl; default: a new one")
    parser.add_argument("--only", help="parts whose name contains this")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="paceline-gpu-results-"))
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="paceline-gpu-"))
    began_s, found = time.monotonic(), []
    # Limits keep what a lent card costs; beside other tests on a CPU, they would only cut parts off.
    patience = 4.0 if args.tiny else 1.0
    for part in list_parts(args, folder):
        if args.only and args.only not in part.name:
            continue
        left_s = LIMIT_S * max(1, args.ranks / 2) * patience - (time.monotonic() - began_s)
        log = out / f"{part.name.replace(' ', '-')}.log"
        found.append(run_part(replace(part, limit_s=part.limit_s * patience), left_s, folder, log))
        print(json.dumps(found[-1]), flush=True)
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps(found[-1]) + "\n")
        page = write_table(found, find_commit())
        (out / "gpu.md").write_text(page)  # after each part: somebody may have the card no longer
        if args.device == "cuda" and not args.tiny and not args.only:
            TABLE.write_text(page)
    if (folder / "profile").exists():
        shutil.copytree(folder / "profile", out / "profile", dirs_exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"results: {out}")
    return int(any(part["ended"] not in ("ok", "left out") for part in found))


if __name__ == "__main__":
    sys.exit(main())
