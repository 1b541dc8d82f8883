"""The token files: what is in them, and that any number of builders at any moment are safe."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from paceline.data import tokens
from paceline.data.corpus import find_text_files, split_files
from paceline.data.tokens import Corpus, build_corpus
from paceline.errors import PacelineError

SETUP = """
import sys
from pathlib import Path
from paceline.data import tokens
from paceline.data.corpus import find_text_files, split_files
from paceline.errors import PacelineError
pattern, cache = sys.argv[1:]
def build(tokenizer="bytes", vocab_size=None):
    split = split_files(find_text_files([pattern]), 0.3)
    return tokens.build_corpus(split, tokenizer, vocab_size, Path(cache))
"""


def corpus_files(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    for number in range(9):
        text = "".join(f"line {line} of file {number}, caf\u00e9\n" for line in range(60))
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return f"{folder}/*.txt"


def build(pattern: str, cache: Path, tokenizer: str = "bytes", vocab_size: int | None = None) -> Corpus:
    split = split_files(find_text_files([pattern]), 0.3)
    return build_corpus(split, tokenizer, vocab_size, cache)


def start(script: str, pattern: str, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SETUP + textwrap.dedent(script), pattern, str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def entries(cache: Path, ending: str) -> list[Path]:
    return sorted(cache.glob(f"*{ending}"))


def test_files_joined_with_a_separator(tmp_path: Path) -> None:
    pattern = corpus_files(tmp_path / "text")
    split = split_files(find_text_files([pattern]), 0.3)
    corpus = build(pattern, tmp_path / "cache")
    for part, pieces in ((corpus.train, split.train), (corpus.valid, split.valid)):
        expected = b"\0".join(piece.file.path.read_bytes()[piece.start : piece.stop] for piece in pieces)
        assert part.open().tobytes() == expected
        assert part.num_tokens == len(expected)
    assert corpus.train.dtype == "|u1"


def test_bpe_in_the_narrowest_type_and_back_from_the_cache(tmp_path: Path) -> None:
    pattern = corpus_files(tmp_path / "text")
    built = build(pattern, tmp_path / "cache", "bpe", 300)
    again = build(pattern, tmp_path / "cache", "bpe", 300)
    assert built.train == again.train
    assert np.array_equal(built.train.open(), again.train.open())
    assert again.train.open().dtype == np.uint16
    assert again.tokenizer.vocab_size == 300
    split = split_files(find_text_files([pattern]), 0.3)
    expected = "<|endoftext|>".join(piece.file.path.read_text("utf-8") for piece in split.train)
    assert again.tokenizer.decode(again.train.open().tolist()) == expected


def test_bpe_learns_from_the_training_part_only(tmp_path: Path) -> None:
    pattern = corpus_files(tmp_path / "text")
    held_out = split_files(find_text_files([pattern]), 0.3).valid[0].file.path
    size = held_out.stat().st_size
    one = build(pattern, tmp_path / "one", "bpe", 300).tokenizer
    held_out.write_text("zqzqzqzq " * (size // 9) + "z" * (size % 9))
    two = build(pattern, tmp_path / "two", "bpe", 300).tokenizer
    assert one.encode("zqzqzqzq") == two.encode("zqzqzqzq")


def test_chunks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = corpus_files(tmp_path / "text")
    (tmp_path / "text" / "long.txt").write_text("\u20ac" * 1000, encoding="utf-8")  # a line without end
    whole = [build(pattern, tmp_path / "a", *kind) for kind in (("bytes", None), ("bpe", 300))]
    monkeypatch.setattr(tokens, "CHUNK_BYTES", 100)
    parts = [build(pattern, tmp_path / "b", *kind) for kind in (("bytes", None), ("bpe", 300))]
    assert parts[0].train.sha256 == whole[0].train.sha256
    for one, two in ((whole[1].train, parts[1].train), (whole[1].valid, parts[1].valid)):
        text = parts[1].tokenizer.decode(two.open().tolist())
        assert "\ufffd" not in text
        assert text == whole[1].tokenizer.decode(one.open().tolist())


def test_another_text_or_tokenizer_is_another_entry(tmp_path: Path) -> None:
    pattern, cache = corpus_files(tmp_path / "text"), tmp_path / "cache"
    build(pattern, cache)
    build(pattern, cache)
    assert len(entries(cache, ".lock")) == 1
    build(pattern, cache, "bpe", 300)
    assert len(entries(cache, ".lock")) == 2
    path = tmp_path / "text" / "3.txt"
    os.utime(path, ns=(1, 1))  # the same size, another time
    build(pattern, cache)
    assert len(entries(cache, ".lock")) == 3


def test_many_builders_at_once_build_once(tmp_path: Path) -> None:
    pattern, cache = corpus_files(tmp_path / "text"), tmp_path / "cache"
    script = """
    import time
    write = tokens._write_tokens
    def slowly(*args):
        print("building", flush=True)
        time.sleep(0.2)
        return write(*args)
    tokens._write_tokens = slowly
    print(build().train.sha256)
    """
    builders = [start(script, pattern, cache) for _ in range(4)]
    outputs = [builder.communicate(timeout=60)[0] for builder in builders]
    assert [builder.returncode for builder in builders] == [0] * 4, outputs
    assert sum(output.count("building") for output in outputs) == 2  # train and valid, by one of them
    assert len({output.split()[-1] for output in outputs}) == 1


def test_a_killed_build_leaves_nothing_in_use(tmp_path: Path) -> None:
    pattern, cache = corpus_files(tmp_path / "text"), tmp_path / "cache"
    script = """
    import os, signal
    def half(path, pieces, tokenizer, dtype):
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    tokens._write_tokens = half
    build()
    """
    builder = start(script, pattern, cache)
    output, _ = builder.communicate(timeout=60)
    assert builder.returncode == -signal.SIGKILL, output
    assert len(entries(cache, ".tmp")) == 1
    expected = build(pattern, tmp_path / "other").train.sha256
    assert build(pattern, cache).train.sha256 == expected
    assert entries(cache, ".tmp") == []


@pytest.mark.parametrize("damage", ["short", "no-meta", "bad-meta"])
def test_a_damaged_entry_is_built_again(damage: str, tmp_path: Path) -> None:
    pattern, cache = corpus_files(tmp_path / "text"), tmp_path / "cache"
    before = build(pattern, cache).train
    folder = before.path.parent
    if damage == "short":
        os.truncate(before.path, 10)
    elif damage == "no-meta":
        (folder / "meta.json").unlink()
    else:
        (folder / "meta.json").write_text('{"dtype": 3')
    after = build(pattern, cache).train
    assert after == before
    assert after.path.stat().st_size == after.num_tokens


def test_disk_full(tmp_path: Path) -> None:
    pattern, cache = corpus_files(tmp_path / "text"), tmp_path / "cache"
    script = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))  # a write beyond fails, like on a full disk
    try:
        build()
    except PacelineError as error:
        print(error)
    """
    output, _ = start(script, pattern, cache).communicate(timeout=60)
    assert re.search(r"no space for token files in .*cache.*\[PL205\]", output), output
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []
    build(pattern, cache)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_disk_full_on_a_small_file_system(tmp_path: Path) -> None:
    pattern, cache = corpus_files(tmp_path / "text"), tmp_path / "cache"
    cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(cache)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount")
    try:
        with pytest.raises(PacelineError, match=r"No space left.*PL205"):
            build(pattern, cache)
        assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []
    finally:
        subprocess.run(["umount", str(cache)], check=True)


def test_cache_folder_that_is_a_file(tmp_path: Path) -> None:
    pattern, cache = corpus_files(tmp_path / "text"), tmp_path / "cache"
    cache.write_text("")
    with pytest.raises(PacelineError) as caught:
        build(pattern, cache)
    assert caught.value.code == "PL204"
    assert str(cache) in caught.value.saw


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_cache_serves_what_it_has(tmp_path: Path) -> None:
    pattern, cache = corpus_files(tmp_path / "text"), tmp_path / "cache"
    before = build(pattern, cache).train
    cache.chmod(0o500)
    try:
        assert build(pattern, cache).train == before
        with pytest.raises(PacelineError, match="PL204"):
            build(pattern, cache, "bpe", 300)
    finally:
        cache.chmod(0o700)


def test_a_file_that_goes_away_or_changes(tmp_path: Path) -> None:
    pattern, cache = corpus_files(tmp_path / "text"), tmp_path / "cache"
    split = split_files(find_text_files([pattern]), 0.3)
    path = tmp_path / "text" / "4.txt"
    shutil.copy(path, tmp_path / "kept")
    with open(path, "a") as stream:
        stream.write("more")
    with pytest.raises(PacelineError, match=r"4\.txt changed.*PL209"):
        build_corpus(split, "bytes", None, cache)
    path.unlink()
    for kind in (("bytes", None), ("bpe", 300)):
        with pytest.raises(PacelineError, match=r"4\.txt cannot be read.*PL201"):
            build_corpus(split, *kind, cache)
    assert [entry for entry in cache.iterdir() if entry.suffix != ".lock"] == []
