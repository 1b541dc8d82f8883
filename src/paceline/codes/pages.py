"""Reads the Markdown files of this folder, when a page is asked for."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """The page behind one code.

    Attributes:
        title: the fact in a few words.
        why: the rule and its reason.
        fix: what to do.
        example: code or commands that do it, possibly on several lines; empty where none helps.
    """

    title: str
    why: str
    fix: str
    example: str = ""


_FILE_NAME = r"(PL\d\d\d)-[a-z-]+\.md"
_TOPIC = r"# \S.*\n\n"
_LINE = r"(?!#|```|\*\*|\s).*\S\n"
_PAGE = (
    rf"(?P<code>PL\d\d\d): (?P<title>\S.*\S)\n\n(?P<why>(?:{_LINE})+)\n"
    rf"\*\*Fix:\*\* (?P<fix>(?:{_LINE})+)(?:\n```\n(?P<example>[^`]+)\n```\n)?"
)


def parse_pages(text: str, file_name: str) -> dict[str, Page]:
    """Return the pages of one file by code; raise ValueError with the heading of a page that is malformed."""
    topic = re.match(_TOPIC, text)
    if topic is None:
        raise ValueError(f"{file_name}: the first line is not `# Topic` with an empty line after it")
    pages: dict[str, Page] = {}
    for section in text[topic.end() :].removeprefix("## ").split("\n## "):
        found = re.fullmatch(_PAGE, section)
        if found is None:
            heading = section.partition("\n")[0]
            raise ValueError(
                f"{file_name}: the page {heading!r} is not a heading `## PLnnn: Title`, a paragraph, a "
                "paragraph that starts with `**Fix:** `, and possibly a block of code"
            )
        if pages and found["code"] <= max(pages):
            raise ValueError(f"{file_name}: {found['code']} stands after {max(pages)}")
        why, fix = (" ".join(found[name].split("\n")).strip() for name in ("why", "fix"))
        pages[found["code"]] = Page(found["title"], why, fix, found["example"] or "")
    return pages


@functools.cache
def read_pages() -> dict[str, Page]:
    """Return the pages of all files by code, in the order of the codes."""
    from importlib import resources  # here, as every start of the command line imports this file

    files = {
        found[1]: entry
        for entry in resources.files("paceline.codes").iterdir()
        if (found := re.fullmatch(_FILE_NAME, entry.name))
    }
    pages: dict[str, Page] = {}
    for start, entry in sorted(files.items()):
        for code, page in parse_pages(entry.read_text(encoding="utf-8"), entry.name).items():
            if code < start or any(start < other <= code for other in files):
                raise ValueError(f"{entry.name}: {code} belongs into another file")
            pages[code] = page
    return pages
