"""`paceline run` on jobs whose collectives don't fit together and that go on: real ranks and launchers."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.launching.launched import Launched, paceline_run
from tests.launching.nodes import Nodes, why_no_nodes

pytestmark = pytest.mark.timeout(240)
SCRIPT = str(Path(__file__).parent / "scripts" / "own" / "goes_on.py")
HERE = 1 + next(n for n, line in enumerate(Path(SCRIPT).read_text().splitlines()) if line.endswith("# here"))
ONCE = str(Path(__file__).parent / "scripts" / "faulty" / "reduce_op_once.py")
REMAKES = str(Path(__file__).parent / "scripts" / "own" / "remakes.py")
_END_S = 90.0
# Much longer than it takes until calls are compared, so that the verdict ends it.
_LONG = "80"


def run(folder: Path, *words: str, script: str = SCRIPT) -> Launched:
    return Launched(folder, paceline_run("--nproc-per-node", "2", "--hang-after", "30", script, *words))


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("op", "PL805", ("rank 0 gives sum", "rank 1 gives max")),
        pytest.param(
            "dtype", "PL804", ("rank 0 gives float64", "rank 1 gives int64"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_job_that_goes_on_with_wrong_numbers_is_ended(
    tmp_path: Path, what: str, code: str, words: tuple[str, ...]
) -> None:
    with run(tmp_path, what, _LONG, "100") as job:
        assert job.wait(_END_S) == 1
        headline = next(line for line in job.text.splitlines() if line.endswith(f"[{code}]"))
        assert all(word in headline for word in words)
        assert f"goes_on.py:{HERE} in main" in headline
        assert "they continued" in job.text
        assert "is done" not in job.text
        assert not job.find_left(5)


def test_a_mismatch_that_came_once_is_reported_at_the_end(tmp_path: Path) -> None:
    with run(tmp_path, script=ONCE) as job:
        assert job.wait(_END_S) == 1
        assert "'worst'" in job.text  # the script came to its end
        assert "rank 0 gives sum" in job.text
        assert "rank 1 gives max" in job.text
        assert "[PL805]" in job.text


def test_many_calls_a_second_are_compared_too(tmp_path: Path) -> None:
    with run(tmp_path, "op", _LONG, "500") as job:
        assert job.wait(_END_S) == 1
        assert "[PL805]" in job.text


def test_calls_that_fit_end_no_job(tmp_path: Path) -> None:
    with run(tmp_path, "nothing", "8", "500") as job:
        assert job.wait(_END_S) == 0
        assert "[PL8" not in job.text


def test_groups_made_anew_under_one_name_end_no_job(tmp_path: Path) -> None:
    with run(tmp_path, script=REMAKES) as job:
        assert job.wait(_END_S) == 0
        assert "[PL80" not in job.text


@pytest.fixture
def nodes() -> Nodes:
    if reason := why_no_nodes():
        pytest.skip(reason)
    return Nodes(2)


@pytest.mark.parametrize(
    ("what", "seconds", "code"),
    [("op", _LONG, "[PL805]"), pytest.param("nothing", "8", "", marks=pytest.mark.slow)],
)
def test_nodes_compare_their_ranks_calls(
    tmp_path: Path, nodes: Nodes, what: str, seconds: str, code: str
) -> None:
    with nodes, ExitStack() as stack:
        jobs = []
        for node in range(2):
            flags = ["--nnodes", "2", "--nproc-per-node", "1", "--hang-after", "30"]
            meeting = ["--node-rank", str(node), "--master-addr", nodes.address(0)]
            command = paceline_run(*flags, *meeting, SCRIPT, what, seconds, "400")
            job = Launched(tmp_path / str(node), command, around=partial(nodes.command, node))
            jobs.append(stack.enter_context(job))
        for job in jobs:
            assert job.wait(_END_S) == (1 if code else 0)
            assert code in job.text
            assert ("[PL8" in job.text) == bool(code)
            if code:
                assert f"goes_on.py:{HERE} in main" in job.text
