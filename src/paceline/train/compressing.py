"""Checks the settings of the compression against the layout and the other arguments of a trainer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from paceline.comm.nodes import find_nodes
from paceline.errors import PacelineError
from paceline.parallel.compress import CompressSettings
from paceline.recipe import Layout
from paceline.recipe.compress import CompressSection
from paceline.train.same_settings import all_ranks
from paceline.world import World

log = logging.getLogger(__name__)

# The axes along which ranks have the same parameters and other microbatches.
_ALONG = ("dp_replicate", "dp_shard")
_NODES: WeakKeyDictionary[World, tuple[int, ...]] = WeakKeyDictionary()


def find_nodes_once(world: World, section: CompressSection) -> None:
    """Find out each rank's node if the compression depends on it; all ranks must call it."""
    if section.kind != "none" and section.links == "between_nodes" and world not in _NODES:
        _NODES[world] = find_nodes(all_ranks())[1] if world.world_size > 1 else (0,)


def choose_compression(
    section: CompressSection, layout: Layout, world: World, *, reduction: str, has_comm_hook: bool
) -> CompressSettings | None:
    """Return the settings of the compression with the number of slots known; `None` without compression.

    With links between nodes, `find_nodes_once` comes first. Before it, the slots are not known or checked.

    Args:
        section: as given.
        layout: resolved.
        world: the ranks.
        reduction: as given.
        has_comm_hook: whether a communication hook is given.

    Raises:
        PacelineError: PL958 to PL960, PL966.
    """
    if section.kind == "none":
        return None
    given = f'compress.kind="{section.kind}"'
    if has_comm_hook or reduction != "exact":
        other = "comm_hook" if has_comm_hook else f"reduction={reduction!r}"
        raise PacelineError(
            "PL959",
            saw=f"{given} with {other}.",
            rule="Compressed gradients are added in a fixed order over slots, by the exact reduction. A hook "
            "would replace it.",
            fix='Use reduction="exact" without comm_hook, or compress.kind="none".',
        )
    others = [axis for axis, degree in layout.list_several().items() if axis not in _ALONG]
    if others:
        raise PacelineError(
            "PL958",
            saw=f"{given} with layout {layout}.",
            rule=f"Gradients are compressed along {' and '.join(_ALONG)} only, not with {', '.join(others)}.",
            fix=f'Set {", ".join(f"{axis}=1" for axis in others)}, or compress.kind="none".',
        )
    if section.links == "between_nodes":
        nodes = _NODES.get(world)
        num_slots = section.slots or 0 if nodes is None else _choose_shared_slots(section.slots, nodes)
    else:
        num_slots = _choose_slots(section.slots, layout.dp)
    return CompressSettings(section.kind, num_slots, section.after_steps)


def warn_of_links(section: CompressSection, settings: CompressSettings | None, world: World) -> None:
    """Log on rank 0 if links between nodes make no difference here."""
    if settings is None or section.links == "all" or not world.is_main:
        return
    nodes = _NODES[world]
    if len(set(nodes)) == 1:
        log.warning(
            "compress: all ranks are on one node, so nothing crosses nodes. Gradients are encoded "
            "nevertheless, because the result of the run depends on its %d slots.",
            settings.slots,
        )
    elif settings.slots >= len(nodes):
        log.warning(
            'compress: with %d slots no ranks share one, so links="between_nodes" is the same as "all". '
            "With %d slots, less would leave each node.",
            settings.slots,
            len(set(nodes)),
        )


def _choose_slots(given: int | None, num_ranks: int) -> int:
    """Return the number of slots, if each belongs to one rank."""
    num_slots = given or num_ranks
    if num_slots % num_ranks or num_slots == 1:
        raise PacelineError(
            "PL960",
            saw=f"compress.slots={given or 'not set'}, and {num_ranks} ranks share the data.",
            rule="Every rank has the same number of slots, and there are at least two of them: with one "
            "slot, nothing would be sent.",
            fix=f"Set compress.slots to {max(2, num_ranks)} or another multiple of {num_ranks}, or train "
            'uncompressed. With compress.links="between_nodes" the ranks of a node can share a slot.',
        )
    return num_slots


def _choose_shared_slots(given: int | None, nodes: Sequence[int]) -> int:
    """Return the number of slots, if the ranks of a node may share one.

    Args:
        given: compress.slots.
        nodes: by rank, its node.
    """
    num_ranks, num_nodes = len(nodes), len(set(nodes))
    if num_nodes == 1 and given is None:
        what = "there is one rank" if num_ranks == 1 else f"all {num_ranks} ranks are on one node"
        raise PacelineError(
            "PL966",
            saw=f'compress.links="between_nodes", and {what}.',
            rule="Only what crosses nodes is compressed, so nothing would be.",
            fix='Train uncompressed, or set compress.links="all". To continue a run of several nodes, set '
            "compress.slots to its number of slots.",
        )
    num_slots = given or num_nodes
    if num_slots == 1 or not _fits(num_slots, nodes):
        fitting = [n for n in range(2, num_ranks + 1) if num_ranks % n == 0 and _fits(n, nodes)]
        places = ", ".join(map(str, nodes[:16])) + (", ..." if num_ranks > 16 else "")
        raise PacelineError(
            "PL960",
            saw=f'compress.slots={given or "not set"} with compress.links="between_nodes", and the ranks are '
            f"on nodes {places}.",
            rule="There are at least two slots. Every rank has the same number of them, or the same number "
            "of consecutive ranks of one node share each.",
            fix=f"Set compress.slots to {fitting[0] if fitting else 2}, start the same number of consecutive "
            "ranks on each node, or train uncompressed.",
        )
    return num_slots


def _fits(num_slots: int, nodes: Sequence[int]) -> bool:
    """Return whether ranks have whole slots, or equally many consecutive ranks of one node share each."""
    num_ranks = len(nodes)
    if num_slots % num_ranks == 0:
        return True
    sharing = num_ranks // num_slots
    return num_ranks % num_slots == 0 and all(
        len(set(nodes[at : at + sharing])) == 1 for at in range(0, num_ranks, sharing)
    )


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
