"""Adds to argparse what some commands need for their words.

A command may leave out a word: `paceline plan recipe.toml` is `paceline plan layouts recipe.toml`. Another
may pass on what follows `--`, wherever its own options stand.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def take_default(parser: argparse.ArgumentParser, default: str, is_meant: Callable[[str], bool]) -> None:
    """Make a parser put `default` before the words of which the first one shows that it is meant."""
    parse = parser.parse_known_args

    def parse_words(words: Any = None, namespace: Any = None) -> Any:
        return parse([default, *words] if words and is_meant(words[0]) else words, namespace)

    vars(parser)["parse_known_args"] = parse_words


def pass_on(parser: argparse.ArgumentParser, name: str) -> None:
    """Make a parser add the words after `--` to those of its positional argument `name`, as they are."""
    parse = parser.parse_known_args

    def parse_words(words: Any = None, namespace: Any = None) -> Any:
        own = list(words or ())
        at = own.index("--") if "--" in own else len(own)
        found, unknown = parse(own[:at], namespace)
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)} (a script's own follow --)")
        setattr(found, name, [*getattr(found, name), *own[at + 1 :]])
        return found, []

    vars(parser)["parse_known_args"] = parse_words
