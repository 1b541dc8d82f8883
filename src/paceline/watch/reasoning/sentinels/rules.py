"""The rules, by the kind of fact that they read."""

from __future__ import annotations

from paceline.watch.reasoning.sentinels.book import SentinelRule
from paceline.watch.reasoning.sentinels.copies import (
    advise_buffers,
    advise_norm,
    advise_step,
    check_copies,
    check_exchange,
    check_hook,
    check_sizes,
)
from paceline.watch.reasoning.sentinels.samples import check_order, check_samples
from paceline.watch.reasoning.sentinels.shared_files import (
    advise_keys,
    check_overwritten,
    check_random_state,
    check_reader,
    check_writers,
)
from paceline.watch.reasoning.sentinels.windows import (
    check_cleared,
    check_divided,
    check_dropped,
    check_exchanged,
)

RULES: dict[str, tuple[SentinelRule, ...]] = {
    "batches": (check_samples,),
    "copies": (check_copies, check_hook, check_sizes, advise_norm, advise_step, advise_buffers),
    "end": (check_exchange,),
    "file": (check_writers, check_reader, check_overwritten),
    "keys": (advise_keys,),
    "order": (check_order,),
    "random": (check_random_state,),
    "window": (check_cleared, check_divided, check_dropped, check_exchanged),
}

ADVICE = {"PL040", "PL066", "PL832", "PL833", "PL834"}
"""Codes of what is no mistake by itself, for those who ask for it."""
