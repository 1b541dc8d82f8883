"""Judges a run: what differs from its reference, and what went wrong on the way."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import find_checkpoint, hash_tensors
from paceline.checkpoint.tensors import tensor_bytes
from paceline.train.metrics import read_rows
from tests.chaos.faults import KINDS
from tests.chaos.start import Start
from tests.checkpoint.states import load_checkpoint

# What a step computed; the rest of a row is time and memory.
_COMPUTED = ("step", "epoch", "loss", "grad_norm", "lr", "samples", "skipped")


@dataclass(frozen=True)
class Outcome:
    """The results of a finished run.

    Attributes:
        hash: of the weights, as `paceline checkpoint hash` gives it.
        state: everything in its last checkpoint, path to value: tensors, numbers and words.
        rows: what each step computed.
        evaluations: what each evaluation gave.
    """

    hash: str
    state: dict[str, Any]
    rows: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


def read_outcome(run: Path) -> Outcome:
    """Read a finished run's folder."""
    loaded = load_checkpoint(find_checkpoint(run))
    tree = {"model": loaded.model, "optimizer": loaded.optimizer, "state": loaded.state, "step": loaded.step}
    rows = [{key: row[key] for key in _COMPUTED} for row in read_rows(run / "metrics.jsonl")]
    evaluations = read_rows(run / "evaluations.jsonl")
    return Outcome(hash_tensors(loaded.model), dict(_flatten(tree, "")), rows, evaluations)


def _flatten(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [item for key, held in value.items() for item in _flatten(held, f"{path}.{key}")]
    if isinstance(value, list | tuple):
        return [item for number, held in enumerate(value) for item in _flatten(held, f"{path}[{number}]")]
    return [(path.removeprefix("."), value)]


def count_differing_bits(ours: Outcome, reference: Outcome) -> dict[str, int]:
    """Count differing bits by value; a difference that has no bits to compare counts as one."""
    differing = {"weights' hash": int(ours.hash != reference.hash)}
    for path in sorted(ours.state.keys() | reference.state.keys()):
        if path not in ours.state or path not in reference.state:
            differing[path] = 1
        else:
            differing[path] = _differing(ours.state[path], reference.state[path])
    for name, left, right in (
        ("metrics.jsonl", ours.rows, reference.rows),
        ("evaluations.jsonl", ours.evaluations, reference.evaluations),
    ):
        differing[f"rows of {name}"] = abs(len(left) - len(right))
        for one, other in zip(left, right, strict=False):
            for key in one.keys() | other.keys():
                label = f"{name} step {other.get('step')} {key}"
                differing[label] = _differing(one.get(key), other.get(key))
    return {path: bits for path, bits in differing.items() if bits}


def _differing(one: Any, other: Any) -> int:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return 1
        return _xor_bits(bytes(tensor_bytes(one)), bytes(tensor_bytes(other)))
    if isinstance(one, float) and isinstance(other, float):
        return _xor_bits(struct.pack("<d", one), struct.pack("<d", other))
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):
        return _differing(one.tobytes(), other.tobytes())
    if isinstance(one, bytes) and isinstance(other, bytes) and len(one) == len(other):
        return _xor_bits(one, other)
    return int(type(one) is not type(other) or one != other)


def _xor_bits(one: bytes, other: bytes) -> int:
    return (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).bit_count()


@dataclass
class Tally:
    """The counts over all runs.

    Attributes:
        save_every: the most steps that a kill may cost.
    """

    save_every: int
    kills: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    damages: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    hung: int = 0
    resumes: int = 0
    runs: Counter[str] = field(default_factory=Counter)
    most_lost: int = 0
    most_lost_to_damage: int = 0
    differing_bits: int = 0
    differing_runs: int = 0
    corrupt_committed: int = 0
    corrupt_loaded: int = 0
    leftovers: int = 0
    shared_bytes: int = 0
    wrong: list[str] = field(default_factory=list)

    def note_start(self, start: Start) -> None:
        """Count a start, and judge its end."""
        self.starts += 1
        self.resumes += bool(start.resumed)
        self.hung += start.status is None
        if start.killed is not None:
            self.kills[start.killed] += 1
        if start.fault is not None:
            self.faults[start.fault] += 1
        if trouble := _wrong_end(start):
            self._accuse(f"start {start.mark}: {trouble}")

    def note_resume(
        self,
        mark: str,
        step: int,
        logged: int,
        usable: set[int],
        damaged: set[int],
        most_lost: int | None = None,
    ) -> None:
        """Judge where a start went on from.

        Args:
            mark: the start.
            step: the step that it resumed from.
            logged: the last step that an earlier start had logged.
            usable: steps of checkpoints that were whole when it began, or are now.
            damaged: steps of checkpoints that were damaged on purpose.
            most_lost: how many steps may be lost without damage; default the save interval.
        """
        most_lost = self.save_every if most_lost is None else most_lost
        if step in damaged or (step and step not in usable):
            self.corrupt_loaded += 1
            self._accuse(f"start {mark} resumed from step {step}, whose checkpoint is corrupt")
        lost = max(0, logged - step)
        if damaged and step < max(damaged):
            self.most_lost_to_damage = max(self.most_lost_to_damage, lost)
            allowed = most_lost + self.save_every * len(damaged)
        else:
            self.most_lost = max(self.most_lost, lost)
            allowed = most_lost
        if lost > allowed:
            self._accuse(f"start {mark} lost {lost} steps ({logged} logged, resumed from {step})")

    def note_committed(self, mark: str, corrupt: list[str]) -> None:
        """Count checkpoints that were not whole although no test damaged them."""
        self.corrupt_committed += len(corrupt)
        for what in corrupt:
            self._accuse(f"after start {mark}: {what}")

    def note_end(self, name: str, case: str, differing: dict[str, int]) -> None:
        """Count a finished run."""
        self.runs[case] += 1
        self.differing_runs += bool(differing)
        self.differing_bits += sum(differing.values())
        if differing:
            shown = ", ".join(f"{path} ({bits})" for path, bits in list(differing.items())[:4])
            self._accuse(
                f"run {name} ({case}) differs from its reference in {len(differing)} places: {shown}"
            )

    def note_leftovers(self, name: str, left: list[str]) -> None:
        """Count the files that a run left outside its folder."""
        self.leftovers += len(left)
        if left:
            self._accuse(f"run {name} left behind {', '.join(left[:5])}")

    def note_shared_memory(self, left: dict[str, int], num_allowed: int) -> None:
        """Judge what is new in shared memory: name to bytes, and how many semaphores may stay."""
        self.shared_bytes = sum(left.values())
        if len(left) > num_allowed or self.shared_bytes > 32 * num_allowed:
            shown = ", ".join(sorted(left)[:5])
            self._accuse(
                f"{len(left)} entries ({self.shared_bytes} bytes) are left in shared memory: {shown}"
            )

    @property
    def is_good(self) -> bool:
        """Whether nothing at all was off."""
        return not self.wrong

    def as_table(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "kills": sum(self.kills.values()),
            "kills_by_process": dict(self.kills),
            "faults_in_saving": dict(self.faults),
            "damaged_on_purpose": dict(self.damages),
            "starts": self.starts,
            "resumes": self.resumes,
            "runs": dict(self.runs),
            "most_steps_lost": self.most_lost,
            "save_interval": self.save_every,
            "most_steps_lost_to_damage": self.most_lost_to_damage,
            "differing_runs": self.differing_runs,
            "differing_bits": self.differing_bits,
            "corrupt_checkpoints_committed": self.corrupt_committed,
            "corrupt_checkpoints_loaded": self.corrupt_loaded,
            "leftovers": self.leftovers,
            "shared_memory_bytes": self.shared_bytes,
            "wrong": self.wrong,
        }

    def _accuse(self, what: str) -> None:
        self.wrong.append(what)


def _wrong_end(start: Start) -> str | None:
    """Return what is wrong with a start's end, given what was done to it."""
    if start.status is None:
        return "hung"
    if "Traceback" in start.stderr and start.killed is None:
        return "ended with a traceback, and nobody was killed"
    if start.fault is not None and start.fault not in KINDS:
        return f"unknown fault {start.fault}"
    if start.fault is not None and start.killed is None:
        # The next save tries again; only a failure of the last one ends the run.
        told = start.status in (0, 2) and "PL508" in start.stderr
        return None if told else f"{start.fault!r} ended with exit code {start.status} and without PL508"
    if start.killed is None and start.status != 0:
        return (
            f"failed with exit code {start.status}, and nothing was done to it: {start.stderr[-300:].strip()}"
        )
    return None


def dump_table(tally: Tally) -> str:
    """Return the tally as one line of JSON."""
    return json.dumps(tally.as_table())
