"""A witness records each round outside of the nodes, so that only one of two disconnected parts can go on.

Entries are numbered from 1 without gaps; the first launcher to append a number wins it. A leader appends the
next world before it commits it. `etcd.py` and `shared_folder.py` implement witnesses, and `open_witness.py`
opens them. `WitnessThread` calls them, so that the thread that sends beats never waits for them.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from paceline.launching.members.world import Member, NodeWorld, world_from_json, world_to_json

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_AGAIN_S = 0.5
_END_S = 3.0


class WitnessError(Exception):
    """Raised if a witness cannot be reached, or gives an invalid answer.

    Attributes:
        is_final: whether it is something else than a witness, so that asking again does not help.
    """

    def __init__(self, text: str, *, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_final = is_final


@dataclass(frozen=True)
class Entry:
    """One record of a witness.

    Attributes:
        number: counts from 1.
        world: the members of that round.
        is_final: whether the job ended with this world.
    """

    number: int
    world: NodeWorld
    is_final: bool = False


class Witness(Protocol):
    """The record of one job; every method may wait for seconds, and raises `WitnessError`."""

    @property
    def name(self) -> str:
        """The place, as the user named it."""

    def read(self) -> Entry | None:
        """Return the last entry, `None` if there is none."""

    def append(self, entry: Entry) -> bool:
        """Append an entry; return False if its number has been taken."""

    def register(self, member: Member) -> None:
        """Make this launcher findable by the others of the job."""

    def unregister(self, member: Member) -> None:
        """Undo `register`."""

    def list_launchers(self) -> list[Member]:
        """Return the launchers that have registered, dead ones too."""


class WitnessListener(Protocol):
    """The part of a launcher that receives a witness's answers; called in the thread that sends beats."""

    def heard_witness(self, last: Entry | None, launchers: list[Member], now: float) -> None:
        """Take note of the last entry."""

    def recorded(self, last: Entry, now: float) -> None:
        """Take note of the last entry after `append`: this launcher's own, if it was the first."""


class WitnessLine(Protocol):
    """The requests to a witness, as a launcher calls them; they do not block."""

    @property
    def trouble(self) -> str:
        """The reason why the witness does not answer; empty if it does."""

    @property
    def is_wrong(self) -> bool:
        """Whether it has never answered, and is no witness."""

    def read(self) -> None:
        """Ask for the last entry; `heard_witness` is called with it."""

    def append(self, entry: Entry) -> None:
        """Append an entry; `recorded` is called when the witness has answered."""


class WitnessThread:
    """The thread that sends a launcher's requests to its witness, one at a time.

    Args:
        witness: receives the requests.
        me: this launcher.
        post: calls a function in the thread that beats.
    """

    def __init__(self, witness: Witness, me: Member, post: Callable[[Callable[[], None]], None]) -> None:
        self._witness, self._me, self._post = witness, me, post
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_ending = threading.Event()
        self._is_registered = False
        self.trouble, self.is_wrong = "", False
        self._thread = threading.Thread(target=self._run, name="paceline-witness", daemon=True)

    def start(self, listener: WitnessListener) -> None:
        """Start the thread."""
        self._listener = listener
        self._thread.start()

    def read(self) -> None:
        self._requests.put(self._read)

    def append(self, entry: Entry) -> None:
        self._requests.put(lambda: self._append(entry))

    def end(self) -> None:
        """Finish pending requests, waiting at most `_END_S` seconds, and end the thread."""
        self._is_ending.set()
        self._requests.put(None)
        self._thread.join(_END_S)

    # ---- the thread

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            request()
        if self._is_registered:
            self._try(lambda: self._witness.unregister(self._me))

    def _read(self) -> None:
        found = self._try(self._look)
        if found is not None:
            last, launchers = found
            self._post(lambda: self._listener.heard_witness(last, launchers, time.monotonic()))

    def _look(self) -> tuple[Entry | None, list[Member]]:
        if not self._is_registered:
            self._witness.register(self._me)
            self._is_registered = True
        return self._witness.read(), self._witness.list_launchers()

    def _append(self, entry: Entry) -> None:
        last = self._try(lambda: self._append_once(entry))
        while last is None and not self._is_ending.wait(_AGAIN_S):
            last = self._try(lambda: self._append_once(entry))
        if last is not None:
            self._post(lambda: self._listener.recorded(last, time.monotonic()))

    def _append_once(self, entry: Entry) -> Entry | None:
        # If an answer was lost, the second try finds its own entry as the last one.
        return entry if self._witness.append(entry) else self._witness.read()

    def _try(self, call: Callable[[], _T]) -> _T | None:
        try:
            found = call()
        except WitnessError as error:
            self.is_wrong = error.is_final and not self._is_registered
            if not self.trouble and not self.is_wrong:
                log.warning(
                    "the witness %s does not answer: %s; training continues, and no new round begins",
                    *(self._witness.name, error),
                )
            self.trouble = str(error)
            return None
        if self.trouble:
            log.info("the witness %s answers again", self._witness.name)
        self.trouble = ""
        return found


def entry_to_text(entry: Entry) -> str:
    """Return an entry as a witness stores it."""
    return json.dumps(
        {"number": entry.number, "world": world_to_json(entry.world), "is_final": entry.is_final}
    )


def entry_from_text(text: str | bytes) -> Entry:
    """Parse the text of `entry_to_text`.

    Raises:
        WitnessError: it is something else.
    """
    try:
        value = json.loads(text)
        world = world_from_json(value["world"])
        if world is None:
            raise ValueError("no world")
        return Entry(int(value["number"]), world, bool(value["is_final"]))
    except (ValueError, KeyError, TypeError) as error:
        raise WitnessError(f"the stored value is not an entry of Paceline ({error})") from None


def member_to_text(member: Member) -> str:
    """Return a launcher as a witness stores it."""
    return json.dumps(asdict(member))


def member_from_text(text: str | bytes) -> Member:
    """Parse the text of `member_to_text`.

    Raises:
        WitnessError: it is something else.
    """
    try:
        return Member(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise WitnessError(f"the stored value is not a launcher of Paceline ({error})") from None
