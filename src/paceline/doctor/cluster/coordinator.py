"""The first node's part of a check: lets the nodes meet, asks each in turn, and keeps what they answered."""

from __future__ import annotations

import itertools
import os
import random
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.doctor.cluster.judge import find_slow_links, find_slow_nodes
from paceline.doctor.cluster.node_messages import receive, send
from paceline.doctor.cluster.speed import RAN
from paceline.doctor.meeting_check import is_loopback

_HELLO_S = 5.0
_ANSWER_S, _CHECKS_S = 10.0, 20.0
_LINK_S = 0.25
_REPEATS = 2
_NUM_PINGS = 10
_LOOKS = 5
_WORK = "matrix product"
_COLLECTIVES_S = 25.0


@dataclass
class Node:
    """A node that came.

    Attributes:
        name: its host name.
        address: by which the others reach it.
        connection: to it.
        lost: the stage in which it fell silent, "" while it answers.
    """

    name: str
    address: str
    connection: socket.socket
    lost: str = ""

    def ask(self, patience_s: float, /, *, do: str, **words: Any) -> dict[str, Any] | None:
        """Return the reply to a command, `None` if the node does not answer in time; it is lost then."""
        if self.lost:
            return None
        try:
            self.connection.settimeout(patience_s)
            send(self.connection, {"do": do, **words})
            return receive(self.connection)
        except OSError:
            self.lost = do
            self.connection.close()
            return None


@dataclass
class Survey:
    """The measurements of a cluster; nodes go by their numbers in `names`.

    Attributes:
        names, addresses: of the nodes that came.
        num_wanted: nodes that were to come.
        checked: the nodes' replies to the checks of the machine.
        lost: the stage in which a node fell silent.
        unreachable: (from, to) to the stage and the error.
        misled: the same for the address that gloo would announce, where it is another one.
        rates, rtts, resent: (from, to) to bytes/s, seconds and a share.
        speeds: by node and kind.
        offsets_s: seconds by which a node's clock is ahead of the first one's, and their bound, at begin and
        end. folder: the shared folder, and the nodes that do not see it.
        wrong: by node, the collectives with wrong results.
        all_reduce_s: seconds by size in bytes; the slowest node's.
        failed_collectives: by node, an error.
    """

    names: list[str]
    addresses: list[str]
    num_wanted: int
    checked: dict[int, dict[str, Any]] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    unreachable: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    misled: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    rates: dict[tuple[int, int], float] = field(default_factory=dict)
    rtts: dict[tuple[int, int], float] = field(default_factory=dict)
    resent: dict[tuple[int, int], float] = field(default_factory=dict)
    speeds: dict[int, dict[str, float]] = field(default_factory=dict)
    offsets_s: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    seconds_between_offsets: float = 0.0
    folder: str = ""
    without_folder: list[int] = field(default_factory=list)
    wrong: dict[int, list[str]] = field(default_factory=dict)
    all_reduce_s: dict[int, float] = field(default_factory=dict)
    failed_collectives: dict[int, str] = field(default_factory=dict)


def meet(listener: socket.socket, num_nodes: int, job: str, timeout_s: float) -> list[Node]:
    """Wait for the nodes, and return those that came, the first one first, the others by name."""
    nodes: list[Node] = []
    end_s = time.monotonic() + timeout_s
    while len(nodes) < num_nodes and (left_s := end_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            connection, (address, *_) = listener.accept()
        except TimeoutError:
            break
        try:
            connection.settimeout(_HELLO_S)
            hello = receive(connection)
            if hello.get("job") != job:
                raise ConnectionError("another job")
        except OSError:  # a stranger, who learns nothing
            connection.close()
            continue
        address = address.removeprefix("::ffff:")
        own = address == connection.getsockname()[0].removeprefix("::ffff:")
        nodes.append(Node(str(hello.get("name")), address, connection))
        if own and nodes[0].address != address:
            nodes.insert(0, nodes.pop())
    first = nodes[:1]
    for node in nodes[1:]:
        if first and first[0].address.startswith("127.") and not node.address.startswith("127."):
            first[0].address = node.connection.getsockname()[0].removeprefix("::ffff:")
    return first + sorted(nodes[1:], key=lambda node: (node.name, node.address))


class Surveyor:
    """Asks nodes, stage by stage; every wait has an end, and a silent node is left out of what follows."""

    def __init__(self, nodes: list[Node], num_wanted: int) -> None:
        self._nodes = nodes
        self._pool = ThreadPoolExecutor(max(len(nodes), 1))
        self.survey = Survey([node.name for node in nodes], [node.address for node in nodes], num_wanted)

    def run(self, folder: str, *, with_collectives: bool, say: Callable[[str], None]) -> Survey:
        """Make all stages, and return what was found; `say` is called with the name of each."""
        survey, started_s = self.survey, time.monotonic()
        say("clocks and machines")
        self._read_clocks()
        survey.checked = self._ask_all(_CHECKS_S, {i: {"do": "checks"} for i in self._alive()})
        say("which node reaches which")
        self._try_reaching()
        say("links, pair by pair")
        self._measure_links()
        say("nodes by themselves")
        self._measure_speeds()
        if folder and self._nodes:
            self._look_for(folder)
        if with_collectives and len(self._alive()) > 1 and not survey.unreachable:
            say("collectives")
            self._run_collectives()
        self._read_clocks()
        survey.seconds_between_offsets = time.monotonic() - started_s
        survey.lost = {i: node.lost for i, node in enumerate(self._nodes) if node.lost}
        return survey

    def end(self, **words: Any) -> None:
        """Send every node its last message."""
        for node in self._nodes:
            with suppress(OSError):
                send(node.connection, {"do": "end", **words})

    def close(self) -> None:
        """Leave the nodes; those without a last message say that this one has ended the check."""
        for node in self._nodes:
            node.connection.close()
        self._pool.shutdown(wait=False)

    def _alive(self) -> list[int]:
        return [i for i, node in enumerate(self._nodes) if not node.lost]

    def _ask_all(
        self, timeout_s: float, commands: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """Ask several nodes at once, and return the replies of those that answered."""
        asked = {
            number: self._pool.submit(self._nodes[number].ask, timeout_s, **command)
            for number, command in commands.items()
        }
        replies = {number: future.result() for number, future in asked.items()}
        return {number: reply for number, reply in replies.items() if reply is not None}

    def _read_clocks(self) -> None:
        for number in self._alive():
            best = None
            for _ in range(_NUM_PINGS):
                before_s = time.time()
                reply = self._nodes[number].ask(_ANSWER_S, do="clocks")
                after_s = time.time()
                if reply is None:
                    break
                bound_s = (after_s - before_s) / 2
                if best is None or bound_s < best[1]:
                    best = (reply["time"] - (before_s + after_s) / 2, bound_s)
            if best is not None:
                self.survey.offsets_s.setdefault(number, []).append(best)

    def _try_reaching(self) -> None:
        survey = self.survey
        survey.unreachable = self._reach({j: self._place(j) for j in self._alive()})
        announced = {j: reply.get("announced", ("",))[0] for j, reply in survey.checked.items()}
        survey.misled = self._reach(
            {
                j: [address, self._place(j)[1]]
                for j, address in announced.items()
                if address not in ("", survey.addresses[j]) and not is_loopback(address)
            }
        )

    def _reach(self, places: Mapping[int, list[Any]]) -> dict[tuple[int, int], dict[str, str]]:
        """Let each node try the places of the others, and return what failed."""
        commands = {
            i: {"do": "reach", "peers": {str(j): place for j, place in places.items() if j != i}}
            for i in (self._alive() if places else ())
        }
        # One silent direction costs a node three patient waits; all nodes wait side by side.
        replies = self._ask_all(_ANSWER_S + 9.0 * len(places), commands)
        return {
            (i, int(j)): found
            for i, reply in replies.items()
            for j, found in reply.items()
            if found and j.isdigit()  # else it is an error of the node
        }

    def _place(self, number: int) -> list[Any]:
        return [self._nodes[number].address, self.survey.checked.get(number, {}).get("port", 0)]

    def _measure_links(self) -> None:
        for _ in range(_REPEATS):
            rounds = list(pair_up(self._alive()))
            random.shuffle(rounds)
            for pairs in rounds:
                for turn in (pairs, [(j, i) for i, j in pairs]):
                    self._measure(turn)
        for link in find_slow_links(self.survey.rates):
            for _ in range(_REPEATS):  # alone, as other pairs may have been in the way
                self._measure([link])

    def _measure(self, links: list[tuple[int, int]]) -> None:
        """Measure disjoint links at once, and keep the best of all measurements of each."""
        survey, places = self.survey, self.survey.addresses
        links = [(i, j) for i, j in links if (i, j) not in survey.unreachable and places[i] != places[j]]
        commands = {}
        for i, j in links:
            address, port = self._place(j)
            commands[i] = {"do": "links", "address": address, "port": port, "seconds": _LINK_S}
        replies = self._ask_all(_ANSWER_S, commands)
        for i, j in links:
            reply = replies.get(i, {})
            if "error" in reply:
                survey.unreachable[i, j] = {"stage": "large", "error": reply["error"]}
            elif reply:
                survey.rates[i, j] = max(survey.rates.get((i, j), 0.0), reply["bytes_per_s"])
                survey.rtts[i, j] = min(survey.rtts.get((i, j), 1e9), reply["rtt_s"])
                survey.resent[i, j] = min(survey.resent.get((i, j), 1.0), reply["resent"])

    def _measure_speeds(self) -> None:
        survey = self.survey
        survey.speeds = self._ask_all(_ANSWER_S, {i: {"do": "speed"} for i in self._alive()})
        # Other work comes and goes, so a slow node is measured again, in turns with one of usual speed.
        first, best = dict(survey.speeds), defaultdict[int, Counter[str]](Counter)
        for _ in range(_LOOKS):
            slow = {node for node, _, _ in find_slow_nodes(survey.speeds)}
            others = sorted(first.keys() - slow, key=lambda node: first[node].get(_WORK, 0.0))
            if not slow or not others:
                return
            usual = others[len(others) // 2]
            for node in (usual, *sorted(slow)):
                reply = self._nodes[node].ask(_ANSWER_S, do="speed") or {}
                best[node] |= Counter({kind: rate for kind, rate in reply.items() if kind != "error"})
            survey.speeds[usual] = {**first[usual], RAN: best[usual][RAN]}
            for node in slow:
                for kind in best[node] & best[usual]:
                    share = best[node][kind] / best[usual][kind]
                    survey.speeds[node] = {**survey.speeds[node], kind: share * survey.speeds[usual][kind]}

    def _look_for(self, folder: str) -> None:
        reply = self._nodes[0].ask(_ANSWER_S, do="leave", folder=folder)
        if reply is None or "path" not in reply:
            return  # the check of the disk has the reason
        self.survey.folder = folder
        looked = self._ask_all(_ANSWER_S, {i: {"do": "look", "path": reply["path"]} for i in self._alive()})
        self.survey.without_folder = [i for i, found in looked.items() if not found.get("found")]
        with suppress(OSError):
            os.remove(reply["path"])

    def _run_collectives(self) -> None:
        alive = self._alive()
        host, port = self._nodes[alive[0]].address, self.survey.checked[alive[0]].get("free_port")
        words = {"host": host, "port": port, "world_size": len(alive), "timeout_s": _COLLECTIVES_S}
        commands = {i: {"do": "collectives", "rank": rank, **words} for rank, i in enumerate(alive)}
        for i, reply in self._ask_all(_COLLECTIVES_S + _ANSWER_S, commands).items():
            if "error" in reply:
                self.survey.failed_collectives[i] = reply["error"]
                continue
            if reply["wrong"]:
                self.survey.wrong[i] = reply["wrong"]
            for size, seconds in reply["seconds"].items():
                self.survey.all_reduce_s[int(size)] = max(
                    self.survey.all_reduce_s.get(int(size), 0.0), seconds
                )


def pair_up(members: list[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs in which each member meets each other once (the circle method)."""
    circle: list[int | None] = [*members, None] if len(members) % 2 else [*members]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = itertools.islice(zip(circle, reversed(circle), strict=True), half)
        yield [(i, j) for i, j in pairs if i is not None and j is not None]
        circle[1:] = [circle[-1], *circle[1:-1]]
