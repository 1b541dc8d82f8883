"""Fills memory cgroups, and checks what the launcher says of it.

    python benchmarks/memory/run.py                        # everything; writes results.txt
    python benchmarks/memory/run.py kills --number 6       # only whether a report is there before the kill
    python benchmarks/memory/run.py settings microbatch    # only whether a proposed setting fits

Kills: the kernel ends the planted shortages of tests/memory/shortages.py under several limits, one after the
other. The report counts if the launcher has one from before the kill.

Settings: a training is killed, and runs again with the setting that the report says would have fitted, under
the same limit per rank. It counts if it ends exactly where the report says that it would have fitted.

It needs a memory cgroup, version 1 or 2, in which this user can make groups. Exit code 1 if fewer than 95% of
the reports were there, or a setting did not fit as said.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.machine import describe_machine
from benchmarks.torchrun_scripts.memory_group import NoMemoryGroupError, count_kills, enter, memory_group
from tests.memory.shortages import SHORTAGES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MB = 1 << 20
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
LEAST_REPORTS = 0.95
LIMITS = (0.85, 1.0, 1.15)
"""Factors of a shortage's own limit."""
_BYTES = r"([\d.]+) (B|KiB|MiB|GiB)"


@dataclass(frozen=True)
class Setting:
    """A training that is killed, and the proposed setting to apply.

    Attributes:
        limit_mb: of the cgroup, for each rank.
        words: of the setting in the report; a group in them is its value.
        nproc: ranks with the setting.
    """

    limit_mb: int
    words: str
    nproc: int = 1


SETTINGS = {
    "microbatch": Setting(800, r"microbatches of (\d+) samples"),
    "recompute": Setting(800, r"torch\.utils\.checkpoint on"),
    "bf16": Setting(950, r"torch\.autocast with bfloat16"),
    "release": Setting(800, r"keep losses\.item\(\)"),
    "kept": Setting(800, r"do not keep outputs"),
    "no_grad": Setting(600, r"evaluate under torch\.no_grad\(\)"),
    "dp_shard": Setting(1100, r"fully_shard over 2 ranks", nproc=2),
}


def launch(
    words: Sequence[str], nproc: int, limit_mb: int, variables: Mapping[str, str] = MappingProxyType({})
) -> tuple[subprocess.CompletedProcess[str], int]:
    """Run a job in a cgroup of its own; return how it ended, and how many processes the kernel has killed.

    Args:
        words: after `paceline run`.
        nproc: ranks.
        limit_mb: of the cgroup.
        variables: of the environment, besides the usual ones.
    """
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        **variables,
    }
    with memory_group(limit_mb * MB) as group, tempfile.TemporaryDirectory() as folder:
        command = [*enter(group), sys.executable, "-m", "paceline", "run", "--nproc-per-node", str(nproc)]
        done = subprocess.run(
            [*command, *words], capture_output=True, text=True, check=False, cwd=folder, env=environ
        )
        return done, count_kills(group)


def try_kills(number: int, report: list[str]) -> bool:
    """Have the kernel end shortages in turn; return whether enough reports were there before."""
    names = [name for name, case in SHORTAGES.items() if case.kill_mb]
    num_kills = num_reports = 0
    missing = []
    # Runs that end without a kill count for nothing, and are few: the limits are far below what is asked for.
    for turn in range(2 * number):
        if num_kills == number:
            break
        name, factor = names[turn % len(names)], LIMITS[turn // len(names) % len(LIMITS)]
        case = SHORTAGES[name]
        words = ["-m", "tests.memory.shortages", "kill", name]
        done, kills = launch(words, case.nproc, round(factor * case.kill_mb))
        if not kills:
            missing.append(f"{name} at {factor:.2f}: not killed, exit code {done.returncode}")
            continue
        num_kills += 1
        is_there = "before its end: " in done.stderr
        num_reports += is_there
        if not is_there:
            missing.append(f"{name} at {factor:.2f}: no report")
        print(f"{name} at {factor:.2f}: {'report' if is_there else 'NO report'}", file=sys.stderr, flush=True)
    report += [f"reports before the kill: {num_reports} of {num_kills} kills", *missing, ""]
    return num_kills == number and num_reports >= LEAST_REPORTS * num_kills


def try_setting(name: str, report: list[str]) -> bool:
    """Kill a training, apply what its report proposes, and return whether that fits as said."""
    setting = SETTINGS[name]
    script = str(HERE / "training.py")
    killed, kills = launch([script, name], 1, setting.limit_mb)
    need = re.search(rf"A whole step needs about {_BYTES}", killed.stderr)
    remedy = re.search(
        rf"^ *- .*?({setting.words}).*: saves about {_BYTES}, (.*?)\.(?: \[PL914\])?$",
        killed.stderr,
        re.MULTILINE,
    )
    row = f"| {name} | {setting.limit_mb}"
    if not kills or need is None or remedy is None:
        reason = "not killed" if not kills else "no report" if need is None else "not proposed"
        report.append(f"{row} | {reason} | | | | | no |")
        print(killed.stderr, file=sys.stderr)
        return False
    value = remedy[2] if re.compile(setting.words).groups else "1"
    size, unit, verdict = remedy.groups()[-3:]
    said = float(need[1]) * UNITS[need[2]] - float(size) * UNITS[unit]
    # The launcher's share of the limit, and other processes', are part of what is said, and not of a rank.
    others = re.search(rf"{_BYTES}  other processes", killed.stderr)
    besides = float(others[1]) * UNITS[others[2]] if others else 0.0
    ends = re.search(rf"in {_BYTES} to {_BYTES}", verdict)
    lower, upper = (
        (float(ends[1]) * UNITS[ends[2]], float(ends[3]) * UNITS[ends[4]]) if ends else (said, said)
    )
    variables = dict(re.findall(r"(\w+)=(\d+) in the environment", remedy[0]))
    said, lower, upper = said - besides, lower - besides, upper - besides
    done, _ = launch([script, name, value], setting.nproc, setting.nproc * setting.limit_mb, variables)
    peaks = [int(peak) for peak in re.findall(r"peak of rank \d+: (\d+)", done.stdout)]
    fits = done.returncode == 0 and len(peaks) == setting.nproc
    peak = max(peaks, default=0)
    is_right = fits == verdict.startswith("would have fitted")
    span = f"{lower / MB:.0f} to {upper / MB:.0f}" if ends else ""
    words = "".join([remedy[1], *(f", {key}={number}" for key, number in variables.items())])
    report.append(
        f"{row} | {words}, {verdict.partition(' in ')[0]} | {said / MB:.0f} | {span} | {peak / MB:.0f} "
        f"| {'yes' if fits else 'no'} | {'yes' if is_right else 'no'} |"
    )
    if not is_right:
        print(killed.stderr, "" if fits else done.stderr, file=sys.stderr)
    print(report[-1], file=sys.stderr, flush=True)
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["kills", "settings"], help="default: both")
    parser.add_argument("names", nargs="*", help=f"of settings: {', '.join(SETTINGS)} (default: all)")
    parser.add_argument("--number", type=int, default=60, help="of kills (default 60)")
    args = parser.parse_args()
    report = [describe_machine(), f"{time.strftime('%Y-%m-%d %H:%M')}, load {os.getloadavg()[0]:.2f}", ""]
    is_good = True
    try:
        if args.part != "settings":
            is_good &= try_kills(args.number, report)
        if args.part != "kills":
            report += [
                "| setting | limit, MB | proposed | said, MB | range, MB | measured | fits | as said |",
                "|---|---:|---|---:|---:|---:|---|---|",
            ]
            names = args.names or list(SETTINGS)
            right = sum(try_setting(name, report) for name in names)
            report += ["", f"right: {right} of {len(names)}", ""]
            is_good &= right == len(names)
    except NoMemoryGroupError as reason:
        raise SystemExit(f"no memory cgroup: {reason}") from None
    text = "\n".join(report)
    print(text)
    if args.part is None:
        (HERE / "results.txt").write_text(text)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
