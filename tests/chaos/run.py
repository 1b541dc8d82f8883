"""`make chaos`: kills processes of real runs at random instants until enough have died.

    python -m tests.chaos.run --kills 100 --seed 0 [--reductions fast,exact] [--keep DIR] [--json]
    python -m tests.chaos.run --pipelines fp32,bf16
    python -m tests.chaos.run --compress int8,int4 --kills 20
    python -m tests.chaos.run --islands none,int4 --kills 20

Each run is given the same command again and again until it is complete: fast reduction on 1, 2, 3 and 4
ranks, exact reduction on another number of ranks each time, pipelines under another layout each time. What it
came to is then compared, bit by bit, with a run that nobody disturbed. Exit code 1 if anything at all is off.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from paceline.checkpoint import is_usable, verify
from paceline.checkpoint.folder_names import list_checkpoints
from paceline.launching.processes.folder import remove_folder
from paceline.train.metrics import read_rows
from tests.chaos.judge import Outcome, Tally, count_differing_bits, dump_table, read_outcome
from tests.chaos.plan import Plan, Plans
from tests.chaos.processes import kill, wait_until_gone
from tests.chaos.setting import PIPELINES, SAVE_EVERY, Case, write_setting
from tests.chaos.start import Start, run_start

_MAX_STARTS = 60
# Ranks without a launcher end after ten seconds at the latest, loader workers without a rank after five.
_GONE_S = 25.0
# A run that was killed hard may leave a few small files; never one per kill.
_MAX_LEFT_FILES = 4
_SEMAPHORES_PER_KILL = 32
MODES = "async-sharded,full,sharded,async-full"


class Chaos:
    """The loop.

    Args:
        folder: for all runs.
        seed: of what is done to them.
        quiet: print nothing.
        plans: what is done to them, instead of what the seed gives.
    """

    def __init__(self, folder: Path, seed: int, *, quiet: bool = False, plans: Plans | None = None) -> None:
        self.folder = folder
        self.tally = Tally(SAVE_EVERY)
        self._plans = Plans(seed) if plans is None else plans
        self._chance = random.Random(seed + 1)
        self._quiet = quiet
        self._references: dict[str, Outcome] = {}
        self._expected_s: dict[int, tuple[float, float]] = {}
        self._shared_memory = _list_shared_memory()

    def run(self, cases: list[Case], num_kills: int) -> None:
        """Run of the cases in turn, until so many processes were killed."""
        for number, case in enumerate(_in_turn(cases)):
            if sum(self.tally.kills.values()) >= num_kills:
                return
            self._make_reference(case)
            self._disturb(f"{number:03d}", case)

    def _make_reference(self, case: Case) -> None:
        if case.reference in self._references:
            return
        folder = self.folder / f"reference-{case.reference}"
        write_setting(folder, case)
        start = run_start(case, None, folder, folder.name, expected_s=(0.0, 0.0))
        if start.status != 0:
            raise RuntimeError(f"the undisturbed run failed:\n{start.stderr}")
        self._references[case.reference] = outcome = read_outcome(folder / "out")
        rows = read_rows(folder / "out/metrics.jsonl")
        training_s = sum(row["step_s"] for row in rows)
        self._expected_s[start.nproc] = (max(1.0, start.seconds - training_s), training_s)
        self._tell(f"{folder.name}: {len(rows)} steps, {start.seconds:.1f} s, {outcome.hash[:12]}")

    def _disturb(self, name: str, case: Case) -> None:
        """One run, started again until it is complete."""
        folder = self.folder / f"run-{name}"
        write_setting(folder, case)
        damaged: set[int] = set()
        before: Start | None = None
        for number in range(_MAX_STARTS):
            plan = self._plans.deal(case)
            mark = f"{name}-{number:02d}"
            # Orphans may still be saving: then the newest checkpoint is not ours to damage.
            if plan.damage is not None and (before is None or before.killed not in ("launcher", "keeper")):
                damaged |= self._damage(folder, plan.damage)
            before = self._start(folder, case, plan, mark, damaged)
            if before.status == 0:
                break
        else:
            self.tally.wrong.append(f"run {name} was not complete after {_MAX_STARTS} starts")
            return
        differing = count_differing_bits(read_outcome(folder / "out"), self._references[case.reference])
        self.tally.note_end(name, case.label, differing)
        self.tally.note_leftovers(name, self._find_leftovers(folder, name))
        self._tell(f"{name} {case.label}: complete, {sum(differing.values())} differing bits")
        if not differing:
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, folder: Path, case: Case, plan: Plan, mark: str, damaged: set[int]) -> Start:
        run = folder / "out"
        usable, corrupt = check_checkpoints(run, damaged)
        self.tally.note_committed(mark, corrupt)
        logged = max((row["step"] for row in read_rows(run / "metrics.jsonl")), default=0)

        # A save in the background may be lost with all steps up to the next one.
        allowed = SAVE_EVERY * (2 if case.asynchronous else 1)

        def on_resume(step: int) -> None:
            now, _ = check_checkpoints(run, damaged)
            self.tally.note_resume(mark, step, logged, usable | now, damaged, allowed)

        expected_s = self._expected_s.get(plan.nproc) or next(iter(self._expected_s.values()))
        start = run_start(case, plan, folder, mark, expected_s=expected_s, on_resume=on_resume)
        self.tally.note_start(start)
        # A damaged checkpoint counts until the run has come past it again.
        for step in [
            step for step in damaged if start.status == 0 or step in check_checkpoints(run, set())[0]
        ]:
            damaged.discard(step)
        done = start.fault or (f"{start.killed} killed" if start.killed else "undisturbed")
        if start.fault and start.killed:
            done += f" ({start.killed})"
        resumed = "?" if start.resumed is None else start.resumed
        reached = max((row["step"] for row in read_rows(run / "metrics.jsonl")), default=0)
        how = f"{case.reduction} {'async ' if case.asynchronous else ''}{case.mode}"
        how += f" nproc={start.nproc} workers={case.num_workers}"
        how += f" {case.dtype} {plan.layout or 'one process'}" if case.layouts else ""
        took = f"{start.seconds:.1f} s: {done}, exit {start.status}"
        self._tell(f"{mark} {how} from {resumed} to {reached}, {took}")
        return start

    def _damage(self, folder: Path, how: str) -> set[int]:
        """Damage the newest checkpoint, where the one before it is whole; return its step."""
        checkpoints = list_checkpoints(folder / "out/checkpoints")
        usable, _ = check_checkpoints(folder / "out", set())
        if len(usable) < 2 or max(checkpoints) not in usable:
            return set()
        step = max(usable)
        files = sorted(checkpoints[step].iterdir())
        damage(self._chance.choice(files), how, self._chance.random())
        self.tally.damages[how] += 1
        self._tell(f"  damaged step {step}: {how}")
        return {step}

    def _find_leftovers(self, folder: Path, name: str) -> list[str]:
        left = []
        for log in folder.glob("stderr-*.txt"):
            mark = log.stem.removeprefix("stderr-")
            for pid in wait_until_gone(mark, _GONE_S):
                left.append(f"process {pid} of start {mark}")
                kill([pid])
        # Where launcher and keeper were killed, nobody could remove their folder.
        for path in (folder / "tmp").glob("paceline-launch-*"):
            remove_folder(path)
        files = [path for path in (folder / "tmp").rglob("*") if not path.is_dir()]
        if len(files) > _MAX_LEFT_FILES:
            left += [f"{path.relative_to(folder)}" for path in files]
        return left

    def check_shared_memory(self) -> None:
        """Count what is new in shared memory. Semaphores stay there when even multiprocessing's resource
        tracker, which removes those of killed processes, was killed: 32 bytes each, a few per rank."""
        new = _list_shared_memory().keys() - self._shared_memory.keys()
        left = {name: num_bytes for name, num_bytes in _list_shared_memory().items() if name in new}
        kills = self.tally.kills
        without_tracker = kills["resource tracker"] + kills["everything"] + self.tally.hung
        self.tally.note_shared_memory(left, _SEMAPHORES_PER_KILL * without_tracker)

    def _tell(self, line: str) -> None:
        if not self._quiet:
            print(line, flush=True)


def _list_shared_memory() -> dict[str, int]:
    """Name to bytes; other programs may put things there too."""
    found = {}
    for path in Path("/dev/shm").glob("*"):
        with contextlib.suppress(OSError):
            found[path.name] = path.stat().st_size
    return found


def check_checkpoints(run: Path, damaged: set[int]) -> tuple[set[int], list[str]]:
    """Return steps of the checkpoints that are whole, and a line for each other one that nobody damaged."""
    usable, corrupt = set(), []
    for step, path in list_checkpoints(run / "checkpoints").items():
        findings = verify(path)
        if is_usable(findings):
            usable.add(step)
        elif path.exists() and step not in damaged:  # else a living rank let go of it meanwhile
            corrupt.append(f"{path.name} is corrupt: {findings[0].saw}")
    return usable, corrupt


def damage(file: Path, how: str, where: float) -> None:
    """Flip a bit of a file, cut it off, or remove it."""
    data = bytearray(file.read_bytes())
    place = int(where * len(data))
    if how == "remove a file":
        file.unlink()
    elif how == "cut a file":
        file.write_bytes(data[:place])
    else:
        data[place] ^= 1 << (place % 8)
        file.write_bytes(data)


def _in_turn(cases: list[Case]) -> Iterator[Case]:
    while True:
        yield from cases


def make_cases(reductions: list[str], modes: list[str]) -> list[Case]:
    """Return all ways to run, the two reductions and the modes of checkpoints in turn."""
    fast = [
        Case("fast", nproc, workers) for nproc, workers in ((2, 2), (3, 0), (4, 2), (1, 2), (2, 0), (3, 2))
    ]
    exact = [Case("exact", None, workers) for workers in (2, 0, 2, 0, 2, 0)]
    pairs = zip(fast, exact, strict=True)
    cases = [case for pair in pairs for case in pair if case.reduction in reductions]
    # Two in a row have the same mode, so that each reduction meets each.
    found = []
    for number, case in enumerate(cases):
        name = modes[number // 2 % len(modes)]
        found.append(replace(case, mode=name.removeprefix("async-"), asynchronous=name.startswith("async-")))
    return found


def make_pipeline_cases(dtypes: list[str], modes: list[str]) -> list[Case]:
    """Run whose starts have the layouts of `PIPELINES` in turn, for each type of numbers and checkpoint."""
    return [
        Case(
            "exact",
            None,
            0,
            mode=mode.removeprefix("async-"),
            asynchronous=mode.startswith("async-"),
            layouts=PIPELINES,
            dtype=dtype,
        )
        for mode in modes
        for dtype in dtypes
    ]


def print_report(tally: Tally, seconds: float) -> None:
    """Print the table at the end."""
    print(f"\n{sum(tally.kills.values())} kills in {tally.starts} starts, {seconds / 60:.1f} min")
    for title, counts in (
        ("killed", tally.kills),
        ("faults in saving", tally.faults),
        ("damaged on purpose", tally.damages),
        ("runs completed", tally.runs),
    ):
        print(f"  {title:<28}" + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    lines = {
        "resumes": tally.resumes,
        "most steps lost": f"{tally.most_lost} (limit: the save interval, {tally.save_every})",
        "most lost to damage": tally.most_lost_to_damage,
        "differing bits": f"{tally.differing_bits} in {tally.differing_runs} runs",
        "corrupt checkpoints committed": tally.corrupt_committed,
        "corrupt checkpoints loaded": tally.corrupt_loaded,
        "left behind": tally.leftovers,
        "bytes in shared memory": tally.shared_bytes,
    }
    for name, value in lines.items():
        print(f"  {name:<30}{value}")
    for what in tally.wrong:
        print(f"WRONG: {what}")
    print("all good" if tally.is_good else f"{len(tally.wrong)} things are wrong")


def main(words: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--kills", type=int, help="go on until so many processes were killed (100; of pipelines 20)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is done to whom, and when")
    parser.add_argument("--reductions", default="fast,exact", help="which, with a comma between")
    parser.add_argument("--modes", default=MODES, help="of checkpoints, with a comma between")
    parser.add_argument(
        "--pipelines",
        metavar="DTYPES",
        help="in place of the others, pipelines in these types",
    )
    parser.add_argument(
        "--compress", metavar="KINDS", help="in place of the others, exact reduction with these compressions"
    )
    parser.add_argument(
        "--islands", metavar="CODECS", help="in place of the others, 12 islands with these codecs"
    )
    parser.add_argument("--keep", type=Path, help="do it in this new folder, and leave it there")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end, and nothing else"
    )
    args = parser.parse_args(words)
    cases = make_cases(args.reductions.split(","), args.modes.split(","))
    if args.pipelines:
        cases = make_pipeline_cases(args.pipelines.split(","), args.modes.split(","))
    if args.compress:
        kinds = args.compress.split(",")
        exact = make_cases(["exact"], args.modes.split(","))
        cases = [replace(case, compress=kinds[n % len(kinds)]) for n, case in enumerate(exact)]
    if args.islands:
        codecs = args.islands.split(",")
        exact = make_cases(["exact"], ["full"])
        cases = [replace(case, islands=codecs[n % len(codecs)]) for n, case in enumerate(exact)]
    if not cases:
        parser.error(f"--reductions {args.reductions}: neither fast nor exact is among them")
    folder = args.keep or Path(tempfile.mkdtemp(prefix="paceline-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    chaos = Chaos(folder.resolve(), args.seed, quiet=args.json)
    try:
        chaos.run(cases, args.kills or (20 if args.pipelines else 100))
        chaos.check_shared_memory()
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if args.json:
        print(dump_table(chaos.tally))
    else:
        print_report(chaos.tally, time.monotonic() - begin_s)
    return 0 if chaos.tally.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
