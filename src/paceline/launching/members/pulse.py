"""The beats of a launcher, and its judgement of the others' beats.

1. Each launcher writes a new value as its beat at every turn, and reads the record.
2. In a small round, each launcher reads the beats of all others; in a large one, the first node does, and the
   others read its beat. Nodes outside of the round read all. Only changes count, by the reader's own clock,
   so clocks may differ.
3. A node is lost if its beat has not changed for `detect_s`. Whoever sees that removes it from the record,
   which ends the round for all others. The store takes one such change at a time.

Two worlds never both train. Every step needs the ranks of all nodes of a round, and a node of the round that
ends it has ended its own ranks before the next round begins. A node outside of the round has no such ranks:
it waits for `lease_s`, and by then the ranks of a node that cannot store its beats have been killed
(`Waits.held_s`), by a process that does not need its launcher.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from paceline.launching.members.record import JobNode, Record, from_text, to_text
from paceline.launching.members.store import Store, StoreError
from paceline.launching.members.waits import Waits

log = logging.getLogger(__name__)

# A node that trained for this long in a round was not lost for a fault of its own.
_STEADY_S = 600.0
# In larger rounds, launchers would read too many beats.
_SMALL = 8
DONE = "done"


class RecordListener(Protocol):
    """The part of a launcher that follows the record; called in the thread of the beats."""

    @property
    def formed_round(self) -> int:
        """The last round that this node took part in; 0 for none."""

    @property
    def is_meeting(self) -> bool:
        """Whether this node's ranks have ended, and it waits for a round."""

    def heard(self, record: Record, sent_s: float) -> None:
        """Take note of the record, and of the time just before the beat that was stored."""

    def missed(self, trouble: str) -> None:
        """Take note that the store does not answer."""


class Pulse:
    """The beats of one launcher.

    Attributes:
        has_finished: whether this node's ranks have succeeded, which the beat tells.
        is_leading: whether this launcher watches the beats of all others.

    Args:
        listener: follows the record.
    """

    def __init__(self, store: Store, me: JobNode, waits: Waits, listener: RecordListener) -> None:
        self._store, self._me, self._waits, self._listener = store, me, waits, listener
        self._count = 0
        self._seen: dict[str, tuple[bytes | None, float]] = {}
        self._judged_s = 0.0
        self._since: tuple[int, float] = (0, 0.0)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-beats", daemon=True)
        self.has_finished = self.is_leading = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """End the thread, unless the store keeps it waiting."""
        self._ends.set()
        self._thread.join(self._waits.beat_s)

    def turn(self, now: float) -> None:
        """Beat once, and read the record.

        Raises:
            StoreError: the store does not answer, or holds something else.
        """
        self._count += 1
        self._store.beat(self._me.key, f"{self._count} {DONE}" if self.has_finished else f"{self._count}")
        text = self._store.read()
        record = read_record(text)
        self._judge(record, text, now)
        self._listener.heard(record, now)

    def _run(self) -> None:
        has_trouble = False
        while not self._ends.is_set():
            began_s = time.monotonic()
            try:
                self.turn(began_s)
                if has_trouble:
                    log.info("the store %s answers again", self._store.name)
                has_trouble = False
            except StoreError as error:
                if not has_trouble and not self._ends.is_set():
                    log.warning("the store %s does not answer: %s", self._store.name, error)
                has_trouble = True
                self._listener.missed(str(error))
            except Exception:
                # The thread must not die silently: without it, this node would be lost to the others.
                log.exception("an error in the exchange with the other nodes")
            self._ends.wait(max(0.0, began_s + self._waits.beat_s - time.monotonic()))

    def _judge(self, record: Record, text: bytes | None, now: float) -> None:
        """Remove nodes from the record whose beats have not changed for too long."""
        gap_s = now - self._judged_s
        self._judged_s = now
        if gap_s > self._waits.detect_s / 2:
            # Others may have beaten meanwhile: this launcher stood still, or the store did.
            self._seen = {key: (value, now) for key, (value, _) in self._seen.items()}
        if record.is_complete and self._since[0] != record.round:
            self._since = (record.round, now)
        others = self._choose(record)
        for key, value in zip(others, self._store.read_beats(others), strict=True):
            if self._seen.get(key, (b"", 0.0))[0] != value or key not in self._seen:
                self._seen[key] = (value, now)
        self._seen = {key: self._seen[key] for key in others}
        lost = {
            key: limit_s
            for key in others
            if now - self._seen[key][1] > (limit_s := self._find_limit(record, key))
        }
        if not lost:
            return
        is_steady = record.is_complete and now - self._since[1] > _STEADY_S
        for key, limit_s in lost.items():
            is_done = (self._seen[key][0] or b"").endswith(DONE.encode())
            why = DONE if is_done else f"no beat for {limit_s:g} s"
            record.remove(key, why, is_lost=not is_done, is_steady=is_steady)
        record.number += 1
        if self._store.replace(record.number, text, to_text(record)):
            for key in lost:
                self._store.end_beats(key)

    def _choose(self, record: Record) -> list[str]:
        """Return the launchers whose beats this one reads."""
        order = [node.key for node in record.members]
        order += [*record.waiting, *record.spares]
        is_outside = self._me.key not in record.numbers
        self.is_leading = bool(order) and order[0] == self._me.key
        reads_all = self.is_leading or is_outside or len(order) <= _SMALL
        chosen = order if reads_all else order[:1]
        return [key for key in chosen if key != self._me.key]

    def _find_limit(self, record: Record, key: str) -> float:
        """Return for how long a launcher's beat may stay the same."""
        was_in = self._listener.formed_round == record.round
        was_in &= self._me.key in record.numbers or self._listener.is_meeting
        is_running = record.is_complete and key in record.numbers
        return self._waits.lease_s if is_running and not was_in else self._waits.detect_s


def read_record(text: bytes | None) -> Record:
    """Parse the text of a store; without one, a new job's record.

    Raises:
        StoreError: it is something else.
    """
    try:
        return Record() if text is None else from_text(text)
    except ValueError as error:
        raise StoreError(str(error)) from None


def change_record(store: Store, change: Callable[[Record], bool]) -> None:
    """Change the record, however often another launcher is faster; `change` returns whether to write.

    Raises:
        StoreError: the store does not answer.
    """
    while True:
        text = store.read()
        record = read_record(text)
        if not change(record):
            return
        record.number += 1
        if store.replace(record.number, text, to_text(record)):
            return
