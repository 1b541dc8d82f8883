"""Lets a command leave out a word: `paceline plan recipe.toml` is `paceline plan layouts recipe.toml`."""

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
