"""Suite D: two nodes, whatever their names resolve to."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.chaos.launcher_cases.case import Case
from tests.launching.launched import Launched, paceline_run, script
from tests.launching.nodes import Nodes, OwnName

_LIMIT_S = 60
_INTERFACE = "GLOO_SOCKET_IFNAME"
MEETINGS: dict[str, Callable[[Nodes, int], list[str]]] = {
    "c10d by name": lambda nodes, node: _c10d("node0"),
    "c10d by address": lambda nodes, node: _c10d(nodes.address(0)),
    "static by name": lambda nodes, node: ["--node-rank", str(node), "--master-addr", "node0"],
    "static by address": lambda nodes, node: ["--node-rank", str(node), "--master-addr", nodes.address(0)],
}


def _c10d(host: str) -> list[str]:
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:29501", "--rdzv-id", "d"]


@contextmanager
def _start(
    folder: Path,
    nodes: Nodes,
    node: int,
    words: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    own_name: OwnName = "address",
    own_host: bool = True,
    powered: bool = False,
) -> Iterator[Launched]:
    def around(command: Sequence[str]) -> list[str]:
        inner = nodes.command(node, command, own_name=own_name, own_host=own_host)
        return nodes.powered(inner) if powered else inner

    wanted = {_INTERFACE: None, **(env or {})}
    with Launched(folder / f"node{node}", paceline_run(*words), env=wanted, around=around) as job:
        yield job


def check_sums(
    folder: Path,
    *,
    meeting: str,
    own_name: OwnName = "address",
    own_host: bool = True,
    interface: str | None = None,
) -> None:
    """Check sums over 2 x 2 ranks without settings by the user; a set `interface` is not changed."""
    env = {_INTERFACE: interface} if interface else {}
    with Nodes(2) as nodes:
        words = [
            ["--nnodes", "2", "--nproc-per-node", "2", *MEETINGS[meeting](nodes, node), script("sums.py")]
            for node in range(2)
        ]
        names = {"own_name": own_name, "own_host": own_host, "env": env}
        with (
            _start(folder, nodes, 0, words[0], **names) as first,
            _start(folder, nodes, 1, words[1], **names) as second,
        ):
            codes = [first.wait(_LIMIT_S), second.wait(_LIMIT_S)]
            text = first.text + second.text
            assert codes == [0, 0], f"{codes}:\n{text}"
            sums = sorted(re.findall(r"sum (\d+) on (\d) of 4, \d 2 \d (\S+)", text))
            assert sums == [("10", str(rank), interface or "eth0") for rank in range(4)], text
            assert ("this node is reached at" in text) == (interface is None), text
            assert not (left := first.find_left(5) or second.find_left(5)), f"left: {left}"


def check_unknown_name(folder: Path, *, words: Sequence[str]) -> None:
    """Check that an endpoint that does not resolve is an immediate error."""
    with Nodes(1) as nodes:
        began_s = time.monotonic()
        command = ["--nnodes", "2", *words, script("sums.py")]
        with _start(folder, nodes, 0, command) as job:
            code = job.wait(20)
            assert (code, "[PL346]" in job.text, "Traceback" in job.text) == (2, True, False), job.text
            assert time.monotonic() - began_s < 10, "too late"
            assert not (left := job.find_left(2)), f"left: {left}"


def _elastic(nodes: Nodes) -> list[str]:
    conf = "last_call_timeout=1,join_timeout=60"
    words = ["--nnodes", "1:2", "--max-restarts", "2", *_c10d(nodes.address(0)), "--rdzv-conf", conf]
    return [*words, script("sums.py"), "40", "10"]


def check_joins_late(folder: Path) -> None:
    """Check that the first node goes on with the second when that comes."""
    with Nodes(2) as nodes:
        words = _elastic(nodes)
        env = {"UNTIL": "2"}
        with _start(folder, nodes, 0, words, env=env) as first:
            first.wait_for("runs as 0 of 1", _LIMIT_S)
            with _start(folder, nodes, 1, words, env=env) as second:
                codes = [first.wait(_LIMIT_S), second.wait(_LIMIT_S)]
                text = first.text + second.text
                assert codes == [0, 0], f"{codes}:\n{text}"
                assert len(re.findall("sum 3 on . of 2", text)) == 2, text
                assert "the nodes have changed" in first.text, text
                assert not (left := first.find_left(5) or second.find_left(5)), f"left: {left}"


def check_power_cut(folder: Path, *, cuts_link: bool) -> None:
    """Check that the first node goes on alone when the second one loses its power."""
    with Nodes(2) as nodes:
        words = _elastic(nodes)
        env = {"UNTIL": "21"}
        with _start(folder, nodes, 0, words, env=env) as first:
            first.wait_for("runs as 0 of 1", _LIMIT_S)
            with _start(folder, nodes, 1, words, env=env, powered=True) as second:
                second.wait_for("runs as . of 2", _LIMIT_S)
                if cuts_link:
                    nodes.cut(1)
                second.process.kill()
                code = first.wait(100)
                assert code == 0, f"{code}:\n{first.text}"
                assert "sum 1 on 0 of 1" in first.text, first.text
                assert not (left := first.find_left(5)), f"left: {left}"


def check_cause_is_elsewhere(folder: Path, *, meeting: str) -> None:
    """Check that a rank's node prints its traceback, and the other node that the cause is elsewhere."""
    with Nodes(2) as nodes:
        words = [
            ["--nnodes", "2", "--nproc-per-node", "2", *MEETINGS[meeting](nodes, node)] for node in range(2)
        ]
        # More steps than one, so that the others are in the middle of their work.
        words = [[*flags, script("sums.py"), "100"] for flags in words]
        env = {"FAIL": "2"}
        with (
            _start(folder, nodes, 0, words[0], env=env) as first,
            _start(folder, nodes, 1, words[1], env=env) as second,
        ):
            codes = [first.wait(_LIMIT_S), second.wait(_LIMIT_S)]
            # By c10d the nodes' order is not theirs by name.
            here, there = (second, first) if "runs as 2 of 4" in second.text else (first, second)
            both = f"{codes}:\n{here.text}\n---- the other node:\n{there.text}"
            assert codes == [1, 1], both
            end = here.text.rpartition("paceline: rank ")[2]
            assert end.startswith("2 failed first"), both
            assert "ValueError: rank 2 fails on purpose" in end, both
            assert 'sums.py", line' in end, both
            told = there.text.rpartition("paceline: rank ")[2]
            assert "It lost the connection to a peer" in told, both
            assert "another node" in told, both
            assert not (left := first.find_left(5) or second.find_left(5)), f"left: {left}"


def cases(times: int) -> list[Case]:
    """Return all of them, once."""
    found = []
    for meeting in MEETINGS:
        for own_name in ("address", "loopback", "nothing"):
            if own_name == "nothing" and meeting.endswith("name"):
                continue  # node 0 does not know where that is
            check = partial(check_sums, meeting=meeting, own_name=own_name)
            found.append(Case("D", f"own name stands for: {own_name}", meeting, check))
    for meeting in ("c10d by address", "static by address"):
        check = partial(check_sums, meeting=meeting, own_host=False)
        found.append(Case("D", "one host name for both nodes", meeting, check))
        check = partial(check_sums, meeting=meeting, interface="eth0")
        found.append(Case("D", f"{_INTERFACE} set by the user", meeting, check))
    for words in (_c10d("nowhere.invalid"), ["--node-rank", "1", "--master-addr", "nowhere.invalid"]):
        found.append(
            Case("D", "endpoint that does not resolve", words[1], partial(check_unknown_name, words=words))
        )
    found.append(Case("D", "elastic, second node comes late", "c10d", check_joins_late))
    for cuts_link in (False, True):
        name = "with its link" if cuts_link else "its processes only"
        found.append(
            Case("D", "elastic, power cut of a node", name, partial(check_power_cut, cuts_link=cuts_link))
        )
    for meeting in ("c10d by address", "static by address"):
        check = partial(check_cause_is_elsewhere, meeting=meeting)
        found.append(Case("D", "a rank of one node raises", meeting, check))
    return found
