"""Building models on the meta device: PL455 to PL459."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {}
