"""The detection of ranks that do not see the run's folder of rank 0."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.train.state import folder_view
from paceline.train.state.folder_view import FolderView, check_view, find_view
from tests.dist.pool import Pool


def find(world: Any, folders: list[str]) -> FolderView | str:
    folder_view._APPEARS_S = 0.1
    folder = Path(folders[world.rank])
    try:
        view = find_view(world, folder)
        check_view(world, view, folder, is_sharded=False)
        return view
    except PacelineError as error:
        return str(error)
    finally:
        folder_view._APPEARS_S = 2.0


def test_a_common_folder_is_seen_by_all(ranks: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".seen-by-0-of-a-killed-start").touch()
    # The second path leads to the same folder, as a second mount would.
    (tmp_path / "link").symlink_to(folder)
    found = ranks.run(find, 2, ([str(folder), str(tmp_path / "link")],))
    assert found == [FolderView(True)] * 2
    assert list(folder.iterdir()) == []


def test_ranks_with_another_folder_are_found(ranks: Pool, tmp_path: Path) -> None:
    found = ranks.run(find, 3, ([str(tmp_path / name) for name in ("a", "b", "a")],))
    assert [each.sees for each in found] == [True, False, True]
    assert [len(each.blind) for each in found] == [1, 1, 1]
    assert list((tmp_path / "a").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_reported_on_all(ranks: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = ranks.run(find, 2, ([str(tmp_path / "file" / "run"), str(tmp_path / "run")],))
    assert told[0] == told[1]
    assert "[PL532]" in told[0]


@pytest.mark.parametrize("is_main", [True, False])
def test_one_disk_is_named_on_rank_0_and_refused_for_shares(
    is_main: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    world: Any = type("World", (), {"is_main": is_main})
    check_view(world, FolderView(True), Path("run"), is_sharded=True)
    view = FolderView(is_main, ("node1",))
    with pytest.raises(PacelineError, match=r"ranks on node1 do not see run as rank 0 does.*PL553"):
        check_view(world, view, Path("run"), is_sharded=True)
    assert caplog.records == []
    check_view(world, view, Path("run"), is_sharded=False)
    assert [record.getMessage().endswith("[PL558]") for record in caplog.records] == [True] * is_main
