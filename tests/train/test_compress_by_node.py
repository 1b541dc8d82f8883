"""Compression between nodes: the ranks of a node share a slot, with the bits of one process.

The nodes are claimed, not real: ranks of different claimed nodes exchange messages, as real ones do.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from paceline.comm import nodes as nodes_module
from paceline.errors import PacelineError
from tests.dist.pool import Pool, RankError
from tests.train.test_compress import are_equal, build, train

BLOCK = (0, 0, 1, 1)
BETWEEN = {"links": "between_nodes", "slots": None}


@contextmanager
def claim_node(node: int) -> Iterator[None]:
    original = nodes_module._identify_node
    nodes_module._identify_node = lambda: ("host", "boot", node)
    try:
        yield
    finally:
        nodes_module._identify_node = original


def train_on_nodes(
    world: Any, nodes: tuple[int, ...], first: int, last: int, folder: str | None, bad: int, options: Any
) -> list[Tensor]:
    with claim_node(nodes[world.rank]):
        return train(world, first, last, folder, bad, options)[1]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("int8", ""),
        ("int8", "dp_shard=4"),
        ("int8", "dp_replicate=2 dp_shard=2"),
    ],
)
def test_a_slot_per_node_has_the_bits_of_one_process(ranks: Pool, kind: str, layout: str) -> None:
    # Step 5 is skipped; steps 3 and 6 have 6 microbatches for 4 ranks.
    alone = {"kind": kind, "compress": {"slots": 2}}
    expected = ranks.run(train, nproc=1, args=(1, 7, None, 5, alone))[0][1]
    options = {"kind": kind, "layout": layout, "compress": BETWEEN}
    for found in ranks.run(train_on_nodes, nproc=4, args=(BLOCK, 1, 7, None, 5, options)):
        assert are_equal(found, expected)


@pytest.mark.parametrize("mode", ["full", "sharded"])
def test_a_run_goes_on_with_other_ranks_per_slot(ranks: Pool, tmp_path: Path, mode: str) -> None:
    alone = {"compress": {"slots": 2}}
    expected = ranks.run(train, nproc=1, args=(1, 8, None, 3, alone))[0][1]
    options = {"checkpoint_mode": mode, "compress": BETWEEN}
    ranks.run(train_on_nodes, nproc=4, args=(BLOCK, 1, 2, str(tmp_path), 3, options))
    # The skipped step comes first after the start, so what was loaded is saved again.
    ranks.run(train_on_nodes, nproc=4, args=(BLOCK, 3, 3, str(tmp_path), 3, options))
    ranks.run(train, nproc=1, args=(4, 5, str(tmp_path), 3, {"checkpoint_mode": mode} | alone))
    ranks.run(train_on_nodes, nproc=2, args=((0, 1), 6, 6, str(tmp_path), 3, options))
    shared = {**options, "layout": "dp_shard=4"}
    for found in ranks.run(train_on_nodes, nproc=4, args=(BLOCK, 7, 8, str(tmp_path), 3, shared)):
        assert are_equal(found, expected)


REFUSALS: dict[str, tuple[tuple[int, ...], dict[str, Any], str]] = {
    "one node": ((0, 0), {}, "nothing would be.*PL966"),
    "one rank": ((0,), {}, "there is one rank.*PL966"),
    "one and three": ((0, 1, 1, 1), {}, "on nodes 0, 1, 1, 1.*slots to 4.*PL960"),
    "round-robin": ((0, 1, 0, 1), {}, "on nodes 0, 1, 0, 1.*slots to 4.*PL960"),
    "a slot over two nodes": ((0, 0, 1, 1), {"slots": 1}, "slots to 2.*PL960"),
    "slots that ranks cannot share": ((0, 0, 1, 1), {"slots": 3}, "slots to 2.*PL960"),
    "links without a kind": ((0, 0), {"kind": "none"}, "links=between_nodes.*PL962"),
}


@pytest.mark.parametrize("name", list(REFUSALS))
def test_what_cannot_be_shared_is_refused(ranks: Pool, name: str) -> None:
    nodes, settings, message = REFUSALS[name]
    options = {"compress": {**BETWEEN, **settings}}
    with pytest.raises(RankError) as raised:
        ranks.run(train_on_nodes, nproc=len(nodes), args=(nodes, 1, 1, None, 0, options))
    assert re.search(message, str(raised.value), re.DOTALL), str(raised.value)
    assert all(isinstance(cause, PacelineError) for cause in raised.value.causes.values())


def list_warnings(world: Any, nodes: tuple[int, ...], slots: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("paceline.train.compressing")
    log.addHandler(handler)
    try:
        with claim_node(nodes[world.rank]):
            build(compress={**BETWEEN, "slots": slots})
    finally:
        log.removeHandler(handler)
    return lines


def test_links_that_make_no_difference_are_told(ranks: Pool) -> None:
    for nodes, slots, message in (((0, 0), 2, "nothing crosses nodes"), ((0, 1), 2, "no ranks share one")):
        lines = ranks.run(list_warnings, args=(nodes, slots))
        assert len(lines[0]) == 1
        assert message in lines[0][0]
        assert lines[1] == []
    assert ranks.run(list_warnings, nproc=4, args=(BLOCK, 2))[0] == []
