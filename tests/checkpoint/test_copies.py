"""The distribution of files over disks, and the transfers between them."""

from __future__ import annotations

import random

from paceline.checkpoint.copies import Found, list_candidates, place_copies, plan_transfers
from paceline.checkpoint.hashed import FileRecord
from paceline.checkpoint.manifest import Manifest


def records(**sizes: int) -> dict[str, FileRecord]:
    return {name: FileRecord(size, "0" * 64) for name, size in sizes.items()}


def test_copies_go_to_other_failure_domains_first() -> None:
    files = records(**{f"f{n}": 100 for n in range(4)})
    homes = {f"f{n}": {n} for n in range(4)}
    placed = place_copies(files, homes, ["rack1", "rack1", "rack2", "rack2"], 2)
    for name, disks in placed.items():
        assert next(iter(homes[name])) in disks
        assert len({disk // 2 for disk in disks}) == 2, name
    unknown = place_copies(files, homes, [""] * 4, 3)
    assert all(len(set(disks)) == 3 for disks in unknown.values())


def test_copies_are_spread_evenly() -> None:
    files = records(**{f"f{n}": 100 for n in range(8)})
    placed = place_copies(files, {f"f{n}": {n} for n in range(8)}, [""] * 8, 2)
    count = [sum(disk in disks for disks in placed.values()) for disk in range(8)]
    assert count == [2] * 8


def test_what_has_enough_copies_is_left_alone() -> None:
    files = records(a=5, b=5)
    placed = place_copies(files, {"a": {0, 2}, "b": {1}}, ["", "", ""], 2)
    assert placed["a"] == (0, 2)
    assert placed["b"][0] == 1
    assert len(placed["b"]) == 2


def test_transfers_bring_everything_from_disks_that_have_it_without_deadlock() -> None:
    draw = random.Random(5)
    for _ in range(50):
        num_disks = draw.randint(2, 6)
        names = [f"f{n}" for n in range(draw.randint(1, 9))]
        files = records(**{name: draw.randint(0, 99) for name in names})
        holders = {name: set(draw.sample(range(num_disks), draw.randint(1, num_disks))) for name in names}
        wanted = {name: set(draw.sample(range(num_disks), draw.randint(0, num_disks))) for name in names}
        plan = plan_transfers(files, holders, wanted)
        assert all(each.source in holders[each.name] for each in plan)
        brought = {name: {each.target for each in plan if each.name == name} for name in names}
        assert brought == {name: wanted[name] - holders[name] for name in names}
        # Each disk does its own transfers in the order of the plan, and both sides have to be at it.
        queues = {disk: [each for each in plan if disk in (each.source, each.target)] for disk in range(6)}
        for each in plan:
            assert queues[each.source].pop(0) == each
            assert queues[each.target].pop(0) == each


def found(step: int, generation: int, *files: str) -> Found:
    manifest = Manifest(step, records(a=1, b=2), {"run": "r", "generation": generation})
    return Found(manifest, manifest.digest(), frozenset(files))


def test_the_newest_step_of_the_latest_start_comes_first() -> None:
    stale, again, older = found(4, 1, "a", "b"), found(4, 2, "a"), found(3, 1, "a")
    disks = [[older, again], [stale, found(3, 1, "b")], []]
    listed = [(each.manifest.step, each.generation, holders) for each, holders in list_candidates(disks)]
    assert listed == [
        (4, 2, {"a": {0}, "b": set()}),
        (4, 1, {"a": {1}, "b": {1}}),
        (3, 1, {"a": {0}, "b": {1}}),
    ]
