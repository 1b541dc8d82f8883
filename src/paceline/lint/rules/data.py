"""Rules on how samples reach the ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paceline.lint.rules.rule import Spot, WitnessTrace, at, is_averaged, name_of, rule, trains
from paceline.lint.trace import TraceEvent
from paceline.lint.values import Taint, Value

_SPLITS = re.compile(r"rank|world|replica|shard|node|num_parts|process_index", re.IGNORECASE)


def _trains_wrapped(witness: WitnessTrace, loader: Value) -> bool:
    """Whether batches of a loader go into the backward of a wrapped model."""
    return any(
        loader in event.data["deps"]
        and any(is_averaged(dep) and dep.fact("group") is None for dep in event.data["deps"])
        for event in witness.events("backward")
    )


def _plain_loaders(witness: WitnessTrace) -> Iterator[tuple[TraceEvent, Value]]:
    """Yield loaders without a sampler, whose dataset was not split and is known."""
    for event in witness.events("loader"):
        dataset = event.dataset
        plain = event.batch_sampler.is_none and (
            event.sampler.is_none
            or (event.sampler.kind == "sampler" and not event.sampler.fact("distributed"))
        )
        if not plain or event.extra or dataset.kind != "dataset" or event.loader.fact("escaped"):
            continue
        if dataset.fact("split") or Taint.RANK & dataset.taint or dataset.fact("escaped"):
            continue
        if Taint.UNKNOWN & dataset.taint and not dataset.fact("read") and dataset.ref is None:
            continue
        if _trains_wrapped(witness, event.loader):
            yield event, dataset


def _mentions_split(dataset: Value) -> bool:
    """Whether the class of a dataset may split by rank."""
    classes = dataset.ref.lineage() if dataset.script_class is not None else ()
    nodes = [node for one in classes for node in ast.walk(one.node)]
    names = [getattr(node, field, "") for node in nodes for field in ("id", "attr", "arg")]
    return any(_SPLITS.search(name) for name in names if isinstance(name, str))


@rule("PL020 PL024")
def no_distributed_sampler(witness: WitnessTrace) -> Iterator[Spot]:
    """Report a loader that gives every rank all samples, and trains a wrapped model."""
    for event, dataset in _plain_loaders(witness):
        if not dataset.fact("iterable") and not _mentions_split(dataset):
            saw = f"`{name_of(event.node)}` gives each rank all samples: it has no DistributedSampler."
            yield at(event, saw)
            rounds = [one.loops for one in witness.events("iterate") if one.loader is event.loader]
            epochs = {one[len(event.loader.loops)] for one in rounds if len(one) > len(event.loader.loops)}
            for loop in witness.loops:
                if id(loop.node) in epochs and loop.count not in (0, 1):
                    yield at(loop, "no round tells a DistributedSampler its epoch: there is none.", "PL024")


@rule("PL021")
def unsharded_iterable(witness: WitnessTrace) -> Iterator[Spot]:
    """Report an iterable dataset that gives every rank the same samples, and trains a wrapped model."""
    for event, dataset in _plain_loaders(witness):
        if dataset.fact("iterable") and dataset.ref is not None and not _mentions_split(dataset):
            name = dataset.ref.node.name
            yield at(event, f"`{name}.__iter__` depends on neither the rank nor the number of ranks.")


@rule("PL022")
def sampler_of_the_node(first: WitnessTrace) -> Iterator[Spot]:
    """Report a DistributedSampler with the numbers of a node in place of the job's."""
    for witness in first.all:
        place = witness.place
        for event in witness.events("sampler"):
            rank, replicas = event.rank, event.replicas
            if event.spawned:
                continue
            size = place.world if replicas is None or replicas.is_none else replicas.const
            number = place.rank if rank is None or rank.is_none else rank.const
            if not isinstance(size, int) or not isinstance(number, int):
                continue
            if rank is not None and rank.is_known and not Taint.RANK & rank.taint:
                continue
            if size == place.world != place.local_world and number == place.local_rank != place.rank:
                saw = "the rank is the local one: ranks 0 and 8 of two nodes of 8 get the same samples."
                yield at(event, saw)
            elif size == place.local_world < place.world and number >= size:
                saw = f"num_replicas is the number of devices of one node, and rank {number} is beyond it."
                yield at(event, saw)


@rule("PL023")
def shuffle_with_sampler(witness: WitnessTrace) -> Iterator[Spot]:
    """Report a loader with both shuffle=True and a sampler."""
    for event in witness.events("loader"):
        if event.shuffle.is_known and event.shuffle.const is True and event.sampler.kind == "sampler":
            yield at(event, "shuffle=True and a sampler.")


@rule("PL024")
def no_set_epoch(witness: WitnessTrace) -> Iterator[Spot]:
    """Report a shuffling DistributedSampler that is used for several epochs and never told the epoch."""
    told: set[Value] = set()
    for event in witness.events("set_epoch"):
        for one in event.target.alternatives():
            told |= {one, *one.attrs.get("sampler", one).alternatives()}
    used = trains(witness)
    if any(event.target.is_opaque for event in witness.events("set_epoch")):
        return
    for event in witness.events("iterate"):
        loader = event.loader
        for sampler in loader.attrs["sampler"].alternatives():
            inner = sampler.fact("sampler") or sampler
            mine = {loader, sampler, inner}
            if not inner.fact("distributed") or not inner.fact("shuffle") or mine & told:
                continue
            outer = event.loops[len(inner.loops) :]
            if not outer or loader not in used or any(one.fact("escaped") for one in mine):
                continue
            counts = [loop.count for loop in witness.loops if id(loop.node) in outer]
            if counts and all(count in (0, 1) for count in counts):
                continue
            node = inner.node
            assert node is not None
            yield Spot(node, event.path, f"`{name_of(node)}` shuffles, and set_epoch is never called on it.")


@rule("PL025", "warning")
def loader_in_the_epoch_loop(witness: WitnessTrace) -> Iterator[Spot]:
    """Report a loader with workers that is made anew in each epoch from the same parts."""
    used = trains(witness)
    for event in witness.events("loader"):
        loader, workers = event.loader, event.num_workers
        if not loader.loops or loader not in used or not isinstance(workers.const, int):
            continue
        if workers.const < 1 or event.dataset.kind != "dataset" or event.dataset.loops == loader.loops:
            continue
        size = loader.attrs["batch_size"]
        if not size.is_known and (Taint.UNKNOWN & size.taint or not size.fact("default")):
            continue
        yield at(event, f"each round of the loop starts {workers.const} new workers for the same dataset.")


@rule("PL026")
def split_twice(witness: WitnessTrace) -> Iterator[Spot]:
    """Report a DistributedSampler over data that are this rank's part already."""
    for event in witness.events("sampler"):
        rank, replicas = event.rank, event.replicas
        is_whole = replicas is None or replicas.const == witness.place.world
        if not event.dataset.fact("split") or not is_whole or (rank is not None and not rank.is_known):
            continue
        yield at(event, f"`{name_of(event.node)}` splits data that were split by rank before.")


@rule("PL059")
def split_by_unlike_draws(first: WitnessTrace) -> Iterator[Spot]:
    """Report random_split without a common seed, if a DistributedSampler shares out the result."""
    for witness in first.all[1:2]:
        used = {id(event.dataset.node) for event in witness.events("sampler")}
        for event in witness.events("random_split"):
            seed = event.seed
            if event.generator is not None or event.unread or id(event.node) not in used:
                continue
            if seed is None or Taint.RANK & seed or Taint.LOCAL & seed:
                how = "before any seed is set" if seed is None else "with a seed that differs between ranks"
                yield at(event, f"random_split draws {how}, so each rank has another training set.")
