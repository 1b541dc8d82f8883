"""Three nodes with disks of their own, as namespaces: nodes are lost, moved, emptied, and files altered."""

from __future__ import annotations

import json
import shutil
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

    def __init__(self, folder: Path, nodes: Nodes, recipe: Path, mode: str) -> None:
        self.folder, self.nodes, self.recipe, self.mode = folder, nodes, recipe, mode
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
            "checkpoint.mode": f'"{self.mode}"',
        }
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        train = ["-m", "paceline", "train", str(self.recipe), "--out", f"{self.folder}/mount/run", *sets]
        command = paceline_run("--nproc-per-node", "1", *words, *train)
        return Launched(self.folder / f"start-{self.num_starts}", command, around=around)

    def wait_for(self, step: int, disk: int, jobs: Sequence[Launched]) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not (self.run_folder(disk) / "checkpoints" / f"step-{step:08d}").exists():
            assert time.monotonic() < deadline, "\n".join(job.text for job in jobs)
            time.sleep(0.05)

    def check_result(self, folders: Sequence[Path], undisturbed: str) -> None:
        """Check that the last checkpoint, joined from the disks, has the bits of an undisturbed run."""
        joined = self.folder / "joined" / f"step-{STEPS:08d}"
        joined.mkdir(parents=True)
        for folder in folders:
            for file in list_at(folder)[-1].iterdir():
                shutil.copy(file, joined)
        assert verify(joined) == []
        assert hash_stored(open_usable(joined).model) == undisturbed
        assert read_manifest(joined).identity["generation"] >= 2
        for folder in folders:
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
def cluster(tmp_path: Path, recipe: Path, mode: str) -> Iterator[Cluster]:
    with Nodes(3) as nodes:
        yield Cluster(tmp_path, nodes, recipe, mode)


def elastic(host: int, nnodes: str = "2:3") -> list[str]:
    """Two or three nodes that meet at one of them."""
    conf = "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    words = ["--nnodes", nnodes, "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "apart"]
    return [*words, "--rdzv-endpoint", f"node{host}:29501", conf]


@pytest.mark.parametrize(("lost", "mode"), [(0, "full"), (0, "sharded"), (1, "sharded"), (2, "full")])
def test_a_node_is_lost_for_good(cluster: Cluster, undisturbed: str, lost: int) -> None:
    stay = [number for number in range(3) if number != lost]
    words = elastic(host=stay[-1])
    with ExitStack() as held:
        jobs = [held.enter_context(cluster.start(number, number, words)) for number in range(3)]
        cluster.wait_for(20, stay[0], jobs)
        jobs[lost].process.kill()
        codes = [jobs[number].wait(_LIMIT_S) for number in stay]
        assert codes == [0, 0], "\n".join(jobs[number].text for number in stay)
    cluster.check_result([cluster.run_folder(number) for number in stay], undisturbed)


@pytest.mark.parametrize(
    ("what", "mode"),
    [("swapped", "full"), ("swapped", "sharded"), ("emptied", "full"), ("altered", "sharded")],
)
def test_nodes_come_back_changed(cluster: Cluster, undisturbed: str, what: str) -> None:
    def words(rank: int) -> list[str]:
        return ["--nnodes", "3", "--node-rank", str(rank), "--master-addr", "node0", "--master-port", "29600"]

    with ExitStack() as held:
        jobs = [held.enter_context(cluster.start(number, number, words(number))) for number in range(3)]
        cluster.wait_for(20, 0, jobs)
    disks = [2, 0, 1] if what == "swapped" else [0, 1, 2]
    if what == "emptied":
        shutil.rmtree(cluster.run_folder(0))
    elif what == "altered":
        for path in list_at(cluster.run_folder(0)):
            for file in path.glob("*.safetensors"):
                data = bytearray(file.read_bytes())
                data[-1] ^= 1
                file.write_bytes(data)
    with ExitStack() as held:
        jobs = [held.enter_context(cluster.start(n, disks[n], words(n))) for n in range(3)]
        codes = [job.wait(_LIMIT_S) for job in jobs]
        assert codes == [0, 0, 0], "\n".join(job.text for job in jobs)
    cluster.check_result([cluster.run_folder(number) for number in range(3)], undisturbed)


@pytest.mark.parametrize("mode", ["sharded"])
def test_a_node_is_started_again_with_an_empty_disk(cluster: Cluster, undisturbed: str) -> None:
    words = elastic(host=2, nnodes="3")
    with ExitStack() as held:
        jobs = [held.enter_context(cluster.start(n, n, words)) for n in range(3)]
        cluster.wait_for(20, 2, jobs)
        jobs[1].process.kill()
        shutil.rmtree(cluster.folder / "disk-1")
        (cluster.folder / "disk-1").mkdir()
        jobs[1] = held.enter_context(cluster.start(1, 1, words))
        codes = [job.wait(_LIMIT_S) for job in jobs]
        assert codes == [0, 0, 0], "\n".join(job.text for job in jobs)
    cluster.check_result([cluster.run_folder(number) for number in range(3)], undisturbed)
