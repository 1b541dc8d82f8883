"""The detection of ranks that see the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.train.state import disks as disks_of_ranks
from paceline.train.state.disks import Disks, find_disks, find_domain
from tests.dist.pool import Pool


def find(world: Any, folders: list[str]) -> Disks | str:
    disks_of_ranks._APPEARS_S = 0.1
    folder = Path(folders[world.rank])
    try:
        return find_disks(world, folder, lambda: folder.mkdir(parents=True, exist_ok=True))
    except PacelineError as error:
        return str(error)
    finally:
        disks_of_ranks._APPEARS_S = 2.0


def test_a_common_folder_is_one_disk(ranks: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".seen-by-0-of-a-killed-start").touch()
    # The second path leads to the same folder, as a second mount would.
    (tmp_path / "link").symlink_to(folder)
    found = ranks.run(find, 2, ([str(folder), str(tmp_path / "link")],))
    assert [each.is_common for each in found] == [True, True]
    assert [each.leads for each in found] == [True, False]
    assert list(folder.iterdir()) == []


def test_folders_of_their_own_and_one_for_two(ranks: Pool, tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("a", "b", "b", "c")]
    found = ranks.run(find, 4, (names,))
    assert [disk.ranks for disk in found[0].disks] == [(0,), (1, 2), (3,)]
    assert len({disk.name for disk in found[0].disks}) == 3
    assert [each.own for each in found] == [0, 1, 1, 2]
    assert [each.leads for each in found] == [True, True, False, True]
    assert [list(Path(name).iterdir()) for name in names] == [[], [], [], []]


def see_in_one_direction(world: Any, folder: str) -> Disks | str:
    """Rank 2 sees the files of both others, and rank 1 its own alone."""
    if world.rank == 2:

        def both(at: Path, names: Any) -> frozenset[int]:
            return frozenset(names)

        disks_of_ranks._list_seen, before = both, disks_of_ranks._list_seen
        try:
            return find(world, [f"{folder}/{rank}" for rank in range(3)])
        finally:
            disks_of_ranks._list_seen = before
    return find(world, [f"{folder}/{rank}" for rank in range(3)])


def test_a_folder_that_is_seen_in_one_direction_is_refused(ranks: Pool, tmp_path: Path) -> None:
    told = ranks.run(see_in_one_direction, 3, (str(tmp_path),))
    for text in told:
        assert "Rank 2 on " in text
        assert "the files of ranks 0-2, and rank 0 on " in text
        assert "[PL553]" in text


def test_a_folder_that_can_not_be_made_on_one_node_is_reported_on_all(ranks: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = ranks.run(find, 2, ([str(tmp_path / "run"), str(tmp_path / "file" / "run")],))
    assert told[0] == told[1]
    assert "[PL532]" in told[0]
    assert "(rank 1 on " in told[0]


@pytest.mark.parametrize(
    ("host", "environ", "domain"),
    [
        ("r12n03", {}, "r12n"),
        ("node3.cluster.org", {}, "node"),
        ("node3", {"SLURM_TOPOLOGY_ADDR": "root.leaf2.node3"}, "root.leaf2"),
        ("node3", {"SLURM_TOPOLOGY_ADDR": "node3"}, "node"),
    ],
)
def test_what_fails_together_with_a_node(host: str, environ: dict[str, str], domain: str) -> None:
    assert find_domain(host, environ) == domain
