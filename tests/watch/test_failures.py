"""`paceline run` where ranks fail: a verdict where it was another rank's doing, else the crash as it is."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from paceline.launching import local
from paceline.launching.watcher import JobStuck
from paceline.watch.launcher.watcher import RankWatcher
from tests.launching.launched import Launched, paceline_run
from tests.launching.nodes import Nodes, why_no_nodes
from tests.watch.cases import FAULTY, Case
from tests.watch.judge import find_faults
from tests.watch.situations import line_of

pytestmark = pytest.mark.timeout(240)
FALL = Path(__file__).parent / "scripts" / "own" / "fall.py"
_END_S = 120.0
_CASES = ["rank0_helper", "sizes_last_batch", "exit_early", "script_ends_early", "killed", "exit_in_library"]


def at(mark: str) -> str:
    return f"fall.py:{line_of(FALL.read_text(), f'# {mark}')}"


def run(folder: Path, how: str, *flags: str, nproc: int = 2) -> Launched:
    words = ["--nproc-per-node", str(nproc), "--hang-after", "20", "--no-lint", *flags, str(FALL), how]
    return Launched(folder, paceline_run(*words))


@pytest.mark.parametrize("case", [case for case in FAULTY if case.script in _CASES], ids=lambda c: c.script)
def test_scripts_as_people_write_them(tmp_path: Path, case: Case) -> None:
    command = paceline_run("--nproc-per-node", str(case.nproc), "--hang-after", "20", str(case.path))
    with Launched(tmp_path, command) as job:
        code = job.wait(_END_S)
        assert find_faults(case, job.text, code) == [], job.text
        assert not job.find_left(5, ["torchinductor"])  # torch's own folder


def test_sizes_by_which_gloo_aborts_a_rank(tmp_path: Path) -> None:
    with run(tmp_path, "sizes") as job:
        assert job.wait(_END_S) == 1
        verdict = job.text[job.text.index("paceline: different sizes") :]
        first = verdict.splitlines()[0]
        assert first.endswith("[PL803]")
        assert "all_reduce number 4 of world" in first
        assert "rank 0 gives [2]" in first
        assert "rank 1 gives [30]" in first
        assert verdict.count(at("REDUCES")) >= 3
        assert "The ranks' output: " in verdict.splitlines()[-1]
        assert "[PL33" not in job.text
        assert not job.find_left(5)


@pytest.mark.parametrize("how", ["leave", "exit"])
def test_a_peer_that_ended_well_is_named_on_one_node(tmp_path: Path, how: str) -> None:
    with run(tmp_path, how, nproc=3) as job:
        assert job.wait(_END_S) == 1
        assert "rank 1 never reached all_reduce number 4 of world, where ranks 0 and 2 have" in job.text
        assert "it called sys.exit(0) at " in job.text
        assert (at("EXITS") in job.text) == (how == "exit")
        assert "[PL801]" in job.text
        assert "another node" not in job.text


def test_an_error_stays_the_last_message_and_the_peers_calls_are_reported(tmp_path: Path) -> None:
    with run(tmp_path, "error") as job:
        assert job.wait(_END_S) == 1
        verdict = job.text[job.text.index("paceline: rank 1 failed first") :]
        assert verdict.splitlines()[0].endswith("ValueError: no rows [PL330]")
        after = verdict[verdict.index("Meanwhile:") :]
        assert "rank 0 waited in all_reduce number 4 of world (float32 [8], sum)" in after
        assert at("REDUCES") in after
        assert "rank 1" not in after
        assert "[PL8" not in job.text


def test_a_timeout_of_torch_is_reported_as_the_hang_that_it_was(tmp_path: Path) -> None:
    with run(tmp_path, "sleep") as job:
        assert job.wait(_END_S) == 1
        verdict = job.text[job.text.index("paceline: rank 1 never reached all_reduce number 4") :]
        assert "asleep in time.sleep" in verdict.splitlines()[0]
        assert verdict.splitlines()[0].endswith("[PL800]")
        assert at("REDUCES") in verdict
        assert at("SLEEPS") in verdict


def test_an_error_that_a_mismatch_may_have_led_to(tmp_path: Path) -> None:
    with run(tmp_path, "broadcast and error") as job:
        assert job.wait(_END_S) == 1
        assert "rank 1 failed first" in job.text
        after = job.text[job.text.index("The ranks' collectives do not match either: ") :]
        assert "different sizes in broadcast number 4 of world" in after
        assert "rank 1 gives [8]" in after
        assert at("BROADCASTS") in after


def test_a_restart_reports_the_verdict_in_one_line_and_forgets_it(tmp_path: Path) -> None:
    with run(tmp_path, "once", "--max-restarts", "1") as job:
        assert job.wait(_END_S) == 0
        assert job.text.count("different sizes in all_reduce number 4 of world") == 1
        assert job.text.count("[PL803]") == 1
        assert "0 restarts left" in job.text


def test_a_job_that_leaves_by_exit_states_nothing(tmp_path: Path) -> None:
    with run(tmp_path, "nothing") as job:
        assert job.wait(_END_S) == 0
        assert "paceline:" not in job.text


@pytest.fixture
def nodes() -> Nodes:
    if reason := why_no_nodes():
        pytest.skip(reason)
    return Nodes(2)


def run_on_both(stack: ExitStack, nodes: Nodes, folder: Path, how: str) -> list[Launched]:
    jobs = []
    for node in range(2):
        flags = ["--nnodes", "2", "--nproc-per-node", "1", "--hang-after", "20"]
        meeting = ["--node-rank", str(node), "--master-addr", nodes.address(0)]
        command = paceline_run(*flags, *meeting, str(FALL), how)
        job = Launched(folder / str(node), command, around=partial(nodes.command, node))
        jobs.append(stack.enter_context(job))
    return jobs


def test_every_node_reports_a_mismatch_that_gloo_aborted_a_rank_for(tmp_path: Path, nodes: Nodes) -> None:
    with nodes, ExitStack() as stack:
        for job in run_on_both(stack, nodes, tmp_path, "sizes"):
            assert job.wait(_END_S) == 1
            assert "paceline: different sizes in all_reduce number 4 of world" in job.text
            assert "rank 0 gives [2]" in job.text
            assert "rank 1 gives [30]" in job.text


def test_a_peer_that_ended_on_another_node_is_named(tmp_path: Path, nodes: Nodes) -> None:
    with nodes, ExitStack() as stack:
        jobs = run_on_both(stack, nodes, tmp_path, "exit")
        assert jobs[0].wait(_END_S) == 1
        assert "rank 1 never reached all_reduce number 4 of world, where rank 0 has" in jobs[0].text
        assert at("EXITS") in jobs[0].text


def test_an_error_on_another_node_is_reported_here_too(tmp_path: Path, nodes: Nodes) -> None:
    with nodes, ExitStack() as stack:
        jobs = run_on_both(stack, nodes, tmp_path, "error")
        for job in jobs:
            assert job.wait(_END_S) == 1
            assert at("RAISES") in job.text
        assert (
            "It lost the connection to a peer: the cause is a rank that ended on another node" in jobs[0].text
        )
        assert "rank 1 failed with ValueError: no rows" in jobs[0].text
        assert "rank 1 failed first" in jobs[1].text
        assert "never started" not in jobs[1].text


def reduce_two_sizes(sizes: tuple[int, ...]) -> None:
    import torch
    import torch.distributed as dist

    import paceline

    world = paceline.start()
    dist.all_reduce(torch.ones(sizes[world.rank]))


def test_ranks_of_a_function() -> None:
    watcher = RankWatcher(20.0, keep_alive=False, report=print)
    with pytest.raises(JobStuck, match=r"different sizes in all_reduce .*\[PL803\]") as raised:
        local.launch(reduce_two_sizes, nproc=2, args=((3, 40),), watcher=watcher)
    assert "rank 0 gives [3] at " in raised.value.message.text
