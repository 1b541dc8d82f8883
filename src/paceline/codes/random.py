"""Random numbers by what is computed: PL450 to PL454."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {}
