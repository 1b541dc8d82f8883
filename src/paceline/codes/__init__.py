"""The pages behind the codes that messages carry; `paceline explain CODE` prints one.

One Markdown file per topic; its name starts with the lowest code that belongs into it. A page is a heading
`## PLnnn: Title`, a paragraph with the rule and its reason, a paragraph that starts with `**Fix:**`, and a
block of code where an example helps.
"""

from __future__ import annotations

from paceline.codes.pages import Page, parse_pages, read_pages

__all__ = ["Page", "parse_pages", "read_pages"]
