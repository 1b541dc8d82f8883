"""Rules on the samples that ranks train on."""

from __future__ import annotations

from itertools import combinations

from paceline.watch.reasoning.sentinels.book import Facts, Proof

# Where ranks split the samples and shuffle again in each epoch, they meet those of others in the second one,
# and their own half as often. So many, with so few repeats, then have a probability below 0.001.
_LEAST_COMMON = 24
_REPEATS = 0.1


def check_samples(facts: Facts) -> Proof | None:
    """Report ranks that train on the same samples, in whatever order.

    It compares what the models get, not what loaders give. Silent where samples repeat within a rank too, as
    when they are drawn with replacement, and where random augmentation makes them differ.
    """
    for (rank, one), (other, two) in combinations(facts.items(), 2):
        if None in one.values["batches"] or None in two.values["batches"]:
            continue
        mine = [row for batch in one.values["batches"] for row in batch]
        theirs = [row for batch in two.values["batches"] for row in batch]
        common = len(set(mine) & set(theirs))
        repeats = max(len(mine) - len(set(mine)), len(theirs) - len(set(theirs)))
        if common < _LEAST_COMMON or repeats > _REPEATS * common:
            continue
        saw = f"{common} of the first {len(mine)} samples of rank {rank} are also among those of rank {other}"
        # A DistributedSampler has split what is another set on each rank.
        code = "PL059" if one.values["is_split"] and mine != theirs else "PL020"
        return Proof(code, saw, (rank, other), one.frames, "trains on them")
    return None


def check_order(facts: Facts) -> Proof | None:
    """Report a DistributedSampler that gives two epochs in the same order.

    Silent without shuffling, where a round trains nothing (a look at a batch, evaluation), and where rounds
    overlap.
    """
    for rank, fact in facts.items():
        saw = (
            f"the DistributedSampler has shuffled two epochs alike, of {fact.values['passes'][0]} and "
            f"{fact.values['passes'][1]} backward passes so far, both as epoch {fact.values['epoch']}"
        )
        return Proof("PL024", saw, (rank,), fact.frames, "begins the second one")
    return None
