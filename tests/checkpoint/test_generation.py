"""Starts of a run that do not know of each other: only the newest of them commits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.checkpoint import CheckpointFolder, files
from paceline.checkpoint.content import PreparedShare, prepare_whole, write_files
from paceline.checkpoint.generation import PREFIX, begin_generation, newest_generation
from paceline.checkpoint.manifest import read_manifest
from paceline.checkpoint.writing.joint import JointSave, Order
from paceline.errors import PacelineError
from tests.checkpoint.states import RECIPE, list_names, make_model, make_optimizer, make_state, save_content


def prepare(step: int) -> PreparedShare:
    return prepare_whole(make_model(step), make_optimizer(step), make_state(step), RECIPE)


def save(run: Path, step: int, generation: int) -> None:
    """Save a checkpoint as one start does."""
    folder = CheckpointFolder(run, keep=9, generation=generation)
    content = prepare(step)
    with folder.begin(step, num_bytes=1000, identity={"generation": generation}) as saving:
        saving.commit(write_files(content.list_files(), saving.folder))


def save_jointly(run: Path, step: int, generation: int) -> None:
    """Save a checkpoint as a rank does in the background."""
    content = prepare(step)
    order = Order(step, f"{generation:04d}", 1, {"generation": generation}, content.num_bytes)
    folder = CheckpointFolder(run, keep=9, generation=generation)
    joint = JointSave(folder, order, 0, None, lambda error: error)
    joint.start(content.list_files())
    outcome = joint.wait()
    assert outcome is not None
    if outcome.error is not None:
        raise outcome.error


def generations(run: Path) -> dict[int, int]:
    """Return the generation of each committed step."""
    steps = CheckpointFolder(run, keep=9).steps()
    return {step: read_manifest(path).identity["generation"] for step, path in steps.items()}


def test_each_start_has_a_number_of_its_own(tmp_path: Path) -> None:
    assert newest_generation(tmp_path / "missing") == 0
    assert [begin_generation(tmp_path, 1) for _ in range(3)] == [1, 2, 3]
    assert begin_generation(tmp_path, 7) == 7, "checkpoints of a run from before may have numbers"
    assert begin_generation(tmp_path, 2) == 8
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}00000008"]


def test_starts_at_the_same_time_never_share_a_number(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: begin_generation(tmp_path, 1), range(24)))
    assert len(set(numbers)) == 24
    assert newest_generation(tmp_path) == max(numbers)


@pytest.mark.parametrize("write", [save, save_jointly])
def test_an_older_start_commits_nothing_once_a_newer_one_has_begun(
    tmp_path: Path, write: Callable[[Path, int, int], None]
) -> None:
    """The newer one begins before each single operation of the older one's save in turn."""
    number, outcomes = 0, []
    while True:
        number += 1
        run = tmp_path / str(number)
        run.mkdir()
        old = begin_generation(run, 1)
        write(run, 10, old)
        count, seen = 0, dict[int, int]()

        def hook(
            operation: str, path: Path, start: int, num_bytes: int, run: Path = run, number: int = number
        ) -> None:
            nonlocal count, seen
            count += 1
            if count == number:
                begin_generation(run, 1)
                seen = generations(run)

        code = ""
        with files.inject(hook):
            try:
                write(run, 20, old)
            except PacelineError as error:
                code = error.code
        if count < number:
            assert code == ""
            break
        assert generations(run) == seen, f"committed behind operation {number}, {code}"
        assert code in ("", "PL383")
        assert (code == "") == (20 in seen), f"it learns of it, at operation {number}"
        outcomes.append(20 in seen)
        # The newer one takes the step again, and there is one commit of it.
        write(run, 20, 2)
        assert generations(run) == {10: 1, 20: 2}
        assert [name for name in list_names(run) if name.startswith((".tmp", ".trash"))] == []
    assert sorted(outcomes) == outcomes, "first never, and from the commit on always"
    assert outcomes.count(False) > 5
    assert True in outcomes


def test_without_the_rule_it_would_commit(tmp_path: Path) -> None:
    """Or the test above could not fail."""
    old = begin_generation(tmp_path, 1)
    assert begin_generation(tmp_path, 1) > old
    with pytest.raises(PacelineError) as raised:
        save(tmp_path, 10, old)
    assert raised.value.code == "PL383"
    assert "Start 2 of the run" in raised.value.saw
    save_content(CheckpointFolder(tmp_path, keep=9), 10, prepare(10), identity={"generation": old})
    assert generations(tmp_path) == {10: 1}
