"""Splitting matrix products over ranks: PL460 to PL469."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {}
