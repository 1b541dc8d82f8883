"""Comparing layouts: PL700 to PL729."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {}
