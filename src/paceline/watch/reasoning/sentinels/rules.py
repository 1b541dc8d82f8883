"""The rules, by the kind of fact that they read."""

from __future__ import annotations

from paceline.watch.reasoning.sentinels.book import SentinelRule
from paceline.watch.reasoning.sentinels.copies import check_copies, check_exchange, check_hook, check_sizes
from paceline.watch.reasoning.sentinels.files import check_random_state, check_reader, check_writers
from paceline.watch.reasoning.sentinels.samples import check_batches, check_order, check_samples
from paceline.watch.reasoning.sentinels.windows import check_cleared, check_divided, check_exchanged

RULES: dict[str, tuple[SentinelRule, ...]] = {
    "batches": (check_batches, check_samples),
    "copies": (check_copies, check_hook, check_sizes),
    "end": (check_exchange,),
    "file": (check_writers, check_reader),
    "order": (check_order,),
    "random": (check_random_state,),
    "window": (check_cleared, check_divided, check_exchanged),
}
