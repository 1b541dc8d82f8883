"""Three nodes with disks of their own, as namespaces: that of rank 0 has the checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.checkpoint import find_checkpoint, hash_stored, list_at, open_usable, verify
from paceline.checkpoint.manifest import read_manifest
from tests.launching.launched import Launched, paceline_run
from tests.launching.nodes import Nodes, why_no_nodes
from tests.train.cases import text_recipe

STEPS = 120
_LIMIT_S = 200

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture(autouse=True, scope="module")
def _nodes_can_be_made() -> None:
    if reason := why_no_nodes():
        pytest.skip(reason)


class Cluster:
    """Nodes of which each sees a disk of its own at one and the same path."""

    def __init__(self, folder: Path, nodes: Nodes, recipe: Path) -> None:
        self.folder, self.nodes, self.recipe = folder, nodes, recipe
        self.num_starts = 0
        (folder / "mount").mkdir()
        for number in range(3):
            (folder / f"disk-{number}").mkdir()

    def run_folder(self, number: int) -> Path:
        return self.folder / f"disk-{number}" / "run"

    def start(self, number: int, disk: int, words: Sequence[str]) -> Launched:
        """Start a node's launcher; the node ends with it, as in a power cut."""
        self.num_starts += 1
        mount = f'mount --bind {self.folder}/disk-{disk} {self.folder}/mount; exec "$@"'

        def around(command: Sequence[str]) -> list[str]:
            inner = ["sh", "-c", mount, "sh", *command]
            return self.nodes.powered(self.nodes.command(number, inner))

        settings = {
            "train.steps": STEPS,
            "train.timeout_s": 20,
            "checkpoint.every": 10,
        }
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        train = ["-m", "paceline", "train", str(self.recipe), "--out", f"{self.folder}/mount/run", *sets]
        command = paceline_run("--nproc-per-node", "1", *words, *train)
        return Launched(self.folder / f"start-{self.num_starts}", command, around=around)

    def wait_for(self, step: int, jobs: Sequence[Launched]) -> int:
        """Wait for a checkpoint; return the number of the disk that has it."""
        deadline = time.monotonic() + _LIMIT_S
        while True:
            for number in range(3):
                if (self.run_folder(number) / "checkpoints" / f"step-{step:08d}").exists():
                    return number
            assert time.monotonic() < deadline, "\n".join(job.text for job in jobs)
            time.sleep(0.05)

    def check_result(self, folder: Path, undisturbed: str) -> None:
        """Check that the last checkpoint has the bits of an undisturbed run."""
        last = list_at(folder)[-1]
        assert last.name == f"step-{STEPS:08d}"
        assert verify(last) == []
        assert hash_stored(open_usable(last).model) == undisturbed
        assert read_manifest(last).identity["generation"] >= 2
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    path = folder / "recipe.toml"
    lines = []
    for section, table in text_recipe(folder / "text").items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("alone") / "run"
    command = [sys.executable, "-m", "paceline", "train", str(recipe), "--out", str(out)]
    done = subprocess.run(
        [*command, "--set", f"train.steps={STEPS}"], capture_output=True, text=True, timeout=_LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    return hash_stored(open_usable(find_checkpoint(out)).model)


@pytest.fixture
def cluster(tmp_path: Path, recipe: Path) -> Iterator[Cluster]:
    with Nodes(3) as nodes:
        yield Cluster(tmp_path, nodes, recipe)


def elastic(host: int, nnodes: str = "2:3") -> list[str]:
    """Two or three nodes that meet at one of them."""
    conf = "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    words = ["--nnodes", nnodes, "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "apart"]
    return [*words, "--rdzv-endpoint", f"node{host}:29501", conf]


def given(rank: int) -> list[str]:
    return ["--nnodes", "3", "--node-rank", str(rank), "--master-addr", "node0", "--master-port", "29600"]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_is_lost_for_good(cluster: Cluster, undisturbed: str, lost: int) -> None:
    """Without the disk of rank 0 the run ends; without another one it goes on."""
    stay = [number for number in range(3) if number != lost]
    words = [*elastic(host=stay[-1]), "--join-timeout", "10"]
    with ExitStack() as held:
        jobs = [held.enter_context(cluster.start(number, number, words)) for number in range(3)]
        main = cluster.wait_for(20, jobs)
        lost_job = jobs[main if lost == 0 else next(n for n in range(3) if n != main)]
        lost_job.process.kill()
        staying = [job for job in jobs if job is not lost_job]
        codes = [job.wait(_LIMIT_S) for job in staying]
    text = "\n".join(job.text for job in staying)
    if lost == 0:
        assert 0 not in codes, text
        assert "[PL550]" in text
    else:
        assert codes == [0, 0], text
        cluster.check_result(cluster.run_folder(main), undisturbed)


def test_nodes_that_are_swapped_are_refused_until_they_are_back(cluster: Cluster, undisturbed: str) -> None:
    def start(disks: Sequence[int]) -> str:
        with ExitStack() as held:
            jobs = [held.enter_context(cluster.start(n, disks[n], given(n))) for n in range(3)]
            for job in jobs:
                job.wait(_LIMIT_S)
            return "\n".join(job.text for job in jobs)

    with ExitStack() as held:
        jobs = [held.enter_context(cluster.start(n, n, given(n))) for n in range(3)]
        assert cluster.wait_for(20, jobs) == 0
    assert "[PL550]" in start([2, 0, 1])
    assert "[PL550]" not in start([0, 1, 2])
    cluster.check_result(cluster.run_folder(0), undisturbed)
