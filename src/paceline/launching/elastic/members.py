"""The rendezvous of a job's launchers, on top of `members`: torchelastic's interface to their rounds.

torch's own rendezvous keeps its state in one store on the node of the endpoint, and the job ends with that
node. It also compares the clocks of different nodes. Here the launchers agree among themselves
(`members/membership.py`). Each round has a store of its own, on its node number 0.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from paceline.errors import PacelineError
from paceline.launching.members.membership import Membership
from paceline.launching.members.note import find_note
from paceline.launching.members.records import Address, Message, Terms
from paceline.launching.members.wire import Wire, listen
from paceline.launching.members.witness import Witness, WitnessThread
from paceline.launching.members.world import Member, NodeWorld, Waits

log = logging.getLogger(__name__)

_FINISH_S = 300.0  # as torchelastic's exit barrier
_STORE_S = 20.0


class MembersRendezvous(RendezvousHandler):
    """A launcher's access to the rounds of its job.

    Args:
        terms: of the job.
        waits: all waits.
        address: of this node, as the others reach it.
        endpoints: where launchers ask for the job.
        own: the endpoint that is this node's; with the first one, it begins the job if nobody knows of it.
            Without endpoints, launchers find each other through the witness, and any may begin the job.
        witness: the record of the rounds, or None.
        is_elastic: whether ranks start again if the nodes change; else the loss of a node ends the job.
        on_loss: called as soon as a node of the round is lost, to end the ranks; in a thread of its own.
        is_asked: whether this launcher was asked to stop.
    """

    def __init__(
        self,
        terms: Terms,
        waits: Waits,
        address: str,
        endpoints: list[Address],
        *,
        own: Address | None,
        is_elastic: bool,
        on_loss: Callable[[], None],
        is_asked: Callable[[], bool],
        witness: Witness | None = None,
    ) -> None:
        self._terms, self._waits, self._address = terms, waits, address
        self._on_loss, self._is_asked = on_loss, is_asked
        self.is_elastic = is_elastic
        self._changed = threading.Condition()
        self._formed: NodeWorld | None = None
        self._error: PacelineError | None = None
        self._is_closed = self._has_failed = self._has_finished = False
        self._has_trained = self._has_warned = self._has_warned_of_twins = False
        self._store: TCPStore | None = None
        self.news: str | None = None
        self.lost = False
        listener, has_own = _listen(address, own)
        founds = own == endpoints[0] and has_own if endpoints else True
        self._taken = own if own is not None and not has_own else None
        self._note = find_note(terms, endpoints[0]) if founds and endpoints and witness is None else None
        noted = None if self._note is None else self._note.read()
        if noted is not None and self._note is not None:
            names = ", ".join(map(str, noted.members))
            log.info(
                "this job was started here before: its round %d had %s (%s); it goes on when these answer or "
                "are known to have ended",
                *(noted.round, names, self._note.path),
            )
        port = listener.getsockname()[1]
        self._me = Member(secrets.token_hex(8), socket.gethostname(), address, port)
        self._wire = Wire(listener, waits.beat_s / 5)
        self._witness = None if witness is None else WitnessThread(witness, self._me, self._wire.post)
        self._membership = Membership(
            *(self._me, terms, waits, self._wire, self, time.monotonic()),
            endpoints=endpoints,
            founds=founds,
            witness=self._witness,
            noted=noted,
        )
        if self._witness is not None:
            self._witness.start(self._membership)
        self._wire.start(self._membership)

    # ---- torchelastic's interface

    def get_backend(self) -> str:
        return "c10d"

    @property
    def use_agent_store(self) -> bool:
        return shares_store()

    def get_run_id(self) -> str:
        return self._terms.job

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._wire.post(self._membership.close)

    def num_nodes_waiting(self) -> int:
        """Return 1 if the round is over, for which the agent starts its ranks again and counts no restart."""
        return int(self.is_elastic and self.news is not None and not self._is_closed)

    def next_rendezvous(self) -> RendezvousInfo:
        # The node that becomes number 0 hosts the round's store.
        timeout = timedelta(seconds=_STORE_S)
        own = TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        offer: Message = {"store_port": own.port, "master_port": own.port}
        if not self.use_agent_store:
            offer["master_port"] = find_free_port()
        world = self._await_world(offer)
        if self._note is not None:
            self._note.write(world)
        first, number = world.members[0], world.find(self._me.key)
        if number == 0:
            self._store = own
        else:
            del own
            self._store = TCPStore(
                first.address, world.store_port, is_master=False, wait_for_workers=False, timeout=timeout
            )
        where = RendezvousStoreInfo(first.address, world.master_port)
        store = PrefixStore(f"torchelastic/{world.round}", self._store)
        return RendezvousInfo(store, number, len(world.members), where)

    def shutdown(self) -> bool:
        """End this node's part; if its ranks have not succeeded, end the job for all nodes."""
        self._wire.post(self._membership.leave if self._has_finished else self._membership.close)
        self._end()
        return True

    # ---- for the agent

    def announce_leave(self) -> None:
        """Announce that this node leaves; its ranks may still take part in a last step of all."""
        self._wire.post(self._membership.leave)

    def leave(self) -> None:
        """Leave the job, because this launcher was asked to stop; the other nodes may go on."""
        self._wire.post(self._membership.leave)
        self._end()
        world = self._membership.world
        if self._note is not None and world is not None and world.members == (self._me,):
            self._note.remove()

    def _end(self) -> None:
        self._wire.end()
        if self._witness is not None:
            self._witness.end()

    def await_news(self, seconds: float) -> bool:
        """Wait until the round is over for another reason than this node's ranks; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.news is not None or self._is_closed, seconds) and bool(
                self.news
            )

    @property
    def round(self) -> int:
        """The number of the latest round, the same on all of its nodes."""
        with self._changed:
            return 0 if self._formed is None else self._formed.round

    @property
    def detection_s(self) -> float:
        """The time after which a lost node is known to be lost."""
        return self._waits.detect_s + 3 * self._waits.beat_s

    def finish(self) -> None:
        """Wait until the ranks of the other nodes have succeeded too, or their nodes are lost."""
        self._has_finished = True
        self._wire.post(self._membership.finish)
        end_s = time.monotonic() + _FINISH_S
        with self._changed:
            while not (self._is_closed or self.lost or self._is_asked()) and time.monotonic() < end_s:
                self._changed.wait(0.1)

    def _await_world(self, offer: Message) -> NodeWorld:
        with self._changed:
            self._formed = None
        self._wire.post(lambda: self._membership.want_round(offer, time.monotonic()))
        began_s = time.monotonic()
        with self._changed:
            while (world := self._read_formed()) is None:
                if self._error is not None:
                    self._error.exit_code = 1 if self._has_trained else 2
                    raise self._error
                self._refuse_stranger(began_s)
                if self._is_closed and not (self._has_failed or self._has_trained):
                    raise RendezvousGracefulExitError("the job has ended without this node")
                if self._is_closed or self._is_asked():
                    raise RendezvousClosedError
                self._changed.wait(0.1)
            return world

    def _refuse_stranger(self, began_s: float) -> None:
        """Raise PL379 if the port of the endpoint is taken, and not by a launcher of this job."""
        member = self._membership
        is_alone = member.role == "seeking" and member.world is None
        if self._taken and is_alone and time.monotonic() - began_s > 3 * self._waits.detect_s:
            raise PacelineError(
                "PL379",
                saw=f"Port {self._taken[1]} of this node is taken, and what listens there does not answer as "
                f"a launcher of the job {self._terms.job!r}.",
                rule="The launcher on the node of --rdzv-endpoint listens at its port.",
                fix="Choose a free port, the same on all nodes (ss -ltnp lists the processes that hold "
                "ports).",
            )

    def _read_formed(self) -> NodeWorld | None:
        return self._formed

    # ---- called by the membership, in its thread

    def formed(self, world: NodeWorld) -> None:
        with self._changed:
            number = world.find(self._me.key)
            names = ", ".join(map(str, world.members))
            count = len(world.members)
            log.info(
                "round %d on %d node%s: %s; this one is number %d",
                *(world.round, count, "" if count == 1 else "s", names, number),
            )
            may_part = count == 2 and self._terms.least == 1 and self._witness is None
            if may_part and len(set(map(str, world.members))) == 2 and not self._has_warned:
                self._has_warned = True
                first, second = world.members
                log.info(
                    "if %s is lost, %s goes on; if %s is lost, %s goes on only if that launcher is known to "
                    "have ended",
                    *(second, first, first, second),
                )
            self._warn_of_twins(world)
            self.news, self.lost = None, False
            self._formed, self._has_trained = world, True
            self._changed.notify_all()

    def _warn_of_twins(self, world: NodeWorld) -> None:
        """Warn once of several launchers on one machine, unless all nodes are this machine on purpose."""
        machines = Counter((m.name, m.address) for m in world.members if not _is_loopback(m.address))
        twins = [f"{name} ({address})" for (name, address), count in machines.items() if count > 1]
        if twins and not self._has_warned_of_twins:
            self._has_warned_of_twins = True
            log.warning(
                "%s has several launchers of this job, whose ranks share its devices; start one per node",
                ", ".join(twins),
            )

    def over(self, reason: str, *, lost: bool) -> None:
        with self._changed:
            self.news, self.lost = self.news or reason, self.lost or lost
            self._changed.notify_all()
        if lost:
            # Ranks of a world that has lost a node can only wait. Not in this thread, which has to beat.
            threading.Thread(target=self._on_loss, name="paceline-loss", daemon=True).start()

    def closed(self, *, failed: bool) -> None:
        if self._note is not None:
            self._note.remove()
        with self._changed:
            self._is_closed, self._has_failed = True, failed
            self._changed.notify_all()

    def failed(self, error: PacelineError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()


def _listen(address: str, own: Address | None) -> tuple[socket.socket, bool]:
    """Return where this launcher listens, and whether that is its endpoint.

    Of several launchers on the machine of the endpoint, the first to take the port has it.
    """
    if own is not None:
        host, port = own
        everywhere = "::" if ":" in _resolve(host) else "0.0.0.0"
        # Other nodes may know this one under another address than it does itself.
        place = address if _resolve(host) == _resolve(address) else everywhere
        try:
            return listen(place, port), True
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return listen(address, 0), False


def _is_loopback(address: str) -> bool:
    return address == "localhost" or address.startswith("127.") or address == "::1"


def _resolve(host: str) -> str:
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return str(sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0][4][0])
    return host


def shares_store() -> bool:
    """Return whether ranks use the launcher's store, by torch's variable."""
    return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


def find_free_port() -> int:
    """Return a port that was free a moment ago, on all interfaces."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
