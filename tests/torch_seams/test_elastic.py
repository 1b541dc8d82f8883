"""The agent's steps under their public names."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.torch_seams.elastic import SteppedAgent


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
