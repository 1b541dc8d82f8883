"""Offload to the CPU states where it does nothing."""

from __future__ import annotations

import logging
from typing import Any

from tests.dist.pool import Pool
from tests.parallel.sharded import Toy, build_shards


def offload_to_cpu(world: Any) -> list[str]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("paceline.parallel.shard.setup")
    logger.addHandler(handler := Keep())
    logger.setLevel(logging.INFO)
    build_shards(world, "dp_shard=2", Toy(), offload="cpu")
    logger.removeHandler(handler)
    return lines


def test_offload_to_cpu_states_that_it_does_nothing_there(ranks: Pool) -> None:
    assert (
        ranks.run(offload_to_cpu, 2)
        == [["shard: offload=cpu changes nothing for a model that is on the CPU"]] * 2
    )
