"""The folder of a start, which several ranks of one node may check at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.train.state.run_start import _make_folder


def test_ranks_that_share_a_disk_check_the_folder_at_once(tmp_path: Path) -> None:
    def check(number: int) -> None:
        for _ in range(100):
            _make_folder(tmp_path / "run")

    with ThreadPoolExecutor(8) as ranks:
        list(ranks.map(check, range(8)))
    assert list((tmp_path / "run").iterdir()) == []
