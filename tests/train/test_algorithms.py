"""Training by every algorithm that its ranks can use has the same bits; others are refused or reported."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.checkpoint import hash_tensors
from paceline.comm.links import find_nodes
from paceline.comm.links_file import save_links
from paceline.errors import PacelineError
from paceline.recipe.algorithm import AlgorithmSection
from paceline.train.algorithms import check_algorithms
from paceline.train.trainer import Trainer
from tests.comm.measured import make_links
from tests.comm.test_by_node import claim_node
from tests.dist.pool import Pool, RankError
from tests.train.test_compress import gather_whole

ALL = {
    "rule": {},
    "direct": {"exact_sum": "direct", "agreement": "direct", "broadcast": "pipeline"},
    "library": {"agreement": "library", "broadcast": "library"},
    "board": {"exact_sum": "shared-memory", "agreement": "board"},
}


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def build(algorithm: Any, layout: str, **settings: Any) -> Trainer:
    torch.manual_seed(torch.distributed.get_rank())  # rank 0's weights are sent to all
    return Trainer(
        nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 4)),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        layout=layout,
        microbatch_size=1,
        algorithm=algorithm,
        **settings,
    )


def train(
    world: Any, ways: dict[str, dict[str, str]], layout: str, nodes: tuple[int, ...] = ()
) -> dict[str, tuple[str, list[str]]]:
    """Return the hash of the weights and the lines of the log, by name of the ways."""
    samples = torch.randn(24, 8, generator=torch.Generator().manual_seed(7))
    found: dict[str, tuple[str, list[str]]] = {}
    for name, algorithm in ways.items():
        kept, logger = Kept(), logging.getLogger("paceline")
        before = logger.level
        logger.addHandler(kept)
        logger.setLevel(logging.INFO)
        try:
            with claim_node(nodes[world.rank] if nodes else 0):
                trainer = build(algorithm, layout)
                loader = trainer.loader(samples, global_batch_size=8, epochs=1)
                for share in loader:
                    trainer.step(share)
                tensors = {key: gather_whole(p) for key, p in trainer.model.named_parameters()}
                found[name] = hash_tensors(tensors), kept.lines
                trainer.close()
        finally:
            logger.removeHandler(kept)
            logger.setLevel(before)
    return found


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_every_algorithm_gives_the_same_bits(ranks: Pool, layout: str) -> None:
    ways = ALL if layout.startswith("dp_replicate") else ALL | {"board": {"exact_sum": "shared-memory"}}
    main, other = ranks.run(train, 2, (ways, layout))
    for rank in (main, other):
        assert {hash for hash, _ in rank.values()} == {rank["rule"][0]}
    told = [line for line in main["rule"][1] if line.startswith("algorithm:")]
    assert told == [
        "algorithm: exact_sum, agreement, broadcast by the fixed rule, because no file of links is given "
        "(--links FILE)"
    ]
    assert any("2 ranks of one machine add in shared memory" in line for line in main["rule"][1])
    assert not any("shared memory" in line for line in main["direct"][1])
    assert "algorithm: exact_sum=direct, agreement=direct, broadcast=pipeline" in main["direct"][1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_replicate=4", "dp_replicate=2 dp_shard=2"])
def test_two_nodes_have_the_same_bits_by_node_and_by_messages(ranks: Pool, layout: str) -> None:
    ways = {name: {"exact_sum": name} for name in ("by-node", "direct")}
    found = ranks.run(train, 4, ({"rule": {}, **ways}, layout, (0, 0, 1, 1)))
    assert all(len({hash for hash, _ in rank.values()}) == 1 for rank in found)


def write_links(world: Any, folder: str, host: str) -> None:
    hosts, nodes = find_nodes(world)
    if world.is_main:
        links = make_links(nodes)
        assert len(hosts) == 1
        save_links(replace(links, hosts=(host or hosts[0],)), Path(folder) / "links.json")


def test_measured_links_decide_and_the_log_has_their_times(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(write_links, 2, (str(tmp_path), ""))
    links = str(tmp_path / "links.json")
    main, other = ranks.run(train, 2, ({"rule": {}, "links": {"links": links}}, "dp_replicate=2"))
    assert main["links"][0] == other["rule"][0]
    told = [line for line in main["links"][1] if line.startswith("algorithm:")]
    assert told[0] == f"algorithm: exact_sum, agreement, broadcast by times predicted from {links}"
    assert [line.partition("=")[0] for line in told[1:]] == ["algorithm: broadcast", "algorithm: exact_sum"]
    assert all("predicted for" in line and " ms, " in line for line in told[1:])
    assert not [line for line in other["links"][1] if line.startswith("algorithm:")], "rank 0 alone"


def test_links_of_other_hosts_are_reported_and_not_used(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(write_links, 2, (str(tmp_path), f"not-{socket.gethostname()}"))
    ways = {"links": {"links": str(tmp_path / "links.json")}}
    main, _ = ranks.run(train, 2, (ways, "dp_replicate=2"))
    told = [line for line in main["links"][1] if line.startswith("algorithm:")]
    assert "PL951" in told[0]
    assert told[1].endswith("by the fixed rule")
    assert len(told) == 2


def build_only(world: Any, algorithm: dict[str, str], settings: dict[str, Any]) -> None:
    build(algorithm, **{"layout": "dp_replicate=2"} | settings)


@pytest.mark.parametrize(
    ("algorithm", "settings", "code", "seen"),
    [
        ({"exact_sum": "by-node"}, {}, "PL968", "2 ranks on 1 machines"),
        ({"exact_sum": "direct"}, {"reduction": "fast"}, "PL969", "reduction='fast'"),
        ({"agreement": "board"}, {"layout": "dp_shard=2"}, "PL968", "agreement=board"),
        ({"agreement": "tree"}, {}, "PL101", "algorithm.agreement"),
        ({"links": "nowhere.json"}, {}, "PL950", "nowhere.json"),
    ],
)
def test_what_cannot_be_is_refused(
    ranks: Pool, algorithm: dict[str, str], settings: dict[str, Any], code: str, seen: str
) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(build_only, 2, (algorithm, settings))
    assert code in str(caught.value)
    assert seen in str(caught.value)


class OnCuda:
    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("section", "code", "seen"),
    [
        ({"broadcast": "pipeline"}, "PL968", "--algorithm broadcast=library"),
        ({"exact_sum": "shared-memory"}, "PL968", "exact_sum=direct"),
        ({"links": "links.json"}, "PL968", "NCCL"),
        (
            {"links": "a", "exact_sum": "direct", "agreement": "library", "broadcast": "library"},
            "PL969",
            "left",
        ),
    ],
)
def test_nccl_keeps_its_own(section: dict[str, str], code: str, seen: str) -> None:
    with pytest.raises(PacelineError) as caught:
        check_algorithms(AlgorithmSection(**section), OnCuda(), reduction="exact")  # type: ignore[arg-type]
    assert caught.value.code == code
    assert seen in str(caught.value)
