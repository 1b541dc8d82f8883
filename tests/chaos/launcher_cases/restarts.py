"""Suite A: a rank that dies twice comes back, and the job ends well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, permutations
from pathlib import Path

from tests.chaos.launcher_cases.case import Case, free_port
from tests.launching.launched import Launched, paceline_run, script, torchrun
from tests.launching.nodes import Nodes

DEATHS = ("raise", "kill", "exit")
ONE_NODE: dict[str, Callable[[], list[str]]] = {
    "default": list,
    "standalone": lambda: ["--standalone"],
    "c10d": lambda: ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"],
    "static": lambda: ["--master-port", str(free_port())],
}
TWO_NODES = ("c10d", "static")
# A restart of torchrun often hangs until the group's timeout, or five times as long: a short one there.
_PEER_TIMEOUT_S = 10
_LIMIT_S, _PEER_LIMIT_S = 60, 120


def check_one_node(
    folder: Path, *, meeting: str, rank: int, deaths: Sequence[str], is_cold: bool = False, peer: bool = False
) -> None:
    """Run 2 ranks on this machine; one of them dies once for each of `deaths`."""
    words = ["--max-restarts", "3", "--nproc-per-node", "2", *ONE_NODE[meeting]()]
    words += [*(["--cold"] if is_cold else []), script("restarted.py"), str(rank), ",".join(deaths)]
    command = torchrun(*words, str(_PEER_TIMEOUT_S)) if peer else paceline_run(*words)
    with Launched(folder, command) as job:
        code = job.wait(_PEER_LIMIT_S if peer else _LIMIT_S)
        _check_end([job], [code], rank, deaths, size=2)
        if not peer:
            assert "Traceback" not in job.text.replace("Traceback", "", deaths.count("raise"))
            left = job.find_left(10)
            assert not left, f"left: {left}"


def check_two_nodes(
    folder: Path, *, meeting: str, rank: int, deaths: Sequence[str], peer: bool = False
) -> None:
    """Run one rank on each of two nodes; one of them dies once for each of `deaths`."""
    with Nodes(2) as nodes, ExitStack() as stack:
        jobs = []
        (folder / "work").mkdir()
        for node in range(2):
            words = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3"]
            if meeting == "c10d":
                endpoint = f"{nodes.address(0)}:29501"
                words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "r"]
            else:
                words += ["--node-rank", str(node), "--master-addr", nodes.address(0)]
            words += [script("restarted.py"), str(rank), ",".join(deaths)]
            command = torchrun(*words, str(_PEER_TIMEOUT_S)) if peer else paceline_run(*words)
            env = {"GLOO_SOCKET_IFNAME": "eth0"} if peer else {}
            # With c10d ranks may change places: both nodes look for the deaths in the same folder.
            place = folder / f"node{node}"
            place.mkdir()
            (place / "work").symlink_to(folder / "work")
            job = Launched(place, command, env=env, around=partial(nodes.command, node))
            jobs.append(stack.enter_context(job))
        codes = [job.wait(_PEER_LIMIT_S if peer else _LIMIT_S) for job in jobs]
        _check_end(jobs, codes, rank, deaths, size=2)
        if not peer:
            for job in jobs:
                left = job.find_left(10)
                assert not left, f"left: {left}"


def _check_end(jobs: list[Launched], codes: list[int], rank: int, deaths: Sequence[str], size: int) -> None:
    text = "\n".join(job.text for job in jobs)
    assert codes == [0] * len(jobs), f"exit codes {codes}:\n{text}"
    total = size * (size + 1) // 2 * size
    for one in range(size):
        assert f"rank {one} of {size} came through with {total}" in text, text
    for how in deaths:
        assert f"rank {rank} dies by {how}" in text, text


def cases(times: int) -> list[Case]:
    """Return all of them; the ways to die change from run to run."""
    pairs = [pair for first in DEATHS for pair in ([(first, first)] if first == "kill" else [])]
    pairs += list(permutations(DEATHS, 2))
    found = []
    for meeting in ONE_NODE:
        draw = cycle(pairs)
        for number in range(times):
            deaths, rank = next(draw), number % 2
            check = partial(check_one_node, meeting=meeting, rank=rank, deaths=deaths)
            found.append(Case("A", f"one node, {meeting}", f"{number}: rank {rank} by {deaths}", check))
    for meeting in TWO_NODES:
        draw = cycle(pairs)
        for number in range(times):
            deaths, rank = next(draw), (number + 1) % 2
            check = partial(check_two_nodes, meeting=meeting, rank=rank, deaths=deaths)
            found.append(Case("A", f"two nodes, {meeting}", f"{number}: rank {rank} by {deaths}", check))
    return found + _peer_cases(min(times, 3), pairs)


def _peer_cases(times: int, pairs: Sequence[tuple[str, str]]) -> list[Case]:
    found = []
    for number in range(times):
        deaths = pairs[number % len(pairs)]
        for meeting in ONE_NODE:
            check = partial(check_one_node, meeting=meeting, rank=number % 2, deaths=deaths, peer=True)
            found.append(Case("A", f"torchrun: one node, {meeting}", f"{number}: {deaths}", check, True))
        for meeting in TWO_NODES:
            check = partial(check_two_nodes, meeting=meeting, rank=number % 2, deaths=deaths, peer=True)
            found.append(Case("A", f"torchrun: two nodes, {meeting}", f"{number}: {deaths}", check, True))
    return found
