"""Rules on devices, addresses and the process group."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.lint.rules.rule import Spot, WitnessTrace, at, rule
from paceline.lint.values import Taint, Value


@rule("PL055")
def rank_as_device(first: WitnessTrace) -> Iterator[Spot]:
    """Report the number of a rank of the job that is used as the number of a device of the node."""
    for witness in first.all:
        for event in witness.events("device"):
            number = _index(event.device)
            if number == witness.place.rank >= event.limit and Taint.RANK & event.device.taint:
                saw = f"rank {number} takes device {number}, and its node has 8 (16 ranks on two nodes)."
                yield at(event, saw)
                return


def _index(device: Value) -> int | None:
    text = str(device.const).rpartition(":")[2]
    return int(text) if text.isdigit() else None


@rule("PL056")
def world_from_devices(first: WitnessTrace) -> Iterator[Spot]:
    """Report the devices of a node that are taken for the number of ranks."""
    witness = first.all[2]
    for event in witness.events("init"):
        world = event.world
        if world is None or event.spawned:
            continue
        if world.is_known and world.fact("devices") and world.const != witness.place.world:
            yield at(event, "world_size is the number of devices of one node.")
    for event in witness.events("device_count"):
        saw = "a sum over all ranks is divided by torch.cuda.device_count(), the devices of one node."
        yield at(event, saw)


@rule("PL058")
def hard_coded_port(first: WitnessTrace) -> Iterator[Spot]:
    """Report an address that overwrites the launcher's."""
    witness = first.all[1]
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
