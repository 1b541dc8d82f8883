"""The sink `csv`: `metrics.csv` and `evaluations.csv` in the run's folder, for spreadsheets and pandas."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.sinks.sink import Sink, SinkRun


class CsvSink(Sink):
    """A row per step and per evaluation, with a column for each name; a new name adds a column."""

    name = "csv"

    def begin(self, start: SinkRun) -> None:
        self._steps = _Table(start.folder / "metrics.csv", start.first_step)
        self._evaluations = _Table(start.folder / "evaluations.csv", start.first_step)

    def step(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        self._steps.add(number, values)

    def evaluation(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        self._evaluations.add(number, values)

    def flush(self) -> None:
        self._steps.flush()
        self._evaluations.flush()

    def end(self) -> None:
        self._steps.close()
        self._evaluations.close()


class _Table:
    """A CSV file with rows up to a step, to which rows are appended; written anew for a new column."""

    def __init__(self, path: Path, last_step: int) -> None:
        self._path, self._columns, self._last = path, ["step"], dict[str, float]()
        rows: list[dict[str, Any]] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                rows = [row for row in reader if _is_kept(row, last_step)]
                self._columns = list(reader.fieldnames or self._columns)
        self._rewrite(rows)

    def add(self, number: int, values: Mapping[str, float]) -> None:
        if self._last.get("step") != number:
            self._last, self._place = {"step": number}, self._file.seek(0, os.SEEK_END)
        self._last |= values
        self._file.seek(self._place)
        self._file.truncate()  # if the row of this step has got more values
        if new := [name for name in self._last if name not in self._columns]:
            self._file.seek(0)
            rows = list(csv.DictReader(self._file))
            self._columns += new
            self._file.close()
            self._rewrite(rows)
        csv.DictWriter(self._file, self._columns).writerow(self._last)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        partial = self._path.with_name(f"{self._path.name}.partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(partial, self._path)
        self._file = self._path.open("r+", newline="", encoding="utf-8")
        self._place = self._file.seek(0, os.SEEK_END)


def _is_kept(row: Mapping[str, Any], last_step: int) -> bool:
    number = row.get("step") or ""
    return number.isdigit() and int(number) <= last_step
