"""`paceline explain CODE`: prints the page of a message's code."""

from __future__ import annotations

import argparse
import difflib
import json
import textwrap
from dataclasses import asdict

from paceline.codes import read_pages
from paceline.errors import PacelineError


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser("explain", help="print the page of a code such as PL102")
    parser.add_argument(
        "code", nargs="?", metavar="CODE", help="a code, or a word of titles; without it, all are listed"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    pages = read_pages()
    if args.code is None:
        if args.json:
            print(json.dumps({code: page.title for code, page in pages.items()}))
        else:
            print("\n".join(f"{code}  {page.title}" for code, page in pages.items()))
        return 0
    code = args.code.strip("[]").upper()
    if code not in pages:
        word = args.code.strip().lower()
        named = [f"{each}  {page.title}" for each, page in pages.items() if word in page.title.lower()]
        if word and named:
            print("\n".join(named))
            return 0
        near = difflib.get_close_matches(code, pages, n=1)
        raise PacelineError(
            "PL602",
            saw=f"there is no page for {args.code!r}.",
            rule="Messages end with a code in square brackets: PL and three digits.",
            fix=f"Did you mean {near[0]}?" if near else "`paceline explain` lists all codes.",
        )
    page = pages[code]
    if args.json:
        print(json.dumps({"code": code, **asdict(page)}))
        return 0
    print(f"{code}  {page.title}\n")
    for name, text in (("Why", page.why), ("Fix", page.fix)):
        print(textwrap.fill(text, 88, initial_indent=f"{name}:  ", subsequent_indent="      "))
    if page.example:
        print("\n" + textwrap.indent(page.example, "      "))
    return 0
