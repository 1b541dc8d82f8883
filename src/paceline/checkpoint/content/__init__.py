"""The ways to store a checkpoint; its manifest names the one that wrote it."""

from __future__ import annotations

from paceline.checkpoint.content.full import Full
from paceline.checkpoint.content.protocol import Content
from paceline.checkpoint.content.sharded import Sharded

_CONTENTS: dict[str, Content] = {content.name: content for content in (Full(), Sharded())}


def find_content(name: str) -> Content | None:
    """Return the content of this name, or `None` where this version knows none."""
    return _CONTENTS.get(name)
