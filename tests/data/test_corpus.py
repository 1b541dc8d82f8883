"""The choice of files that become the text, their order, and the held-out part."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.corpus import CorpusSplit, Piece, TextFile, find_text_files, split_files
from paceline.errors import PacelineError


def write(folder: Path, sizes: dict[str, int]) -> Path:
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    return folder


def names(files: list[TextFile]) -> list[str]:
    return [file.name for file in files]


def size(pieces: list[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


def test_globs_any_depth_in_order_of_relative_path(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": 1, "a/z.txt": 1, "a/deep/er/y.txt": 1, "a/other.md": 1})
    assert names(find_text_files([f"{tmp_path}/**/*.txt"])) == ["a/deep/er/y.txt", "a/z.txt", "b.txt"]
    assert names(find_text_files([f"{tmp_path}/*.txt"])) == ["b.txt"]
    assert names(find_text_files([f"{tmp_path}/**"])) == [
        "a/deep/er/y.txt",
        "a/other.md",
        "a/z.txt",
        "b.txt",
    ]


def test_a_file_counts_once_and_empty_files_not_at_all(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": 3, "empty.txt": 0})
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    files = find_text_files([f"{tmp_path}/a.txt", f"{tmp_path}/*.txt"])
    assert [(file.name, file.size_bytes) for file in files] == [("a.txt", 3)]


def test_paths_relative_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"x/a.txt": 1, "weird[1].txt": 1})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "x"))
    assert names(find_text_files(["x/*.txt"])) == ["a.txt"]
    assert names(find_text_files(["~/a.txt"])) == ["a.txt"]
    assert names(find_text_files(["weird[1].txt"])) == ["weird[1].txt"]
    assert all(file.path.is_absolute() for file in find_text_files(["x/*.txt"]))


def test_stdlib_is_source_without_tests_and_other_peoples_packages() -> None:
    found = names(find_text_files(["python-stdlib"]))
    assert {"argparse.py", "asyncio/events.py", "json/decoder.py"} <= set(found)
    assert found == sorted(found)
    assert all(name.endswith(".py") for name in found)
    parts = {part for name in found for part in name.split("/")[:-1]}
    assert not parts & {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    assert sum(file.size_bytes for file in find_text_files(["python-stdlib"])) > 5_000_000


@pytest.mark.parametrize("pattern", ["nothing-*.txt", "missing.txt", "folder", "folder/*.md"])
def test_a_pattern_that_matches_nothing_is_an_error(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"folder/a.txt": 1})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PacelineError) as caught:
        find_text_files(["folder/a.txt", pattern])  # also beside one that does match
    assert caught.value.code == "PL200"
    assert repr(pattern) in caught.value.saw


def test_only_empty_files_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": 0})
    with pytest.raises(PacelineError, match=r"empty.*PL200"):
        find_text_files([f"{tmp_path}/a.txt"])


def test_the_split_depends_on_names_and_sizes_alone(tmp_path: Path) -> None:
    sizes = {f"part/{number}.txt": 50 + 7 * number for number in range(60)}
    one = write(tmp_path / "one", sizes)
    two = tmp_path / "elsewhere" / "two"
    shutil.copytree(one, two)
    for path in two.rglob("*.txt"):
        path.write_bytes(b"y" * path.stat().st_size)
    splits = [split_files(find_text_files([f"{root}/**/*.txt"]), 0.1) for root in (one, two)]
    held_out = [[piece.file.name for piece in split.valid] for split in splits]
    assert held_out[0] == held_out[1]
    assert held_out[0] != sorted(sizes)[: len(held_out[0])]  # not just the first ones
    total = sum(sizes.values())
    assert 0.05 * total <= size(splits[0].valid) <= 0.1 * total


def test_one_file_gives_its_end_cut_after_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("twelve bytes\n" * 100)
    split = split_files(find_text_files([str(path)]), 0.2)
    assert [(piece.start, piece.stop) for piece in split.train] == [(0, split.valid[0].start)]
    assert split.valid[0].stop == 1300
    assert split.valid[0].start % 13 == 0
    assert size(split.valid) == pytest.approx(260, abs=13)


def test_a_cut_does_not_break_a_character(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\u20ac" * 1000, encoding="utf-8")  # three bytes each, no line ends
    for fraction in (0.1, 0.1003, 0.1006):
        split = split_files(find_text_files([str(path)]), fraction)
        assert split.valid[0].start % 3 == 0


def test_no_validation(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": 10, "b.txt": 10})
    split = split_files(find_text_files([f"{tmp_path}/*.txt"]), 0)
    assert split.valid == []
    assert size(split.train) == 20


@given(
    sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=12),
    fraction=st.floats(0, 1, exclude_max=True),
)
def test_every_byte_is_in_exactly_one_part(sizes: list[int], fraction: float) -> None:
    files = [TextFile(Path(os.devnull), f"{i:02}", size, 0) for i, size in enumerate(sizes)]
    split: CorpusSplit = split_files(files, fraction)  # /dev/null: cuts find no line and stay where they are
    ranges: dict[str, list[tuple[int, int]]] = {}
    for piece in (*split.train, *split.valid):
        ranges.setdefault(piece.file.name, []).append((piece.start, piece.stop))
    for file in files:
        spans = sorted(ranges[file.name])
        assert spans[0][0] == 0
        assert spans[-1][1] == file.size_bytes
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    target = int(fraction * sum(sizes))
    assert size(split.valid) <= target
    assert 2 * size(split.valid) >= target
