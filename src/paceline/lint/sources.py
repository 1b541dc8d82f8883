"""Reads scripts and notebooks, with the comments that silence findings and the project's settings."""

from __future__ import annotations

import fnmatch
import io
import json
import os
import re
import tokenize
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.lint.values import words

_IGNORE = re.compile(r"#\s*paceline:\s*ignore(?:\[([^\]]*)\])?")
_SKIPPED = words(".git .venv venv node_modules __pycache__ build dist site-packages .tox .mypy_cache")
_LEVELS = ("error", "warning", "advice", "off")
_MAGIC = re.compile(r"\s*[%!?]")


@dataclass(frozen=True)
class ScriptSource:
    """A script: its path as it is reported, its text, and why it cannot be read.

    A notebook has the first line of each code cell.
    """

    path: str
    text: str
    cells: tuple[int, ...] = ()
    encoding: str = "utf-8"
    problem: str = ""

    def place(self, line: int) -> tuple[str, int]:
        """Return the path and line under which a line is reported."""
        started = [number for number, first in enumerate(self.cells, 1) if first <= line]
        if not started:
            return self.path, line
        return f"{self.path}#cell{started[-1]}", line - self.cells[started[-1] - 1] + 1


@dataclass(frozen=True)
class LintSettings:
    """`[tool.paceline.lint]`: levels by code, or by "all", for the project and for some of its files.

    Attributes:
        level: the level of a code, or "off".
        per_file: the same for the files that match a pattern, the later ones first.
        folder: where patterns start.
    """

    level: dict[str, str] = field(default_factory=dict)
    per_file: dict[str, dict[str, str]] = field(default_factory=dict)
    folder: Path = Path()

    def level_of(self, code: str, path: str, level: str) -> str:
        """Return the level of a finding under these settings."""
        mine = [table for pattern, table in self.per_file.items() if self._matches(path, pattern)]
        for table in (*reversed(mine), self.level):
            if found := table.get(code) or table.get("all"):
                return found
        return level

    def _matches(self, path: str, pattern: str) -> bool:
        full = Path(path).resolve()
        name = full.relative_to(self.folder).as_posix() if full.is_relative_to(self.folder) else path
        return fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name, pattern.rstrip("/") + "/*")


def read_settings(folder: Path, codes: Sequence[str]) -> LintSettings:
    """Return the settings of the nearest pyproject.toml that has some, at or above a folder."""
    for place in (folder.resolve(), *folder.resolve().parents):
        file = place / "pyproject.toml"
        try:
            tools = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
        except (OSError, ValueError):
            continue
        if (table := tools.get("paceline", {}).get("lint")) is not None:
            return _check_settings(table, file, codes)
    return LintSettings()


def _check_settings(table: dict[str, Any], file: Path, codes: Sequence[str]) -> LintSettings:
    per_file = table.get("per-file", {})
    wrong = [f"the key {key!r}" for key in table if key not in ("level", "per-file")]
    for levels in (table.get("level", {}), *per_file.values()):
        for code, level in levels.items():
            wrong += [] if code in (*codes, "all") else [f"{code!r}, which is no code of a rule"]
            wrong += [] if level in _LEVELS else [f"the level {level!r} of {code}"]
    if wrong:
        raise PacelineError(
            "PL096",
            saw=f"{file} has {wrong[0]}.",
            rule="`level` and `per-file` give a code, or all, a level: error, warning, advice or off.",
            fix='For example: level = { PL040 = "off" }, per-file = { "tests/*" = { all = "off" } }.',
        )
    return LintSettings(table.get("level", {}), per_file, file.parent)


def read_sources(paths: Sequence[str], stdin: Callable[[], str]) -> Iterator[ScriptSource]:
    """Yield the scripts and notebooks of files, trees and `-`.

    Raises:
        PacelineError: PL097, a path that is given does not exist or cannot be read.
    """
    for name in paths:
        if name == "-":
            yield ScriptSource("<stdin>", stdin())
        elif os.path.isdir(name):
            closed: list[OSError] = []
            for folder, inner, files in os.walk(name, onerror=closed.append):
                inner[:] = sorted(set(inner) - _SKIPPED)
                here = [Path(folder, file) for file in sorted(files) if file.endswith((".py", ".ipynb"))]
                yield from (_read(path) for path in here if path.is_file())
            yield from (ScriptSource(error.filename, "", problem=str(error.strerror)) for error in closed)
        elif (source := _read(Path(name))).problem:
            raise PacelineError(
                "PL097",
                saw=f"{name} cannot be read: {source.problem}.",
                rule="`paceline lint` takes scripts, notebooks and folders, or - for standard input.",
                fix="Check the path, its permissions and its encoding.",
            )
        else:
            yield source


def _read(path: Path) -> ScriptSource:
    name, data = str(path), b""
    try:
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
        return (
            _read_notebook(name, text) if path.suffix == ".ipynb" else ScriptSource(name, text, (), encoding)
        )
    except (OSError, SyntaxError, ValueError, LookupError, TypeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        return ScriptSource(name, data.decode("latin-1"), problem=problem)


def _read_notebook(path: str, text: str) -> ScriptSource:
    lines: list[str] = []
    starts = []
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] != "code":
            continue
        starts.append(len(lines) + 1)
        source = cell["source"]
        own = ("".join(source) if isinstance(source, list) else source).splitlines()
        if own and own[0].startswith("%%"):
            own = ["" for _ in own]
        lines += [re.sub(r"\S.*", "pass", line) if _MAGIC.match(line) else line for line in own] or [""]
    return ScriptSource(path, "\n".join(lines) + "\n", tuple(starts))


def read_ignores(text: str) -> dict[int, tuple[str, ...]]:
    """Return the lines with `# paceline: ignore[PLnnn]`, and the codes; no code stands for all."""
    if "paceline:" not in text:
        return {}
    found = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and (match := _IGNORE.search(token.string)):
                found[token.start[0]] = tuple(re.findall(r"PL\d{3}", match[1] or ""))
    except (tokenize.TokenError, SyntaxError):
        pass
    return found
