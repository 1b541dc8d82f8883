"""Serves all commands: reliable standard streams, tables, and the flags of recipes.

A shell may start a command with a closed stream (`>&-`). A terminal's encoding may lack a character of a file
name. A file may be on a full disk.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.errors import PacelineError


class _Output(io.FileIO):
    """Standard output whose failure has a code; if the reader has gone, it still raises a
    `BrokenPipeError`."""

    def write(self, data: Any, /) -> int:
        """Write some of the bytes, and return how many."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            raise
        except OSError as error:
            raise PacelineError(
                "PL603",
                saw=f"standard output cannot be written: {error.strerror}.",
                rule="A command prints its result there.",
                fix="Send it to a terminal, or to a file on a disk with free space.",
            ) from None


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Make `sys.stdout` and `sys.stderr` accept whatever a command prints while the block runs."""
    _open_closed()
    before = sys.stdout, sys.stderr
    if sys.stdout is None or sys.stdout is sys.__stdout__:  # Nothing else, such as a test, has replaced it.
        old = sys.stdout
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Output(1, "w", closefd=False)),
            encoding="utf-8" if old is None else old.encoding,
            errors="backslashreplace",
            line_buffering=old is not None and old.line_buffering,
        )
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, PacelineError):
            sys.stdout.flush()
        sys.stdout, sys.stderr = before


def format_rows(rows: Sequence[Sequence[str]], *, to_left: bool = False) -> str:
    """Return rows of cells as aligned columns; the first one to the left, the others too or to the right."""
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    align = str.ljust if to_left else str.rjust
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(align, row[1:], widths[1:])]).rstrip() for row in rows
    )


def add_recipe_flags(parser: argparse.ArgumentParser, example: str, *, has_vocab: bool = False) -> None:
    """Add `--set`, `--json`, and for plans `--vocab-size`, of a command that takes a recipe."""
    if has_vocab:
        parser.add_argument(
            "--vocab-size", type=int, metavar="N", help="token ids, if data.tokenizer is a file of your own"
        )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help=f"overrides a key of the recipe, for example {example}; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")


def forget_output() -> None:
    """Discard standard output: what waits to be written, and all that follows."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _open_closed() -> None:
    """Open the closed streams, so that no file of a run gets the descriptor of a standard stream."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
