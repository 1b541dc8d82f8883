"""Sphinx's settings for the site of these documents (`make site`). Its source is the repository's root."""

import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

project = "Paceline"
author = "the Paceline developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
# Everything that is read; the rest of the repository is linked to as files.
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/tutorials/*.md",
    "docs/tables/verify-*.md",
    "benchmarks/*/README.md",
    "tests/chaos/README.md",
]
html_theme = "furo"
html_title = "Paceline"
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_use_ivar = True
# Folders have no page of their own; tests/test_docs.py checks that each link leads to something that exists.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]


def _list_pages(app: Sphinx, error: Exception | None) -> None:
    """Write llms.txt, a line per page with the place of its Markdown."""
    if error is None:
        lines = [
            f"- [{app.env.titles[name].astext()}](_sources/{name}.md.txt)" for name in sorted(app.env.titles)
        ]
        Path(app.outdir, "llms.txt").write_text("\n".join(["# Paceline", "", *lines, ""]), encoding="utf-8")


def _drop_folders(app: Sphinx, doctree: nodes.document, name: str) -> None:
    """Keep only the text of links to folders, which have no page."""
    for link in list(doctree.findall(nodes.reference)):
        target = str(link.get("refid") or link.get("refuri", "")).removeprefix("#")
        if target and target not in doctree.ids and Path(app.srcdir, name).parent.joinpath(target).is_dir():
            link.replace_self(link.children)


def _check_links(app: Sphinx, error: Exception | None) -> None:
    """Warn of a link within the site that leads nowhere; `make site` then fails."""
    pages = {} if error else {path: path.read_text("utf-8") for path in Path(app.outdir).rglob("*.html")}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    for page, text in pages.items():
        for link in sorted(set(re.findall(r'(?:href|src)="([^":]+)"', text))):
            place, _, anchor = unquote(unescape(link)).partition("#")
            target = (page.parent / place.partition("?")[0]).resolve() if place else page
            if not target.exists() or (anchor and target in anchors and anchor not in anchors[target]):
                logging.getLogger("paceline").warning("%s: %s leads nowhere", page.name, link)


def _mark_code(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Mark an indented block after an empty line as code, in place."""
    for at in range(len(lines) - 1, 1, -1):
        before = next((line for line in reversed(lines[:at]) if line.strip()), " ")
        if lines[at].startswith("    ") and not lines[at - 1].strip() and not before.startswith(" "):
            lines[at:at] = ["::", ""]


def setup(app: Sphinx) -> None:
    """Connect to Sphinx's events."""
    app.connect("doctree-resolved", _drop_folders)
    app.connect("autodoc-process-docstring", _mark_code, priority=400)  # before napoleon
    app.connect("build-finished", _list_pages)
    app.connect("build-finished", _check_links)
