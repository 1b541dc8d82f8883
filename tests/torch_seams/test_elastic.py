"""The agent's steps under their public names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from paceline.torch_seams.elastic import SteppedAgent, fill_store


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("_rendezvous", "meet"),
        ("_start_workers", "start_ranks"),
        ("_monitor_workers", "poll_ranks"),
        ("_restart_workers", "restart_ranks"),
    ],
)
def test_torchs_agent_calls_the_public_steps(theirs: str, ours: str) -> None:
    called: list[Any] = []
    kind = type("Agent", (SteppedAgent,), {ours: lambda self, group: called.append(group)})
    agent: Any = kind.__new__(kind)
    getattr(agent, theirs)("the group")
    assert called == ["the group"]


def test_a_filled_store_gives_the_numbers_that_torchs_agents_agree_on() -> None:
    nodes = [("trainer", 3), ("reader", 2), ("trainer", 1), ("reader", 4)]

    def assign(number: int, store: Store) -> tuple[list[tuple[int, ...]], str]:
        role, size = nodes[number]
        agent: Any = SteppedAgent.__new__(SteppedAgent)
        spec = SimpleNamespace(role=role, local_world_size=size)
        ranks = agent._assign_worker_ranks(store, number, len(nodes), spec)
        names = ("local_rank", "global_rank", "role_rank", "world_size", "role_world_size")
        where = RendezvousStoreInfo.build(number, store, "10.0.0.1", 29511)
        place = f"{where.master_addr}:{where.master_port}"
        return [tuple(getattr(rank, name) for name in names) for rank in ranks], place

    shared = HashStore()
    with ThreadPoolExecutor(len(nodes)) as pool:
        theirs = list(pool.map(lambda number: assign(number, shared), range(len(nodes))))
    ours = [assign(number, fill_store(("10.0.0.1", 29511), nodes)) for number in range(len(nodes))]
    assert ours == theirs
    assert ours[3] == ([(n, 6 + n, 2 + n, 10, 6) for n in range(4)], "10.0.0.1:29511")
