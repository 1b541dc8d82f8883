"""A run's folder: whose it is, one run at a time, and nothing written where it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.recipe import load_recipe
from paceline.recipe.load import parse_recipe
from paceline.recipe.schema import Recipe
from paceline.train.run_folder import check_run_folder, claim_run_folder
from tests.train.cases import digits_recipe


def recipe(*settings: str) -> Recipe:
    return parse_recipe(digits_recipe(), settings)


def claim(folder: Path, *settings: str) -> None:
    claim_run_folder(folder, recipe(*settings)).close()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_folder_gets_the_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    with claim_run_folder(folder, recipe()):
        assert load_recipe(folder / "recipe.toml") == recipe()
        assert (folder / ".lock").read_text() == f"{os.getpid()}\n"
    assert sorted(contents(folder)) == [".lock", "recipe.toml"]


@pytest.mark.parametrize(
    "setting",
    [
        "train.steps=99",
        "layout.dp_replicate=3",
        "checkpoint.every=1",
        "ddp.bucket_cap_mb=5.0",
        "train.compile=true",
    ],
)
def test_a_resumable_key_may_change_and_is_noted(tmp_path: Path, setting: str) -> None:
    claim(tmp_path)
    check_run_folder(tmp_path, recipe(setting))
    claim(tmp_path, setting)
    assert load_recipe(tmp_path / "recipe.toml") == recipe(setting)


@pytest.mark.parametrize(
    ("setting", "difference"),
    [
        ("train.seed=5", "train.seed: 0 there, 5 here"),
        ("train.microbatch_size=10", "train.microbatch_size: 20 there, 10 here"),
        ("optimizer.lr=0.5", "optimizer.lr: 0.1 there, 0.5 here"),
        ("model.width=8", "model.width: 4 there, 8 here"),
    ],
)
def test_another_recipes_folder_is_refused_with_the_difference(
    tmp_path: Path, setting: str, difference: str
) -> None:
    claim(tmp_path)
    before = contents(tmp_path)
    for refuse in (check_run_folder, claim_run_folder):
        with pytest.raises(PacelineError) as caught:
            refuse(tmp_path, recipe(setting, "train.steps=50"))
        assert caught.value.code == "PL530"
        assert difference in caught.value.saw
        assert "train.steps" not in caught.value.saw
    assert contents(tmp_path) == before
    claim(tmp_path)


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    with claim_run_folder(tmp_path, recipe()):
        before = contents(tmp_path)
        for refuse in (check_run_folder, claim_run_folder):
            with pytest.raises(PacelineError) as caught:
                refuse(tmp_path, recipe())
            assert caught.value.code == "PL533"
            assert f"in use by another run (process {os.getpid()})" in caught.value.saw
        assert contents(tmp_path) == before
    claim(tmp_path)


def test_a_killed_run_leaves_the_folder_free(tmp_path: Path) -> None:
    """The lock goes with the process, whatever is in the file."""
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from tests.train.test_run_folder import recipe\n"
        "from paceline.train.run_folder import claim_run_folder\n"
        "held = claim_run_folder(Path(sys.argv[1]), recipe())\nos.kill(os.getpid(), 9)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, check=False, timeout=60)
    assert done.returncode == -9
    assert (tmp_path / ".lock").read_text().strip().isdigit()
    check_run_folder(tmp_path, recipe())
    claim(tmp_path)


def test_looking_makes_nothing(tmp_path: Path) -> None:
    check_run_folder(tmp_path / "a" / "b", recipe())
    assert not (tmp_path / "a").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    for refuse in (check_run_folder, claim_run_folder):
        with pytest.raises(PacelineError, match="PL532"):
            refuse(tmp_path / "runs" / "demo", recipe())
    assert (tmp_path / "runs").read_text() == ""


def test_a_folder_that_may_not_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions don't hold back the superuser, whom tests often run as.
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PacelineError, match="PL532"):
        check_run_folder(tmp_path / "demo", recipe())
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PacelineError, match=r"Permission denied.*--out.*PL532"):
        claim_run_folder(tmp_path / "demo", recipe())


def test_a_full_disk_is_told_and_the_lock_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(PacelineError, match=r"No space left on device.*PL532"):
            claim_run_folder(tmp_path, recipe())
    claim(tmp_path)
