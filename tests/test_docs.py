"""Documents can't drift: generated pages are current, paths exist, links work, no file goes unmentioned."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import paceline
from paceline.cli.examples import EXAMPLES

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
SUFFIXES = (".py", ".toml", ".md", ".sh", ".lock")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TICKS = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"\.?[\w-][\w.-]*(/[\w.-]+)*/?")
# Files of a run's folder, and places on a reader's machine.
ELSEWHERE = re.compile(
    r"runs/|checkpoints/|logs/|tensorboard/|bench-out/|recipe\.toml$|.*RECIPE|.*_REC|script\.py|train\.py$"
)


def prose(document: Path) -> str:
    """Return a document without its blocks of code."""
    return re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)


def paths_in(text: str) -> list[str]:
    """Return the paths of this repository that a text names in back-ticks."""
    folders = {entry.name for entry in ROOT.iterdir() if entry.is_dir()}
    return [
        name
        for name in TICKS.findall(text)
        if PATH.fullmatch(name)
        and (("/" in name and name.split("/")[0] in folders) or name.endswith(SUFFIXES))
        and not ELSEWHERE.match(name)
    ]


def broken_links(document: Path) -> list[str]:
    broken = []
    for link in LINK.findall(prose(document)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(document), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def load_generator(name: str = "generate") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current() -> None:
    pages = load_generator().generate()
    stale = [name for name, text in pages.items() if (ROOT / "docs" / name).read_text("utf-8") != text]
    assert stale == [], "run make docs"


def test_drawn_figures_are_current(tmp_path: Path) -> None:
    drawing = load_generator("render_ideas")
    drawing.FOLDER = tmp_path
    drawing.main()
    pictures = ROOT / "docs" / "pictures"
    drawn = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text("utf-8") for path in pictures.glob("idea-*")}
    shown = " ".join(path.read_text("utf-8") for path in DOCUMENTS)
    assert [name for name in drawn if f"pictures/{name}" not in shown] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_work(document: Path) -> None:
    assert broken_links(document) == []


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "GLOSSARY.md"])
def test_named_paths_exist(name: str) -> None:
    missing = [path for path in paths_in(prose(ROOT / name)) if not (ROOT / path).exists()]
    assert missing == []


def test_the_page_of_files_mentions_every_source_file() -> None:
    text = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")]
    assert [path for path in files if not path.endswith("__init__.py") and path not in text] == []
    folders = {path.rpartition("/")[0] for path in files}
    assert [folder for folder in sorted(folders) if f"{folder}/" not in text] == []


def test_every_public_name_and_every_page_is_on_the_site() -> None:
    api = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    described = re.findall(r"^\.\. auto\w+:: paceline\.(\w+)$", api, re.M)
    assert sorted(described) == sorted(set(paceline.__all__) - {"__version__"})
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = {line.removeprefix("../") for line in index.splitlines()}
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages - listed == set()


def test_every_command_is_in_the_documents() -> None:
    texts = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    assert [
        words for words in EXAMPLES if not words.startswith("profile ") and f"paceline {words}" not in texts
    ] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "x.md"
    document.write_text(
        "# One heading: `a`!\n[a](x.md) [b](#one-heading-a) [c](nowhere.md) [d](#two) [e](https://example.org)\n"
        "```\n[f](nowhere.md)\n```\n"
    )
    assert broken_links(document) == ["nowhere.md", "#two"]


def test_paths_are_distinguished_from_other_words() -> None:
    text = (
        "`src/paceline/x.py` `recipes/` `a/b` `float` `make env` `Makefile.py` `runs/demo` `--set x=y.toml`"
    )
    assert paths_in(text) == ["src/paceline/x.py", "recipes/", "Makefile.py"]


QUOTED = re.compile(r"<!-- ([\w./-]+) -->\n```\n(.*?)\n```", re.S)


def test_measured_tables_are_those_of_the_benchmarks() -> None:
    """A block after `<!-- benchmarks/... -->` is that file."""
    quoted = [
        (document.name, name, block)
        for document in DOCUMENTS
        for name, block in QUOTED.findall(document.read_text(encoding="utf-8"))
    ]
    assert len(quoted) >= 2
    for document, name, block in quoted:
        assert block == (ROOT / name).read_text(encoding="utf-8").rstrip("\n"), f"{document} quotes {name}"


def broken_tables(text: str) -> list[str]:
    """The first row of each table that has no head (a blank line cuts a table in two) or ragged rows."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    broken = []
    for table in re.findall(r"(?:^ *\|.*\n?)+", text, flags=re.M):
        rows = table.splitlines()
        has_head = len(rows) > 1 and re.fullmatch(r"[| :-]+", rows[1])
        if not has_head or len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) > 1:
            broken.append(rows[0])
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_tables_are_whole(document: Path) -> None:
    assert broken_tables(document.read_text(encoding="utf-8")) == []


def test_a_table_cut_in_two_is_found() -> None:
    whole = "| a | b |\n|---|---|\n| 1 | 2 \\| 3 |\n| 4 | 5 |\n"
    assert broken_tables(whole) == []
    assert broken_tables(whole.replace("| 4", "\n| 4")) == ["| 4 | 5 |"]
    assert broken_tables(whole.replace("| 4 | 5 |", "| 4 |")) == ["| a | b |"]


# Words that the glossary replaces in one meaning and that documents need in another: a loader's worker, a
# host name, a layer of imports.
OTHER_MEANINGS = {
    "ddp",
    "example",
    "fork server",
    "fsdp",
    "host",
    "index",
    "item",
    "iteration",
    "job",
    "label",
    "layer",
    "node",
    "restart",
    "restore",
    "shard",
    "size",
    "stage",
    "valid",
    "warning",
    "worker",
}


def replaced_words() -> set[str]:
    """Return the words of the glossary's column "not"."""
    rows = re.findall(r"^\|.*\|.*\|(.*)\|$", (ROOT / "GLOSSARY.md").read_text(encoding="utf-8"), re.M)
    cells = {word.strip() for row in rows for word in re.sub(r"\(.*?\)", "", row).split(",")}
    return {word for word in cells if re.fullmatch(r"[a-z ]+", word)} - {"not"}


def test_no_document_uses_a_word_that_the_glossary_replaces() -> None:
    words = replaced_words()
    assert words >= OTHER_MEANINGS, "exceptions that the glossary no longer has"
    pattern = re.compile(rf"\b({'|'.join(sorted(words - OTHER_MEANINGS))})s?\b", re.I)
    found = [
        f"{document.relative_to(ROOT)}: {match[0]}"
        for document in DOCUMENTS
        if document.name != "GLOSSARY.md"
        for match in pattern.finditer(TICKS.sub("", prose(document)))
    ]
    assert len(words - OTHER_MEANINGS) > 10
    assert found == []


def test_the_diff_in_the_readme_is_that_of_the_example() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    diff = re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S)[0].splitlines()
    example = (ROOT / "examples" / "digits.py").read_text(encoding="utf-8")
    kept = [line[1:].strip() for line in diff if not line.startswith("-")]
    assert [line for line in kept if line not in example] == []
    added, removed = (sum(line.startswith(sign) for line in diff) for sign in "+-")
    assert f"adds {added} lines and removes {removed}." in text


def test_the_changelog_speaks_of_a_code_once() -> None:
    """A merge that keeps both sides of a rewritten entry leaves the old one beside the new one."""
    released = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    codes = re.findall(r"PL\d{3}", released)
    assert sorted(code for code in set(codes) if codes.count(code) > 1) == []


def test_each_public_name_is_on_a_page() -> None:
    text = "\n".join(path.read_text("utf-8") for path in DOCUMENTS)
    names = [name for name in paceline.__all__ if not name.startswith("_")]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_every_code_on_the_page_of_topics_exists_and_every_tutorial_is_there() -> None:
    text = (ROOT / "docs" / "topics.md").read_text("utf-8")
    headings = re.findall(r"^### (PL\d+):", (ROOT / "docs" / "codes.md").read_text("utf-8"), re.M)
    ranges = re.findall(r"(PL\d+) to (PL\d+)", text)
    assert set(re.findall(r"PL\d{3}", text)) <= set(headings) | {end for pair in ranges for end in pair}
    numbers = re.findall(r"^\| (\d+) \| .* \| [●○–] \| .* \|$", text, re.M)
    assert [int(number) for number in numbers] == list(range(1, 147))
    for path in (ROOT / "docs" / "tutorials").glob("*.md"):
        assert f"tutorials/{path.name}" in text
        assert re.search(r"^\*\[Topics\]\(\.\./topics\.md\): \d.*\.\*$", path.read_text("utf-8"), re.M)
