"""Follows the files that `torch.save` and `torch.load` open, and states of random numbers that are set."""

from __future__ import annotations

import os
import pickletools
import socket
import sys
import time
import zipfile
import zlib
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.own_code import is_own
from paceline.torch_seams.flight import read_status
from paceline.torch_seams.observing import read_default_group
from paceline.watch.rank.first_not_finite import Gradients
from paceline.watch.rank.sentinels.outbox import Outbox
from paceline.watch.rank.threads import Mark, mark_stack

_MANY_USES = 8
_MANY_FILES = 256
_PACKAGE = str(Path(__file__).resolve().parents[3]) + os.sep


class Files:
    """The files that ranks of this node may have in common.

    Attributes:
        saved: the paths that were written, with the stack that did it last.
    """

    def __init__(self, torch: Any, gradients: Gradients, outbox: Outbox) -> None:
        self.saved: dict[str, tuple[Mark, ...]] = {}
        self._loaded: set[str] = set()
        self._torch = torch
        self._gradients = gradients
        self._outbox = outbox
        self._uses: dict[str, deque[list[Any]]] = {}
        self._times: Counter[str] = Counter()
        # Those of groups that are gone count too, and ranks may have been in others.
        self._before = count_collectives()

    def note_save(self, opener: Any, name: Any, *rest: Any) -> None:
        """Take note of a file that is about to be written."""
        self._note("save", name)

    def note_load(self, opener: Any, name: Any, mode: str, *rest: Any) -> None:
        """Take note of a file that is about to be read or written."""
        self._note("save" if "w" in mode else "load", name)

    def _note(self, what: str, name: Any) -> None:
        if not isinstance(name, str | os.PathLike):
            return
        path = os.path.realpath(name)
        if path.startswith(("/dev/", "/proc/")):
            return
        if len(self._uses) > _MANY_FILES:
            self._uses.clear()
        uses = self._uses.setdefault(path, deque(maxlen=_MANY_USES))
        marks = mark_stack(sys._getframe(3))
        if what == "save":
            self.saved[path] = marks
        else:
            self._loaded.add(path)
        place = zlib.crc32(repr([(code.co_filename, code.co_name, at) for code, at in marks]).encode())
        is_over = what == "save" and os.path.exists(path)
        num_since = count_collectives() - self._before if self._before >= 0 else -1
        uses.append([what, self._gradients.passes, num_since, time.time(), place, is_over])
        values = {"path": path, "uses": [list(use) for use in uses]}
        # Other nodes may have another file of this name.
        self._outbox.put("file", f"{socket.gethostname()} {path}", (), self._gradients.passes, marks, values)

    def end(self, wrapped: list[set[str]]) -> None:
        """Send which of the latest files have the keys of a wrapper, and were not read again.

        Args:
            wrapped: the names of the parameters of each DDP module.
        """
        unread = [path for path in self.saved if path not in self._loaded] if wrapped else []
        for path in unread[-_MANY_USES:]:
            with (
                suppress(OSError, zipfile.BadZipFile, StopIteration, ValueError),
                zipfile.ZipFile(path) as file,
            ):
                name = next(one for one in file.namelist() if one.endswith("data.pkl"))
                words = {word for _, word, _ in pickletools.genops(file.read(name)) if isinstance(word, str)}
                if any(names and names <= words for names in wrapped):
                    self._outbox.put("keys", path, (), self._gradients.passes, self.saved[path], {})

    def note_random_state(self, state: Any, *rest: Any) -> None:
        """Take note of a state of random numbers that the script sets."""
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        group = read_default_group()
        # A library sets states for its own purposes.
        if group is None or frame is None or not is_own(frame.f_code.co_filename):
            return
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        self._times[place] += 1
        values = {
            "seed": self._torch.initial_seed(),
            "before": zlib.crc32(self._torch.get_rng_state().numpy().tobytes()),
            "after": zlib.crc32(state.numpy().tobytes()),
        }
        event = f"{place} {self._times[place]}"
        self._outbox.put("random", event, group[1], self._gradients.passes, mark_stack(frame), values)


def count_collectives() -> int:
    """Return how many collectives this rank has issued in all groups; -1 if that is not known."""
    with suppress(Exception):
        return sum(status.issued for status in read_status().values())
    return -1
