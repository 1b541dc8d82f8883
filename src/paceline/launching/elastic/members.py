"""The rendezvous of a job's launchers: torch's rounds over a store, with beats beside them.

torch's `DynamicRendezvousHandler` forms the rounds (`shared_state.py` keeps its state), and a thread beats
(`members/pulse.py`). Each round has a store for its ranks, on its node number 0. While a round runs, this
launcher follows the record: it ends its ranks as soon as a node of the round is lost, and asks them to stop
together where nodes come or leave.

Launchers do not talk to each other, so they have no port of their own.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from paceline.errors import PacelineError
from paceline.launching.elastic.shared_state import SharedState
from paceline.launching.members import store as stores
from paceline.launching.members.pulse import DONE, Pulse, change_record
from paceline.launching.members.record import JobNode, Record, Terms
from paceline.launching.members.reports import explain_lost_store, explain_store, explain_wait
from paceline.launching.members.waits import Waits
from paceline.torch_seams.elastic import Rounds, fill_store

log = logging.getLogger(__name__)

_FINISH_S = 300.0  # as torchelastic's exit barrier
_PAUSE_S = 0.1
_LEFT = "it was asked to leave"


@dataclass(frozen=True)
class Formed:
    """A round that this node takes part in: its number, and its nodes in order."""

    round: int
    nodes: tuple[JobNode, ...]


class StoreRendezvous(RendezvousHandler):
    """A launcher's access to the rounds of its job.

    Attributes:
        is_elastic: whether ranks start again if the nodes change; else the loss of a node ends the job.

    Args:
        is_elastic: see above.
        on_loss: called as soon as a node of the round is lost, to end the ranks; in a thread of its own.
        hold: lets this node's ranks run until some time of the monotonic clock.
        is_asked: whether this launcher was asked to stop.
    """

    def __init__(
        self,
        job: str,
        store: stores.Store,
        terms: Terms,
        waits: Waits,
        me: JobNode,
        *,
        is_elastic: bool,
        on_loss: Callable[[], None],
        hold: Callable[[float], None],
        is_asked: Callable[[], bool],
    ) -> None:
        self._job, self._store, self._terms, self._waits, self._me = job, store, terms, waits, me
        self._on_loss, self._hold, self._is_asked = on_loss, hold, is_asked
        self.is_elastic = is_elastic
        self._changed = threading.Condition()
        self._pulse: Pulse | None = None
        self._record = Record()
        self._formed: Formed | None = None
        self._news: str | None = None
        self._lost = self._has_failed = self._has_finished = self._is_leaving = False
        self._newcomers: tuple[list[str], float] = ([], 0.0)
        self._refused: set[str] = set()
        self._beat_s = self._began_s = time.monotonic()
        self._trouble: tuple[str, float] | None = None
        self.is_meeting = True
        self.formed_round = 0

    # ---- torchelastic's interface

    def get_backend(self) -> str:
        return "c10d"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._job

    def is_closed(self) -> bool:
        return bool(self._record.ended)

    def set_closed(self) -> None:
        self._end_job("failed")

    def num_nodes_waiting(self) -> int:
        """Return 1 if the round is over, for which the agent starts its ranks again and counts no restart."""
        return int(self.is_elastic and self.news is not None)

    def next_rendezvous(self) -> RendezvousInfo:
        self._began_s, self.is_meeting = time.monotonic(), True
        if self._pulse is None:
            self._pulse = Pulse(self._store, self._me, self._waits, self)
            self._pulse.start()
            self._state = SharedState(self._store, self._me, self._terms, self._waits, self._pause)
            self._me = self._state.me
            self._rounds = Rounds(
                *(self._state.node, self._job, (self._terms.least, self._terms.most), self._waits.join_s),
                self._state,
                pause=self._pause,
                may_join=self._state.may_join,
                open_store=self._open_round_store,
            )
        # The node that becomes number 0 hosts the round's store.
        own = TCPStore(self._me.address, 0, is_master=True, wait_for_workers=False)
        self._own, self._state.me = own, replace(self._me, port=own.port)
        try:
            return self._rounds.next_rendezvous()
        except RendezvousTimeoutError:
            raise self._fail(explain_wait(self._waits, self._terms, self._record, self._me.key)) from None
        except RendezvousClosedError:
            if self._is_asked():
                raise
            if self._formed is None or self._record.ended == "done":
                raise RendezvousGracefulExitError("the job has ended without this node") from None
            raise RendezvousClosedError("another node ended the job, and reports why") from None
        except PacelineError as error:
            raise self._fail(error) from None

    def shutdown(self) -> bool:
        """End this node's part; if its ranks have not succeeded, end the job for all nodes."""
        if not self._has_finished:
            self._end_job("failed")
        self.leave()
        return True

    # ---- for the agent

    @property
    def news(self) -> str | None:
        """Why the round is over for another reason than this node's ranks; `None` if it is not."""
        with self._changed:
            self._note_silence(time.monotonic())
            return self._news

    @property
    def lost(self) -> bool:
        """Whether the round is over because a node is lost."""
        return self.news is not None and self._lost

    @property
    def has_room(self) -> bool:
        """Whether further nodes may join the round."""
        return len(self._record.numbers) < self._terms.most

    @property
    def join_s(self) -> float:
        """The longest wait for nodes that are missing."""
        return self._waits.join_s

    @property
    def detection_s(self) -> float:
        """The time after which a lost node is known to be lost."""
        return self._waits.detect_s + 3 * self._waits.beat_s

    def await_news(self, seconds: float) -> bool:
        """Wait until the round is over for another reason than this node's ranks; return whether it is."""
        end_s = time.monotonic() + seconds
        with self._changed:
            while True:
                self._note_silence(time.monotonic(), is_failing=True)
                is_over = self._news or self._record.ended or self._is_asked()
                if is_over or time.monotonic() >= end_s:
                    return self._news is not None
                self._changed.wait(_PAUSE_S)

    def announce_leave(self) -> None:
        """Announce that this node leaves; its ranks may still take part in a last step of all."""
        if self._is_leaving or self._pulse is None:
            return
        self._is_leaving = True
        ends = self._holds_store()

        def change(record: Record) -> bool:
            if self._me.key in record.numbers and self._me.key not in record.leaving:
                record.leaving.append(self._me.key)
            if self._me.key in record.expected:
                record.expected.remove(self._me.key)
            record.ended = "left" if ends and len(record.nodes) > 1 else record.ended
            return True

        self._change(change)

    def finish(self) -> None:
        """Wait until the ranks of the other nodes have succeeded too, or their nodes are lost."""
        assert self._pulse is not None
        self._has_finished = self._pulse.has_finished = True
        end_s = time.monotonic() + _FINISH_S
        while not (self._record.ended or self.lost or self._is_asked()) and time.monotonic() < end_s:
            if self._have_all_finished():
                self._end_job("done")
                return
            time.sleep(self._waits.beat_s / 2)

    # ---- the end

    def _have_all_finished(self) -> bool:
        keys = [key for key in self._record.numbers if key != self._me.key]
        try:
            return all((beat or b"").endswith(DONE.encode()) for beat in self._store.read_beats(keys))
        except stores.StoreError:
            return False

    def _end_job(self, how: str) -> None:
        def change(record: Record) -> bool:
            is_new = not record.ended and self._me.key in record.nodes
            record.ended = how if is_new else record.ended
            return is_new

        self._change(change)

    def leave(self) -> None:
        """Take this node out of the record; the node with the store waits until the others have read it."""

        def change(record: Record) -> bool:
            if self._me.key in record.nodes:
                record.remove(self._me.key, _LEFT, is_lost=False)
                return True
            return False

        if self._pulse is None:
            return
        self._pulse.end()
        self._change(change)
        end_s = time.monotonic() + self._waits.detect_s
        while self._holds_store() and self._record.nodes and time.monotonic() < end_s:
            time.sleep(self._waits.beat_s / 2)
            self._change(lambda record: False)

    def _change(self, change: Callable[[Record], bool]) -> None:
        """Change the record if the store answers soon; the store may keep a call waiting."""

        def note(record: Record) -> bool:
            has_changed = change(record)
            self._record = record
            return has_changed

        def work() -> None:
            try:
                change_record(self._store, note)
            except stores.StoreError as error:
                log.debug("the record was not changed: %s", error)

        if self._pulse is not None:
            thread = threading.Thread(target=work, name="paceline-record", daemon=True)
            thread.start()
            thread.join(self._waits.detect_s)

    def _holds_store(self) -> bool:
        return bool(getattr(self._store, "is_host", False))

    # ---- meeting

    def _pause(self, trouble: stores.StoreError | None = None) -> None:
        """Wait for a moment for other nodes, or for the store.

        Raises:
            RendezvousClosedError: this launcher was asked to stop.
        """
        if self._is_asked():
            raise RendezvousClosedError
        waited_s = time.monotonic() - self._began_s
        if trouble is not None:
            name = self._store.name
            is_lost = hasattr(self._store, "is_host") and self.formed_round > 0
            if is_lost and (trouble.is_final or waited_s > self._waits.detect_s):
                raise explain_lost_store(name, str(trouble))
            if trouble.is_final or waited_s > self._waits.join_s:
                raise explain_store(name, str(trouble), None if trouble.is_final else self._waits.join_s)
        time.sleep(_PAUSE_S)

    def _fail(self, error: PacelineError) -> PacelineError:
        if error.exit_code == 2 and self.formed_round > 0:
            error.exit_code = 1
        return error

    def _open_round_store(self) -> tuple[Store, TCPStore | None]:
        """Note the round that was formed; return what torch's agents exchange, and its store if that is here.

        The record has all of it, so no launcher waits for another one, which may be lost meanwhile.
        """
        record = self._state.record
        formed = Formed(record.round, tuple(record.members))
        first = formed.nodes[0]
        with self._changed:
            self._formed, self._news, self._lost = formed, None, False
            self._record, self._newcomers = record, ([], 0.0)
            self.formed_round, self.is_meeting = formed.round, False
        self._report(formed)
        server = self._own if first.key == self._me.key else None
        del self._own
        ranks = [(node.role, node.nproc) for node in formed.nodes]
        return fill_store((first.address, first.port), ranks), server

    def _report(self, formed: Formed) -> None:
        count = len(formed.nodes)
        number = [node.key for node in formed.nodes].index(self._me.key)
        names = ", ".join(map(str, formed.nodes))
        log.info(
            "round %d on %d node%s: %s; this one is number %d",
            *(formed.round, count, "" if count == 1 else "s", names, number),
        )
        for node in formed.nodes if number == 0 else ():
            if node.nproc != self._me.nproc:
                log.warning(
                    "%s starts %d rank%s and this node %d (--nproc-per-node): the layout must fit their sum",
                    *(node, node.nproc, "" if node.nproc == 1 else "s", self._me.nproc),
                )
            if node.folder != self._me.folder:
                log.warning(
                    "%s has a working folder of its own: what a script saves there is lost with that node. "
                    "Ranks that find no file of a run that has saved must fail, and not begin anew "
                    "(docs/run.md)",
                    node,
                )

    # ---- called in the thread of the beats

    def heard(self, record: Record, sent_s: float) -> None:
        """Follow the record: find out whether the round is over."""
        with self._changed:
            self._note_silence(sent_s)
            self._beat_s, self._trouble = sent_s, None
            self._hold(sent_s + self._waits.held_s)
            self._record = record
            formed = self._formed
            if formed is not None and not self.is_meeting and self._news is None and not record.ended:
                self._compare(formed, record, sent_s)
            self._changed.notify_all()
        for name in (
            record.refused.keys() - self._refused
            if self._pulse is not None and self._pulse.is_leading
            else ()
        ):
            log.warning("%s was refused: %s", name, record.refused[name])
        self._refused |= record.refused.keys()

    def missed(self, trouble: str) -> None:
        """Note that the store does not answer."""
        with self._changed:
            self._trouble = self._trouble or (trouble, time.monotonic())

    def _compare(self, formed: Formed, record: Record, now: float) -> None:
        if record.round != formed.round or self._me.key not in record.numbers:
            if not self._is_leaving:
                self._end_round("other nodes have gone on without this one", lost=True)
            return
        keys = {node.key for node in formed.nodes}
        newcomers = [key for key in record.waiting if key not in keys]
        if newcomers != self._newcomers[0]:
            self._newcomers = (newcomers, now)
        has_begun = False
        for node in formed.nodes:
            why = record.gone.get(node.key, ("", ""))[1]
            if node.key in record.leaving and node.key != self._me.key:
                self._end_round(f"{node} left: {_LEFT}")
            elif node.key not in record.numbers and why not in ("", DONE):
                self._end_round(f"{node} {'left' if why == _LEFT else 'is lost'}: {why}", lost=why != _LEFT)
            has_begun |= node.key not in record.numbers and not why
        # Several that come together join at once.
        if newcomers and (has_begun or now >= self._newcomers[1] + 2 * self._waits.beat_s):
            names = ", ".join(str(record.nodes[key]) for key in newcomers)
            self._end_round(f"{names} {'joins' if len(newcomers) == 1 else 'join'}")
        elif has_begun:
            self._end_round("the ranks of another node failed")

    def _note_silence(self, now: float, *, is_failing: bool = False) -> None:
        """End the round if the store has been silent for so long that the ranks are ended.

        If ranks fail, a lost store is a reason for it much sooner.
        """
        if self.is_meeting or self._news is not None or self._pulse is None:
            return
        name = self._store.name
        if now - self._beat_s > self._waits.held_s:
            why = f": {self._trouble[0]}" if self._trouble else ""
            text = f"no beat of this node reached the store {name} for {now - self._beat_s:.0f} s{why}"
            self._end_round(text, lost=True)
        elif is_failing and self._trouble and now - self._trouble[1] > self._waits.detect_s / 2:
            self._end_round(f"the store {name} does not answer: {self._trouble[0]}", lost=True)

    def _end_round(self, reason: str, *, lost: bool = False) -> None:
        self._news, self._lost = self._news or reason, self._lost or lost
        self._changed.notify_all()
        if lost:
            # Ranks of a world that has lost a node can only wait.
            threading.Thread(target=self._on_loss, name="paceline-loss", daemon=True).start()


def build_node(address: str, nproc: int, role: str, folder: str) -> JobNode:
    """Return this launcher, as the others know it."""
    return JobNode(secrets.token_hex(8), socket.gethostname(), address, nproc=nproc, role=role, folder=folder)
