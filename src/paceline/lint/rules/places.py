"""Rules on devices, addresses and the process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.lint.rules.rule import Spot, WitnessTrace, at, rule
from paceline.lint.values import Taint, Value


@rule("PL014")
def ranks_that_do_not_meet(witnesses: Sequence[WitnessTrace]) -> Iterator[Spot]:
    """Report ranks that go to addresses of their own, that join as one rank, or expect another number."""
    inits = [{id(event.node): event for event in one.events("init")} for one in witnesses[:3]]
    for node, event in inits[0].items():
        same = [one[node] for one in inits if node in one]
        is_alone = event.world is not None and event.world.const == 1
        if len(same) < len(inits) or is_alone or event.spawned:
            continue
        urls = [one.method for one in same if one.method is not None]
        ranks = {one.rank.const if one.rank is not None else None for one in same}
        number = next(iter(ranks))
        is_read = all(url.const in (None, "env://") for url in urls)
        if is_read and len(ranks) == 1 and isinstance(number, int) and number >= 0:
            if any(witnesses[0].events("wrap", "coll")):
                yield at(event, f"every rank joins as rank {number}.")
        elif len(urls) == len(same) and (all(map(_is_own, urls)) or urls[1].const != urls[2].const):
            yield at(event, "each rank meets at an address of its own.")
        elif is_read and event.rank is None and event.world is None and not witnesses[0].spawns:
            yield from _other_world(witnesses[0])


def _is_own(value: Value) -> bool:
    """Return whether a value that is not known differs between ranks."""
    others = Taint.UNKNOWN | Taint.CHOICE
    return not value.is_known and bool(value.taint & (Taint.RANK | Taint.LOCAL)) and not value.taint & others


def _other_world(witness: WitnessTrace) -> Iterator[Spot]:
    changes = {event.key: event for event in witness.events("setenv")}
    event = changes.get("WORLD_SIZE")
    if event is not None and "RANK" not in changes and not event.guard and event.value.taint == Taint.NONE:
        size = str(event.value.const)
        if size.isdigit() and size not in ("1", str(witness.place.world)):
            yield at(event, f"WORLD_SIZE={size} replaces the launcher's number of ranks.")


@rule("PL055")
def rank_as_device(witnesses: Sequence[WitnessTrace]) -> Iterator[Spot]:
    """Report the number of a rank of the job that is used as the number of a device of the node."""
    for witness in witnesses:
        for event in witness.events("device"):
            number = _index(event.device)
            if (
                number is not None
                and number == witness.place.rank >= event.limit
                and Taint.RANK & event.device.taint
            ):
                saw = f"rank {number} takes device {number}, and its node has 8 (16 ranks on two nodes)."
                yield at(event, saw)
                return


def _index(device: Value) -> int | None:
    if not device.is_known:
        return None
    text = str(device.const).rpartition(":")[2]
    return int(text) if text.isdigit() else None


@rule("PL056")
def world_from_devices(witnesses: Sequence[WitnessTrace]) -> Iterator[Spot]:
    """Report the devices of a node that are taken for the number of ranks."""
    witness = witnesses[2]
    for event in witness.events("init"):
        world = event.world
        if world is None or event.spawned:
            continue
        if world.is_known and world.fact("devices") and world.const != witness.place.world:
            yield at(event, "world_size is the number of devices of one node.")
    for event in witness.events("device_count"):
        yield at(
            event,
            "a sum over all ranks is divided by torch.cuda.device_count(), the devices of one node.",
        )


@rule("PL058")
def hard_coded_port(witnesses: Sequence[WitnessTrace]) -> Iterator[Spot]:
    """Report an address that overwrites the launcher's."""
    witness = witnesses[1]
    launched = witness.reads & {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
    methods = [event.method for event in witness.events("init")]
    is_read = all(one is None or one.const in (None, "env://") for one in methods)
    if not launched or witness.spawns or not methods or not is_read:
        return
    for event in witness.events("setenv"):
        is_fixed = event.value.is_known and event.value.taint == Taint.NONE
        if event.key == "MASTER_PORT" and is_fixed and not event.guard:
            variable = ", ".join(sorted(launched))
            saw = f"MASTER_PORT={event.value.const} replaces the launcher's, which gave {variable}."
            yield at(event, saw)
