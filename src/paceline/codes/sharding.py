"""Sharding: PL440 to PL449."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {}
