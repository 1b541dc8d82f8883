"""Checks the settings of the compression against the layout and the other arguments of a trainer."""

from __future__ import annotations

from paceline.errors import PacelineError
from paceline.parallel.compress import CompressSettings
from paceline.recipe import Layout
from paceline.recipe.compress import CompressSection


def choose_compression(
    section: CompressSection, layout: Layout, *, reduction: str
) -> CompressSettings | None:
    """Return the settings of the compression with the number of slots known; `None` without compression.

    Args:
        layout: resolved.
    """
    if section.kind == "none":
        return None
    given = f'compress.kind="{section.kind}"'
    if reduction != "exact":
        raise PacelineError(
            "PL959",
            saw=f"{given} with reduction={reduction!r}.",
            rule="Compressed gradients are added in a fixed order over slots, by the exact reduction.",
            fix='Use reduction="exact", or compress.kind="none".',
        )
    others = [axis for axis, degree in layout.list_several().items() if axis != "dp_replicate"]
    if others:
        raise PacelineError(
            "PL958",
            saw=f"{given} with layout {layout}.",
            rule=f"Gradients of whole models are compressed, along dp_replicate, and not with "
            f"{', '.join(others)}.",
            fix=f'Set {", ".join(f"{axis}=1" for axis in others)}, or compress.kind="none".',
        )
    return CompressSettings(section.kind, _choose_slots(section.slots, layout.dp))


def _choose_slots(given: int | None, num_ranks: int) -> int:
    """Return the number of slots, each of which belongs to one rank."""
    num_slots = given or num_ranks
    if num_slots % num_ranks or num_slots == 1:
        raise PacelineError(
            "PL960",
            saw=f"compress.slots={given or 'not set'}, and {num_ranks} ranks share the data.",
            rule="Every rank has the same number of slots, and there are at least two of them: with one "
            "slot, nothing would be sent.",
            fix=f"Set compress.slots to {max(2, num_ranks)} or another multiple of {num_ranks}, or train "
            "uncompressed.",
        )
    return num_slots


def check_num_slots(num_slots: int | None, global_batch_size: int, microbatch_size: int) -> None:
    """Raise PL963 for global batches that leave a slot without any microbatch."""
    num_microbatches = -(-global_batch_size // microbatch_size)
    if num_slots is not None and num_microbatches < num_slots:
        raise PacelineError(
            "PL963",
            saw=f"compress.slots={num_slots}, and a global batch of {global_batch_size} samples has "
            f"{num_microbatches} microbatches of {microbatch_size}.",
            rule="A slot is a block of microbatches, and each has at least one.",
            fix=f"Set compress.slots to {num_microbatches} or less, or use smaller microbatches.",
        )
