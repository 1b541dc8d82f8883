"""The state of torch's rendezvous, kept in a job's store: torch decides who takes part."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeVar

from paceline.launching.members.pulse import read_record
from paceline.launching.members.record import JobNode, Record, Terms, to_text
from paceline.launching.members.reports import explain_refusal, find_hold_s
from paceline.launching.members.store import Store, StoreError
from paceline.launching.members.waits import Waits
from paceline.torch_seams.elastic import RoundState, RoundStateHolder

log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, order=True)
class RoundNode:
    """A node as torch's rendezvous sorts and names it: those of earlier rounds come first."""

    since: int
    addr: str
    local_id: str
    pid: int = 0


class Pause(Protocol):
    """Waits for a moment before the next reading; raises an error if there is no point in it."""

    def __call__(self, trouble: StoreError | None = None) -> None: ...


class SharedState(RoundStateHolder):
    """The state of one job's rendezvous.

    Attributes:
        me: this launcher; its `port` belongs to the round that it waits for.
        record: the latest record that was read or written.

    Args:
        pause: waits between two readings.
    """

    def __init__(self, store: Store, me: JobNode, terms: Terms, waits: Waits, pause: Pause) -> None:
        self._store, self.me, self._terms, self._waits, self._pause = store, me, terms, waits, pause
        self._text: bytes | None = None
        self._state = RoundState()
        self._is_dirty = self._has_joined = False
        self._enough: tuple[set[str], float] = (set(), 0.0)
        self._held_until_s: float | None = None
        self.record = Record()
        self._load()
        # Nodes that are there already keep their places before this one.
        self.me = replace(me, since=self.record.round + int(self.record.is_complete))

    @property
    def node(self) -> RoundNode:
        """This node, for torch."""
        return _to_node(self.me)

    @property
    def state(self) -> RoundState:
        """The state, as torch reads and changes it."""
        return self._state

    def mark_dirty(self) -> None:
        """Take note that torch has changed the state."""
        self._is_dirty = True

    def sync(self) -> bool | None:
        """Write the changed state, or read it; return whether the change was written."""
        has_set = None
        if self._is_dirty:
            self._is_dirty = False
            changed = self._merge()
            has_set = self._try(lambda: self._store.replace(changed.number, self._text, to_text(changed)))
            self._has_joined |= has_set
        self._load()
        self._refuse_other_terms()
        self._state = self._build_state()
        return has_set

    def may_join(self) -> bool:
        """Return whether this node may ask for the next round; one that was lost often waits first."""
        now = time.monotonic()
        if self._held_until_s is None:
            losses = self.record.losses.get(str(self.me), 0)
            hold_s = find_hold_s(losses)
            if hold_s:
                log.warning("this node was lost %d times: it joins the job again in %g s", losses, hold_s)
            self._held_until_s = now + hold_s
        if now < self._held_until_s:
            return False
        self._held_until_s = None
        return True

    # ---- reading

    def _try(self, call: Callable[[], _T]) -> _T:
        while True:
            try:
                return call()
            except StoreError as error:
                self._pause(error)

    def _load(self) -> None:
        """Read the record. One that an ended job has left begins a new job, once its nodes have gone."""

        def read() -> tuple[bytes | None, Record]:
            text = self._store.read()
            return text, read_record(text)

        while True:
            self._text, self.record = self._try(read)
            # It may have joined by a change whose answer was lost.
            if not self.record.ended or self._has_joined or self.me.key in self.record.nodes:
                return
            if not self.record.nodes:
                self.record.ended, self.record.expected = "", []
                return
            self._pause()

    def _refuse_other_terms(self) -> None:
        record = self.record
        if not any(key != self.me.key for key in record.nodes) or self.me.key in record.numbers:
            return
        text = self._terms.compare(record.terms)
        if not text:
            return
        noted = copy.deepcopy(record)
        noted.refused[str(self.me)] = text
        noted.number += 1
        self._try(lambda: self._store.replace(noted.number, self._text, to_text(noted)))
        raise explain_refusal(text)

    def _build_state(self) -> RoundState:
        record = self.record
        state: Any = RoundState()
        nodes = {key: _to_node(node) for key, node in record.nodes.items()}
        state.round, state.complete, state.closed = record.round, record.is_complete, bool(record.ended)
        state.participants = {nodes[key]: number for key, number in record.numbers.items()}
        state.wait_list = {nodes[key] for key in record.waiting}
        state.redundancy_list = {nodes[key] for key in record.spares}
        # Launchers beat in another place (`pulse.py`), which also removes the nodes that do not.
        now = datetime.now(UTC)
        state.last_heartbeats = {node: now + timedelta(days=1) for node in nodes.values()}
        state.deadline = self._find_deadline(now)
        found: RoundState = state
        return found

    def _find_deadline(self, now: datetime) -> datetime | None:
        """Return when the round is complete if no further node comes; `None` with too few nodes."""
        record, now_s = self.record, time.monotonic()
        here = set(record.numbers)
        if record.is_complete or len(here) < self._terms.least:
            self._enough = (set(), now_s)
            return None
        if self._enough[0] != here:
            self._enough = (here, now_s)
        others = {*record.expected, *record.waiting, *record.spares}
        wait_s = self._waits.detect_s if record.expected else self._waits.first_call_s
        if record.expected and others <= here:
            wait_s = 0.0
        return now + timedelta(seconds=self._enough[1] + wait_s - now_s - 0.001)

    # ---- writing

    def _merge(self) -> Record:
        """Return the record with the state that torch has changed."""
        state: Any = self._state
        record = copy.deepcopy(self.record)
        if not record.nodes and self.me.key not in record.expected:  # the job begins, or begins anew
            record.terms, record.losses, record.refused, record.gone = self._terms, {}, {}, {}
            record.expected = []
        record.number += 1
        was_complete = record.is_complete
        record.round, record.is_complete = state.round, state.complete
        record.numbers = {node.local_id: number for node, number in state.participants.items()}
        record.waiting = sorted(node.local_id for node in state.wait_list)
        record.spares = sorted(node.local_id for node in state.redundancy_list)
        known = record.nodes | {self.me.key: self.me}
        named = {*record.numbers, *record.waiting, *record.spares}
        record.nodes = {key: node for key, node in known.items() if key in named}
        if state.complete and not was_complete:
            record.expected = sorted(record.numbers)
            names = {str(node) for node in record.members}
            record.gone = {key: entry for key, entry in record.gone.items() if entry[0] not in names}
        record.leaving = [key for key in record.leaving if key in record.numbers]
        return record


def _to_node(node: JobNode) -> RoundNode:
    return RoundNode(node.since, node.address, node.key)
