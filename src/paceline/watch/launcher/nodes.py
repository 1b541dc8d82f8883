"""Exchanges what the launchers of several nodes see, through the store at which the ranks meet.

Each launcher writes its state under its own key every two seconds, and reads the others'. No port is opened
for it. If a node's state no longer changes, the node is unreachable or its launcher has gone. The store
itself may be on that node; then nothing can be read at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from paceline.launching.watcher import WatchMessage
from paceline.watch.launcher.clock import Stillness
from paceline.watch.protocol.report import Fact, Process, Report, Seen
from paceline.watch.protocol.wire import from_json, to_json
from paceline.watch.reasoning.pace import RankPace

EVERY_S = 2.0
_TIMEOUT = timedelta(seconds=5)
# A node whose state has not changed for this long is considered lost.
LOST_S = 10.0
_WORKS = Stillness(0.0, 0.0, has_waiting=False)


@dataclass(frozen=True)
class NodeState:
    """The state of a node's ranks, as its launcher publishes it.

    Attributes:
        stillness: for how long they have stood still.
        seen: what they do, once the job stands still; `None` while it works.
        message: its verdict, once it has one.
        asked_at_s: when its launcher last asked its ranks for their calls, in seconds since 1970.
        answers: some of these calls, for comparison.
        paces: how much its ranks have waited lately.
        facts: the latest of its ranks that concern ranks of other nodes.
    """

    name: str
    ranks: tuple[int, ...]
    stillness: Stillness
    seen: Seen | None = None
    message: WatchMessage | None = None
    asked_at_s: float = 0.0
    answers: dict[int, Report] = field(default_factory=dict)
    paces: tuple[RankPace, ...] = ()
    facts: tuple[tuple[int, Fact], ...] = ()


class NodeBoard:
    """This node's entry on the board, and the latest ones of the other nodes.

    Args:
        node: number of this node in the job.
        num_nodes: number of nodes.
        name: of this attempt; the same on all nodes.
    """

    def __init__(self, node: int, num_nodes: int, host: str, port: int, name: str) -> None:
        self._node = node
        self._where = host, port
        self._name = name
        self._own = NodeState("", (), _WORKS)
        self._lock = threading.Lock()
        now_s = time.monotonic()
        self._latest: dict[int, tuple[str, NodeState | None, float]] = {
            other: ("", None, now_s) for other in range(num_nodes) if other != node
        }
        self._ends = threading.Event()
        # On its own thread: if the store is unreachable, reading it may never return.
        threading.Thread(target=self._run, name="paceline-nodes", daemon=True).start()

    def publish(self, **changed: Any) -> None:
        """Set fields of the state that this node writes in the next round."""
        with self._lock:
            self._own = replace(self._own, **changed)

    def read(self) -> dict[int, tuple[NodeState | None, float]]:
        """Return the latest state of each other node, and its age in seconds."""
        now_s = time.monotonic()
        with self._lock:
            return {node: (state, now_s - read_s) for node, (_, state, read_s) in self._latest.items()}

    def close(self) -> None:
        """End the thread as soon as the store has answered it."""
        self._ends.set()

    def _run(self) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        store: Any = None
        number = 0
        while not self._ends.wait(EVERY_S if number else 0.0):
            number += 1
            try:
                if store is None:
                    host, port = self._where
                    client = TCPStore(host, port, None, False, _TIMEOUT, wait_for_workers=False)
                    store = PrefixStore(f"paceline/watch/{self._name}", client)
                with self._lock:
                    own = self._own
                store.set(str(self._node), f"{number} {to_json(own)}")  # changes also if nothing else does
                self._read(store)
            except Exception:
                # The store is gone, and what is known gets older; or only the connection to it was reset.
                store = None

    def _read(self, store: Any) -> None:
        for node in list(self._latest):
            if not store.check([str(node)]):
                continue
            text = store.get(str(node)).decode()
            with self._lock:
                if text != self._latest[node][0]:
                    state = from_json(NodeState, text.partition(" ")[2])
                    self._latest[node] = text, state, time.monotonic()


Others = Mapping[int, tuple[NodeState | None, float]]
"""The result of `NodeBoard.read`: by node, its state and the age of it in seconds."""


def join_stillness(own: Stillness, others: Others) -> Stillness:
    """Return the stillness of the whole job; unreachable nodes do not count."""
    for state, age_s in others.values():
        if age_s <= LOST_S:
            own = own.join(state.stillness if state is not None else _WORKS)
    return own


def merge(own: Seen, others: Others) -> tuple[Seen, bool]:
    """Return one job from what its nodes have seen, and whether every reachable node has reported."""
    processes, reports, is_complete = dict(own.processes), dict(own.reports), True
    for state, age_s in others.values():
        if age_s > LOST_S:
            if state is not None:
                processes |= {rank: Process(rank, state.name, 0, "unreachable") for rank in state.ranks}
        elif state is None or state.seen is None:
            is_complete = False
        else:
            processes |= state.seen.processes
            reports |= state.seen.reports
    if any(age_s > LOST_S and (state is None or not state.ranks) for state, age_s in others.values()):
        # The node was lost before it could report its ranks.
        unknown = set(range(own.world_size)) - processes.keys()
        processes |= {rank: Process(rank, "another node", 0, "unreachable") for rank in unknown}
    return Seen(own.world_size, processes, reports, own.quiet_s), is_complete
