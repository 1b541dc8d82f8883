"""Checks the choice of algorithms against the backend and the other arguments, and reads measured links."""

from __future__ import annotations

import logging
from pathlib import Path

from paceline.comm.algorithms import AUTO, Algorithms, RankLinks
from paceline.comm.links import find_nodes
from paceline.comm.links_file import load_on_main
from paceline.errors import PacelineError
from paceline.recipe.algorithm import AlgorithmSection
from paceline.world import World

log = logging.getLogger(__name__)

# What NCCL's ranks can use besides "auto".
_ON_CUDA = {"exact_sum": "direct", "agreement": "library", "broadcast": "library"}


def check_algorithms(section: AlgorithmSection, world: World, *, reduction: str) -> None:
    """Raise for an algorithm that the backend lacks, or that would have no effect.

    Raises:
        PacelineError: PL968, PL969.
    """
    chosen = _list_chosen(section)
    if section.exact_sum != AUTO and reduction != "exact":
        raise PacelineError(
            "PL969",
            saw=f"algorithm.exact_sum={section.exact_sum} with reduction={reduction!r}.",
            rule="It is the way of exact sums. The fast reduction is the library's all-reduce.",
            fix='Leave algorithm.exact_sum out, or use reduction="exact".',
        )
    if section.links is not None and len(chosen) == len(_ON_CUDA):
        raise PacelineError(
            "PL969",
            saw=f"algorithm.links={section.links} with all of {', '.join(chosen)} given.",
            rule="Times are predicted to choose an algorithm, and nothing is left to choose.",
            fix="Leave algorithm.links out, or one of the algorithms.",
        )
    if world.device.type != "cuda":
        return
    for operation, name in chosen.items():
        if name != _ON_CUDA[operation]:
            raise PacelineError(
                "PL968",
                saw=f"algorithm.{operation}={name} on CUDA.",
                rule="On CUDA all messages are NCCL's, which chooses among its own algorithms.",
                fix=f"Leave it out, or use --algorithm {operation}={_ON_CUDA[operation]}.",
            )
    if section.links is not None:
        raise PacelineError(
            "PL968",
            saw=f"algorithm.links={section.links} on CUDA.",
            rule="Times are predicted for gloo on CPUs. NCCL chooses among its own algorithms by itself.",
            fix="Leave algorithm.links out.",
        )


def find_algorithms(section: AlgorithmSection, world: World) -> Algorithms:
    """Return the algorithms, with the links of this job's ranks if a file of them is given; collective.

    A file of other hosts, or of fewer ranks, is reported and not used. So the same command goes on where a
    run continues on other nodes.

    Raises:
        PacelineError: PL950 for a file of links that cannot be read or is damaged.
    """
    chosen = _list_chosen(section)
    if world.world_size == 1:
        if chosen or section.links is not None:
            log.info("algorithm: not used, because one rank does not communicate")
        return Algorithms()
    links: RankLinks | None = None
    if section.links is not None:
        links = _find_links(Path(section.links), world)
    if world.is_main and world.device.type == "cpu":
        given = ", ".join(f"{operation}={name}" for operation, name in chosen.items())
        others = ", ".join(operation for operation in _ON_CUDA if operation not in chosen)
        how = (
            "by the fixed rule, because no file of links is given (--links FILE)"
            if section.links is None
            else "by the fixed rule"
            if links is None
            else f"by times predicted from {section.links}"
        )
        log.info(
            "algorithm: %s",
            "; ".join([*([given] if given else []), *([f"{others} {how}"] if others else [])]),
        )
    return Algorithms(section.exact_sum, section.agreement, section.broadcast, links)


def _find_links(path: Path, world: World) -> RankLinks | None:
    hosts, nodes = find_nodes(world)
    try:
        return RankLinks(nodes, load_on_main(world, path, hosts, nodes).links)
    except PacelineError as error:
        if error.code not in ("PL951", "PL952"):
            raise
        if world.is_main:
            log.warning("algorithm: the links are not used: %s", error)
        return None


def _list_chosen(section: AlgorithmSection) -> dict[str, str]:
    return {
        operation: getattr(section, operation)
        for operation in _ON_CUDA
        if getattr(section, operation) != AUTO
    }
