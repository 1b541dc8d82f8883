"""Writes a run's metrics to `metrics.jsonl` and `evaluations.jsonl`, and to sinks. Rank 0 only."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.sinks.feed import Feed, Row
from paceline.train.belongings import EVALUATIONS, METRICS, UPDATES, OpenFolder
from paceline.train.disk_thread import WAIT_S, DiskThread
from paceline.train.step import SaveTimes, Step

log = logging.getLogger(__name__)

# Dense peak FLOP/s of one device by dtype of the matrix products, from the vendors' data sheets.
_PEAK_FLOPS = {
    "H200": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12, "fp64": 67e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12, "fp64": 67e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12, "fp64": 19.5e12},
    "L4": {"bf16": 121e12, "fp16": 121e12, "fp32": 30.3e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12, "fp64": 7.8e12},
}
# Rows of short steps are collected for this long before they are written.
_FLUSH_S = 1.0
# How long the end of training waits for the disk to take the last ones.
_CLOSING_S = 30.0


def find_peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the peak FLOP/s of a CUDA device for a training dtype, or `None` if it is unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for model, peaks in _PEAK_FLOPS.items():
        if model in name.replace("-", " ").split():
            return peaks.get(dtype)
    return None


def measure_memory(device: torch.device) -> int:
    """Return the peak bytes so far: allocated on the device under CUDA, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def measure_gpu(device: torch.device) -> dict[str, float]:
    """Return the busy time in per cent and the power of a GPU, as NVML reports them; nothing without it."""
    if device.type != "cuda":
        return {}
    try:
        return {
            "gpu_percent": float(torch.cuda.utilization(device)),
            "gpu_w": torch.cuda.power_draw(device) / 1000,
        }
    except Exception:  # no nvidia-ml-py, or a driver that refuses, each with errors of its own
        return {}


class MetricsWriter:
    """A writer of `metrics.jsonl` (a row per optimizer step), `evaluations.jsonl` and `updates.jsonl`.

    Args:
        last_step: the step that the run resumes from. Later rows of an earlier, killed start are dropped, so
            that the file holds each step once.
        open_feed: returns the feed of sinks, once the folder is ready; `None` without sinks.

    Every method raises PL522 if the folder was renamed or removed, and PL523 if no file can be opened. If
    the disk stands still or is full, training goes on, and rows wait for it.
    """

    def __init__(self, folder: Path, *, last_step: int, open_feed: Callable[[], Feed] | None = None) -> None:
        self._steps, self._evaluations, self._updates = (
            folder.absolute() / name for name in (METRICS, EVALUATIONS, UPDATES)
        )
        # Rows that no sink has got, and those that the disk has not taken.
        self._unsent: list[tuple[float, dict[str, Any]]] = []
        self._waiting: dict[Path, list[dict[str, Any]]] = {
            path: [] for path in (self._steps, self._evaluations, self._updates)
        }
        self._disk = DiskThread()
        self._last_flush_s = -math.inf
        self._memory_bytes, self._gpu = 0, dict[str, float]()
        self._has_failed = self._is_told = False
        self._last_row: dict[str, Any] = {}

        def start() -> None:
            self._folder = OpenFolder(folder)
            for path in self._waiting:
                drop_rows_after(path, last_step)
            for path in (self._steps, self._evaluations):
                path.open("a").close()

        self._run(start)
        self.feed = open_feed() if open_feed is not None else None

    def measure(self, device: torch.device) -> tuple[int, dict[str, float]]:
        """Return the peak bytes and a GPU's load, measured only when rows are written: it takes 1 ms."""
        if self._is_due():
            self._memory_bytes, self._gpu = measure_memory(device), measure_gpu(device)
        return self._memory_bytes, self._gpu

    def write(self, row: dict[str, Any]) -> None:
        """Append a step's row; the first call over 1 s after the last flush writes all rows to the file."""
        self._unsent.append((time.time(), row))
        self._waiting[self._steps].append(row)
        self._last_row = row
        if self._is_due():
            self.flush()

    def amend(self, values: Mapping[str, float]) -> None:
        """Add values to the last row, also if it is in the file already."""
        row = self._last_row
        taken = [name for name in values if name == "step" or not _is_empty(row.get(name))]
        if taken or not row:
            raise _log_error(taken[0] if taken else next(iter(values)), row)
        row |= values
        if self._unsent:
            return
        if self.feed is not None:
            self.feed.send(steps=[(row["step"], _list_numbers(values), time.time())])
        if self._is_free(0.0) and self._waiting[self._steps]:
            return
        rest = _dump(dict(values))
        if not self._run(lambda: self._append(self._steps, f", {rest[1:]}\n", over=b"}\n")):
            log.warning("The disk does not take %s of step %d.", ", ".join(values), row["step"])

    def flush(self) -> None:
        """Write the collected rows; many at once take half the time, which matters for short steps."""
        if self.feed is not None and self._unsent:
            rows: list[Row] = [(row["step"], _list_numbers(row), wall_s) for wall_s, row in self._unsent]
            self.feed.send(steps=rows)
        self._unsent = []
        num_rows = {path: len(rows) for path, rows in self._waiting.items() if rows}

        def task() -> None:
            for path, count in num_rows.items():
                waiting = self._waiting[path]
                if self._append(path, "".join(_dump(row) + "\n" for row in waiting[:count])):
                    del waiting[:count]

        self._last_flush_s = time.monotonic()
        self._run(task)

    def write_update(self, row: dict[str, Any]) -> None:
        """Append a row to `updates.jsonl` with the next rows of metrics."""
        self._waiting[self._updates].append(row)

    def write_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Append the results of an evaluation after `step` to `evaluations.jsonl`."""
        self._waiting[self._evaluations].append({"step": step, **values})
        self.flush()
        if self.feed is not None:
            self.feed.send(evaluation=(step, values, time.time()))

    def close(self) -> None:
        """Flush; an earlier failure is not raised again."""
        try:
            if not self._has_failed and self._is_free(_CLOSING_S):
                self.flush()
        finally:
            if any(self._waiting.values()):
                log.warning("The disk does not take the last rows of %s.", self._steps)
            if self.feed is not None:
                self.feed.close()

    def _run(self, task: Callable[[], object]) -> bool:
        """Run a task on the disk; return False, and do not, if the last one still runs."""
        if not self._is_free(0.0):
            return False
        self._disk.begin(task)
        if not self._is_free(WAIT_S):
            log.warning("The disk has not taken a row of %s for %g s. Training goes on.", self._steps, WAIT_S)
        return True

    def _append(self, path: Path, text: str, over: bytes = b"") -> bool:
        """Write text to the end of a file, over its last bytes; return False if the disk does not take it."""
        self._folder.check()
        try:
            _write_end(path, text.encode(), over)
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                log.warning("%s Training goes on.", unwritable_error(path, error).saw)
            return False
        self._is_told = False
        return True

    def _is_free(self, timeout_s: float) -> bool:
        try:
            return self._disk.wait(timeout_s)
        except (OSError, PacelineError) as error:
            self._has_failed = True
            if isinstance(error, OSError):
                raise unwritable_error(self._steps, error) from error
            raise

    def _is_due(self) -> bool:
        return time.monotonic() - self._last_flush_s > _FLUSH_S


def describe_step(
    step: Step,
    *,
    samples: int,
    tokens_per_sample: int | None,
    flops_per_sample: float | None,
    peak_flops: float | None,
    memory_bytes: int,
    save_times: SaveTimes | None = None,
    layout: str | None = None,
) -> dict[str, Any]:
    """Return the row of one step.

    Args:
        samples: of the whole run so far.
        tokens_per_sample: for text, else `None`.
        flops_per_sample: of forward and backward, counted once.
        peak_flops: of all ranks' devices together, for MFU (model FLOPs utilisation; Chowdhery et al.
            2022, appendix B).
        memory_bytes: peak on this rank.
        save_times: of the saves since the step before.
        layout: of the ranks that took the step.
    """
    samples_per_s = step.num_samples / step.step_s if step.step_s > 0 else None
    flops_per_s = flops_per_sample * samples_per_s if flops_per_sample and samples_per_s else None
    save_times = save_times or SaveTimes()
    row = {
        "step": step.number,
        "epoch": step.epoch,
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "lr": step.lr,
        "samples": samples,
        "tokens": samples * tokens_per_sample if tokens_per_sample else None,
        "step_s": step.step_s,
        "data_s": step.data_s,
        "comm_s": step.comm_s,
        "fullest_expert": step.fullest_expert,
        "samples_per_s": samples_per_s,
        "tokens_per_s": samples_per_s * tokens_per_sample if tokens_per_sample and samples_per_s else None,
        "flops_per_s": flops_per_s,
        "mfu": flops_per_s / peak_flops if flops_per_s and peak_flops else None,
        "memory_bytes": memory_bytes,
        "save_stall_s": save_times.stall_s,
        "save_s": save_times.save_s,
        "skipped": step.skipped,
        "layout": layout,
    }
    if len(step.updates) > 1:
        row |= {f"loss_{name}": update.loss for name, update in step.updates.items()}
    return row


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a `.jsonl` file, none if it is missing; skip lines that a kill has torn."""
    if not path.exists():
        return []
    found = (_parse_row(line) for line in _read_lines(path))
    return [row for row in found if row is not None]


def _read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").split("\n")


def _parse_row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if is_row else None


def drop_rows_after(path: Path, last_step: int) -> None:
    """Remove the rows of later steps from a `.jsonl` file; lines that are no rows go to a file beside it."""
    if not path.exists():
        return
    *lines, torn = _read_lines(path)
    rows = [_parse_row(line) for line in [*lines, torn]]
    kept = "".join(json.dumps(row) + "\n" for row in rows if row is not None and row["step"] <= last_step)
    num_damaged = sum(row is None for row in rows[:-1])
    if num_damaged:
        damaged = path.with_name(f"{path.name}.damaged")
        shutil.copyfile(path, damaged)
        log.warning("%d lines of %s are not rows of a run; they are kept in %s", num_damaged, path, damaged)
    if path.read_bytes() == kept.encode():
        return
    partial = path.with_suffix(".partial")
    partial.write_text(kept, encoding="utf-8")
    os.replace(partial, path)


def _write_end(path: Path, data: bytes, over: bytes) -> None:
    """Write to the end of a file, over its last bytes; if that fails, leave the file as it was."""
    path.touch()
    with path.open("r+b", buffering=0) as file:
        begin = file.seek(-len(over), os.SEEK_END)
        try:
            # In one call: the last row is then torn or complete whenever this process is killed.
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.seek(begin)
            file.write(over)
            file.truncate()
            raise


def _dump(row: dict[str, Any]) -> str:
    # JSON has no numbers that are not finite.
    return json.dumps({k: None if _is_not_finite(v) else v for k, v in row.items()})


def _list_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row, which all sinks take."""
    return {key: x for key, x in row.items() if key != "step" and isinstance(x, (int, float))}


def read_number(name: str, value: Any) -> float:
    """Return a value to log as a number; raise PL734 for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise PacelineError(
            "PL734",
            saw=f"log({name}={_describe(value)}).",
            rule="A row of metrics has numbers, and tensors of one.",
            fix="Log its mean or another number of it.",
        ) from None


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return repr(value)[:40] if shape is None else f"a {type(value).__name__} of shape {list(shape)}"


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _log_error(name: str, row: Mapping[str, Any]) -> PacelineError:
    if not row:
        return PacelineError(
            "PL734",
            saw=f"log({name}=...) before the first step of this start.",
            rule="Values are added to the row of the latest step.",
            fix="Call it after trainer.step(batch).",
        )
    return PacelineError(
        "PL734",
        saw=f"log({name}=...), but the row of step {row['step']} has {name}={row.get(name)!r}.",
        rule="The names in a row of metrics are different.",
        fix=f"Choose another name, for example my_{name}.",
    )


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def unwritable_error(path: Path, error: OSError) -> PacelineError:
    """Return the error of a file of metrics that cannot be read or written."""
    return PacelineError(
        "PL523",
        saw=f"{path} cannot be written: {error.strerror or error}.",
        rule="Every step of a run writes a row of metrics there.",
        fix="Free space, or change the file's permissions; the same command then continues from the last "
        "checkpoint.",
    )
