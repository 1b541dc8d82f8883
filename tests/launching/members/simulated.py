"""Launchers of a job in one thread, with a clock and a network of their own: hours of faults in seconds."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable

from paceline.errors import PacelineError
from paceline.launching.members.membership import Membership
from paceline.launching.members.records import Message, Terms
from paceline.launching.members.witness import Entry
from paceline.launching.members.world import Member, NodeWorld, Waits

_LATENCY_S = 0.002
_TICK_S = 0.1
# How long ranks need to end, and to be ready for the next round.
_RESTART_S = 0.3


class Simulation:
    """So many machines, on each of which a launcher may run."""

    def __init__(
        self,
        machines: int,
        least: int,
        most: int,
        *,
        seed: int = 0,
        waits: Waits | None = None,
        has_witness: bool = False,
        has_new_ports: bool = False,
    ) -> None:
        self.has_new_ports = has_new_ports  # a launcher that starts again has another port
        self.now, self.random = 0.0, random.Random(seed)
        self.waits = waits or Waits(last_call_s=2.0, join_s=60.0)
        self.terms = Terms("job", least, most)
        self.count = machines
        self.launchers: dict[int, Launcher] = {}
        self.cut: set[frozenset[int]] = set()
        self.record: list[Entry] | None = [] if has_witness else None
        self.blind: set[int] = set()  # machines that do not reach the witness
        self.history: list[NodeWorld] = []
        self.note: NodeWorld | None = None  # on the disk of machine 0, which begins the job
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.stores = itertools.count(40000)

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call something later."""
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), call))

    def run(self, seconds: float) -> None:
        """Let time pass, and check after every event that no two worlds train."""
        end_s = self.now + seconds
        while self._events and self._events[0][0] <= end_s:
            self.now, _, call = heapq.heappop(self._events)
            call()
            self.check()
        self.now = end_s

    def run_until(self, is_true: Callable[[], bool], seconds: float) -> float:
        """Let time pass until something is true; give how long that took."""
        begin_s = self.now
        while not is_true():
            assert self.now - begin_s < seconds, self.describe()
            self.run(0.05)
        return self.now - begin_s

    def start(self, machine: int) -> Launcher:
        """Start a launcher; the one of machine 0 has the endpoint."""
        launcher = Launcher(self, machine, next(self._numbers))
        self.launchers[machine] = launcher
        return launcher

    def reaches(self, a: int, b: int) -> bool:
        """Return whether packets arrive."""
        return frozenset((a, b)) not in self.cut

    def isolate(self, machines: set[int]) -> None:
        """Cut some machines off from all others."""
        others = set(range(self.count)) - machines
        self.cut |= {frozenset((a, b)) for a in machines for b in others}

    def training(self) -> list[NodeWorld]:
        """Return the worlds of which every member trains."""
        found: dict[int, NodeWorld] = {}
        for launcher in self.launchers.values():
            if launcher.is_alive and launcher.trains is not None:
                found[launcher.trains.store_port] = launcher.trains
        trains = {each.me.key: each.trains for each in self.launchers.values() if each.is_alive}
        return [world for world in found.values() if all(trains.get(m.key) == world for m in world.members)]

    def check(self) -> None:
        """Two worlds never train at the same time, and none is too small."""
        worlds = self.training()
        assert len(worlds) <= 1, self.describe()
        for world in worlds:
            assert self.terms.least <= len(world.members) <= self.terms.most, self.describe()
            if not self.history or self.history[-1] != world:
                assert world not in self.history, "a world came back"
                self.history.append(world)

    def trains_on(self, *machines: int) -> bool:
        """Return whether exactly these machines train."""
        names = [[member.name for member in world.members] for world in self.training()]
        return len(names) == 1 and set(names[0]) == {f"node{machine}" for machine in machines}

    def describe(self) -> str:
        """Return the state, for a failed assertion."""
        lines = [f"at {self.now:.2f} s"]
        for machine, launcher in self.launchers.items():
            inner = launcher.inner
            world = (
                None if inner.world is None else (inner.world.round, [m.name for m in inner.world.members])
            )
            lines.append(
                f"node{machine} alive={launcher.is_alive} {inner.role} knows {world} "
                f"trains={launcher.trains is not None} errors={ {error.code for error in launcher.errors} }"
            )
        return "\n".join(lines)


class _Line:
    """A launcher's way to the witness, which takes a while, and forgets nothing that was asked for."""

    trouble, is_wrong = "", False

    def __init__(self, launcher: Launcher, record: list[Entry]) -> None:
        self._launcher, self._record = launcher, record

    def read(self) -> None:
        self._later(self._read)

    def append(self, entry: Entry) -> None:
        self._later(lambda: self._append(entry))

    def _later(self, call: Callable[[], None]) -> None:
        simulation = self._launcher.simulation

        def go() -> None:
            if self._launcher.machine in simulation.blind:
                simulation.at(0.2, go)
            else:
                call()

        simulation.at(simulation.random.uniform(0.005, 0.5), go)

    def _read(self) -> None:
        last = self._record[-1] if self._record else None
        others = [launcher.me for launcher in self._launcher.simulation.launchers.values()]
        self._answer(lambda now: self._launcher.inner.heard_witness(last, others, now))

    def _append(self, entry: Entry) -> None:
        if entry.number == len(self._record) + 1:
            self._record.append(entry)
        last = self._record[-1]
        self._answer(lambda now: self._launcher.inner.recorded(last, now))

    def _answer(self, call: Callable[[float], None]) -> None:
        simulation = self._launcher.simulation
        delay_s = simulation.random.uniform(0.005, 0.5)
        simulation.at(delay_s, lambda: self._launcher.do(lambda: call(simulation.now)))


class Launcher:
    """One launcher: the agent and the links of its `Membership`."""

    def __init__(self, simulation: Simulation, machine: int, number: int) -> None:
        self.simulation, self.machine = simulation, machine
        self.is_alive, self.is_stopped = True, False
        self.trains: NodeWorld | None = None
        self.has_ended = False
        self.num_ticks = 0
        self.losses: list[str] = []
        self.errors: list[PacelineError] = []
        self._links: dict[int, tuple[Launcher, int]] = {}
        self._held: list[Callable[[], None]] = []
        self._numbers = itertools.count(1)
        port = 30000 + (number if simulation.has_new_ports else machine)
        if machine == 0:
            port = 29400
        terms = simulation.terms
        self._has_note = machine == 0 and simulation.record is None and 2 * terms.least <= terms.most
        self.me = Member(f"{machine}-{number}", f"node{machine}", f"10.0.0.{machine}", port)
        self.inner = Membership(
            self.me,
            simulation.terms,
            simulation.waits,
            self,
            self,
            simulation.now,
            endpoints=[("10.0.0.0", 29400)],
            founds=machine == 0 or simulation.record is not None,
            witness=None if simulation.record is None else _Line(self, simulation.record),
            noted=simulation.note if self._has_note else None,
        )
        self.do(lambda: self.want_round())
        simulation.at(simulation.random.random() * _TICK_S, self._tick)

    # ---- its process

    def kill(self) -> None:
        """SIGKILL: its machine closes its connections."""
        self.is_alive, self.trains = False, None
        for link in list(self._links):
            self._part(link)

    def stop(self) -> None:
        """SIGSTOP: its machine still takes what is sent to it."""
        self.is_stopped = True

    def go_on(self) -> None:
        """SIGCONT: it finds what has come in the meantime."""
        self.is_stopped = False
        held, self._held = self._held, []
        for call in held:
            call()

    def want_round(self) -> None:
        """Its agent waits for a round."""
        self.trains, self.inner.rests_until_s = None, float("-inf")
        port = next(self.simulation.stores)
        self.inner.want_round({"store_port": port, "master_port": port}, self.simulation.now)

    def do(self, call: Callable[[], None]) -> None:
        """Call something in its process, as soon as that runs."""
        if self.is_stopped:
            self._held.append(call)
        elif self.is_alive:
            call()

    def _tick(self) -> None:
        if self.is_alive:
            if not self.is_stopped and self.simulation.now >= self.inner.rests_until_s:
                self.num_ticks += 1
                self.inner.tick(self.simulation.now)
            self.simulation.at(_TICK_S, self._tick)

    # ---- the agent

    def formed(self, world: NodeWorld) -> None:
        self.trains = world
        if self._has_note:
            self.simulation.note = world

    def over(self, reason: str, *, lost: bool) -> None:
        self.losses.append(reason)
        if self.trains is not None:
            self.trains = None
            self.simulation.at(_RESTART_S, lambda: self.do(self.want_round))

    def closed(self, *, failed: bool) -> None:
        self.trains, self.has_ended = None, True
        if self._has_note:
            self.simulation.note = None

    def failed(self, error: PacelineError) -> None:
        self.errors.append(error)

    # ---- the links

    def dial(self, address: str, port: int) -> int:
        link = next(self._numbers)
        self.simulation.at(2 * _LATENCY_S, lambda: self._connect(link, int(address.rpartition(".")[2]), port))
        return link

    def _connect(self, link: int, machine: int, port: int) -> None:
        if not self.simulation.reaches(self.machine, machine):
            return
        other = self.simulation.launchers.get(machine)
        if other is None or not other.is_alive or other.me.port != port:
            self.do(lambda: self.inner.ended(link, True, self.simulation.now))
            return
        theirs = next(other._numbers) + 1_000_000
        self._links[link], other._links[theirs] = (other, theirs), (self, link)
        self.do(lambda: self.inner.opened(link, self.simulation.now))

    def send(self, link: int, message: Message) -> None:
        if link in self._links:
            other, theirs = self._links[link]
            self._carry(other, theirs, lambda: other.inner.received(theirs, message, self.simulation.now))

    def send_all(self, links: Iterable[int], message: Message) -> None:
        for link in links:
            self.send(link, message)

    def close(self, link: int) -> None:
        self._part(link)

    def _part(self, link: int) -> None:
        if link in self._links:
            other, theirs = self._links.pop(link)

            def end() -> None:
                if other._links.pop(theirs, None) is not None:
                    other.inner.ended(theirs, False, self.simulation.now)

            self._carry(other, theirs, end)

    def _carry(self, other: Launcher, theirs: int, call: Callable[[], None]) -> None:
        """Deliver in order; what is sent while the network is cut arrives when it is whole again."""

        def deliver() -> None:
            if not self.simulation.reaches(self.machine, other.machine):
                self.simulation.at(0.2, deliver)
            else:
                other.do(lambda: call() if theirs in other._links else None)

        self.simulation.at(_LATENCY_S, deliver)
