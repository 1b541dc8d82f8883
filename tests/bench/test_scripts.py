"""Real ranks of a script that is not changed, and of a recipe."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from paceline.bench.rank.timing import ALONE, WHOLE, TimeSettings
from paceline.bench.scaling import divide_step
from paceline.bench.starts import Measured
from paceline.errors import PacelineError
from tests.bench.recipes import tiny_recipe

SCRIPT = str(Path(__file__).parent / "scripts" / "train.py")
STEPS = 8


def test_steps_and_samples_are_those_of_the_script(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    job = Measured(words=(SCRIPT, "--clock", str(clock), "--pause-s", "0.03"))
    run = job.run(2, 1, TimeSettings(3, STEPS, 1, record_steps=4))
    for rank, times in enumerate(run.ranks):
        own = [float(line) for line in Path(f"{clock}-{rank}").read_text().split()]
        by_hand = (own[2 + STEPS] - own[2]) / STEPS
        assert times.block_s[WHOLE][0] == pytest.approx(by_hand, rel=0.05)
        assert times.samples[WHOLE] == [10.0], "the validation's batches do not count"
    assert run.samples == 20
    assert run.profile is not None
    parts, num_bytes, num_calls = divide_step(run.profile)
    assert sum(parts.values()) > 0.03
    assert num_calls >= 1
    assert num_bytes >= 4 * run.ranks[0].num_parameters


def test_a_script_that_starts_its_ranks_itself_is_timed_in_ours(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = str(found.getsockname()[1])
    job = Measured(words=(str(Path(SCRIPT).with_name("spawned.py")), str(tmp_path), "2", port))
    run = job.run(2, 1, TimeSettings(3, 4, 1, (WHOLE, ALONE)))
    for times in run.ranks:
        assert times.left_out
        assert len(times.block_s[ALONE]) == 1
        assert times.samples[WHOLE] == [7.0]
    steps, parents = zip(*((tmp_path / str(rank)).read_text().split() for rank in range(2)), strict=True)
    assert set(steps) <= {"13", "14"}, "the timer ends each rank after the steps that it needs"
    assert len(set(parents)) == 1
    with pytest.raises(PacelineError, match=r"starts 2 processes by itself, where 1 .*PL955") as caught:
        job.run(1, 1, TimeSettings(3, 4, 1))
    assert "WORLD_SIZE" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "samples"), [("no-loader", 7.0), ("by-hand", 7.0), ("accumulating", 30.0)])
def test_steps_of_compute_alone_communicate_nothing(kind: str, samples: float) -> None:
    run = Measured(words=(SCRIPT, "--kind", kind)).run(2, 1, TimeSettings(3, 4, 2, (WHOLE, ALONE)))
    for times in run.ranks:
        assert times.left_out
        assert times.samples == {WHOLE: [samples] * 2, ALONE: [samples] * 2}
        assert len(times.block_s[ALONE]) == 2


@pytest.mark.slow
def test_shards_cannot_compute_alone_and_short_scripts_say_how_short() -> None:
    sharded = Measured(words=(SCRIPT, "--kind", "shards")).run(2, 1, TimeSettings(3, 4, 1, (WHOLE, ALONE)))
    assert not any(times.left_out for times in sharded.ranks)
    short = Measured(words=(SCRIPT, "--kind", "short"))
    # 48 samples per rank in batches of 10: the last has 8.
    run = short.run(2, 1, TimeSettings(2, 100, 1))
    assert run.ranks[0].samples[WHOLE] == [pytest.approx((10 + 10 + 8) / 3)]
    with pytest.raises(
        PacelineError, match=r"(?s)5 optimizer steps of rank 0 .*rank 0 begins.*PL955"
    ) as caught:
        short.run(2, 1, TimeSettings(5, 10, 1))
    assert "--steps" in str(caught.value)


@pytest.mark.slow
def test_a_recipe_is_timed_like_a_script_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    run = Measured(recipe=recipe).run(2, 1, TimeSettings(3, 3, 2, (WHOLE, ALONE), record_steps=3))
    assert list(work.iterdir()) == []
    assert run.samples == 6
    assert run.ranks[0].gradient_bytes == 4 * run.ranks[0].num_parameters > 0
    assert all(times.left_out for times in run.ranks)
    assert run.profile is not None
    alone = Measured(recipe=recipe).run(1, 1, TimeSettings(3, 3, 1, threads=2))
    assert alone.samples == 6
    assert alone.ranks[0].moved_bytes > 2 * alone.ranks[0].gradient_bytes


@pytest.mark.slow
def test_workers_leave_a_port_of_the_scripts_own_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    job = Measured(words=(SCRIPT, "--kind", "workers", "--port", port))
    for num_ranks in (1, 2):
        assert job.run(num_ranks, 1, TimeSettings(1, 2, 1)).samples == 10 * num_ranks


def test_what_a_script_fails_of_is_said_in_words() -> None:
    failing = Measured(words=(SCRIPT, "--no-such-flag"))
    with pytest.raises(PacelineError, match=r"(?s)rank 0 exited with code 2.*PL955") as caught:
        failing.run(1, 1, TimeSettings(1, 1, 1))
    assert '"error"' not in str(caught.value)
