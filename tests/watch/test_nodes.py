"""What the launchers of a job's nodes know of each other, and what ends their waits."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from paceline.launching.elastic.agent import _Agent
from paceline.launching.processes.ranks import Attempts
from paceline.watch.launcher.nodes import NodeBoard


def end_connections_to(port: int) -> int:
    """End this process's connections to a port, as a router that forgets them does; return their number."""
    ended = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            one = socket.socket(fileno=os.dup(int(name)))
            with one:
                if one.getpeername()[1:2] == (port,):  # a path, of a Unix socket
                    one.shutdown(socket.SHUT_RDWR)
                    ended += 1
    return ended


def await_name(board: NodeBoard, name: str, seconds: float) -> bool:
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        if any(state is not None and state.name == name for state, _ in board.read().values()):
            return True
        time.sleep(0.05)
    return False


def test_a_node_is_heard_again_after_its_connection_was_reset() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    boards = [NodeBoard(node, 2, "127.0.0.1", server.port, "test") for node in range(2)]
    boards[1].publish(name="before")
    assert await_name(boards[0], "before", 20.0)
    assert end_connections_to(server.port) >= 2
    boards[1].publish(name="after")
    assert await_name(boards[0], "after", 20.0)
    for board in boards:
        board.close()


def test_ranks_restart_at_once_where_another_node_has_ended_the_round() -> None:
    """The thread that takes the ranks' ends waits for the watcher, and the watcher for other nodes."""
    told = []
    rounds = Attempts()
    rounds.on_loss = lambda: told.append("over")

    class StoppedError(Exception):
        pass

    def stop_ranks(group: object) -> None:
        told.append("stop")
        raise StoppedError

    agent = SimpleNamespace(
        _members=SimpleNamespace(news="the ranks of another node failed", lost=False),
        _rounds=rounds,
        stop_ranks=stop_ranks,
    )
    with pytest.raises(StoppedError):
        _Agent.restart_ranks(agent, None)  # type: ignore[arg-type]
    assert told == ["over", "stop"]
