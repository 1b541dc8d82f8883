"""Random numbers by what is computed: seeds, and states that survive a round trip."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from paceline.checkpoint import CheckpointFolder
from paceline.checkpoint.content import prepare_whole
from paceline.generators import (
    preserved_generators,
    read_generators,
    seed_generators,
    write_generators,
)
from paceline.seeds import derive_seed
from tests.checkpoint.states import load_newest, save_content

CPU = torch.device("cpu")


def draw() -> list[float]:
    """From all generators; an odd number of normals would leave half of a pair behind in numpy."""
    return [
        random.random(),
        random.gauss(),
        float(np.random.rand()),
        *np.random.normal(size=2).tolist(),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def draw_and_raise() -> None:
    draw()
    raise ZeroDivisionError


def test_seeds_are_a_path_and_any_change_gives_another() -> None:
    paths: list[tuple[Any, ...]] = [
        (0,),
        (1,),
        (0, 0),
        (0, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
        ("model",),
        (0, "model"),
    ]
    paths += [(1, 23), (12, 3), (123,), (-1,), (2**62,)]
    seeds = [derive_seed(*path) for path in paths]
    assert len(set(seeds)) == len(paths)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2, "x") == derive_seed(1, 2, "x")
    # Part of what a run is: another value would change every run's numbers.
    assert derive_seed(0, 1, 0, 0) == 6929971993531640619


def test_the_same_seed_gives_the_same_numbers_whatever_was_before() -> None:
    seen = []
    for burn in range(3):
        for _ in range(burn):
            draw()
        seed_generators(7, CPU)
        seen.append([draw(), draw()])
    assert seen[0] == seen[1] == seen[2]
    seed_generators(8, CPU)
    assert all(a != b for a, b in zip(draw(), seen[0][0], strict=True))


def test_preserved_generators_are_as_they_were() -> None:
    seed_generators(1, CPU)
    draw()
    expected = None
    for _ in range(3):
        state = read_generators(CPU)
        with preserved_generators(CPU):
            seed_generators(5, CPU)
            draw()
        found = draw()
        write_generators(state, CPU)
        assert found == draw()
        write_generators(state, CPU)
        assert expected is None or found == expected
        expected = found


def test_preserved_inside_of_preserved() -> None:
    seed_generators(4, CPU)
    expected = [draw(), draw()]
    seed_generators(4, CPU)
    with preserved_generators(CPU):
        seed_generators(6, CPU)
        inner = draw()
        with preserved_generators(CPU):
            seed_generators(7, CPU)
            draw()
        seed_generators(6, CPU)
        assert draw() == inner
    assert [draw(), draw()] == expected


def test_preserved_after_an_error_too() -> None:
    seed_generators(2, CPU)
    expected = draw()
    seed_generators(2, CPU)
    with pytest.raises(ZeroDivisionError), preserved_generators(CPU):
        draw_and_raise()
    assert draw() == expected


def test_states_survive_a_checkpoint(tmp_path: Any) -> None:
    seed_generators(3, CPU)
    draw()
    np.random.normal()  # so that halves of pairs wait in numpy and random
    folder = CheckpointFolder(tmp_path, keep=1)
    save_content(
        folder, 1, prepare_whole({"w": torch.zeros(1)}, {}, {"rng": read_generators(CPU)}, None), identity={}
    )
    expected = [draw() for _ in range(3)]
    loaded = load_newest(folder)
    assert loaded is not None
    write_generators(loaded.state["rng"], CPU)
    assert [draw() for _ in range(3)] == expected


def test_a_state_of_another_device_is_ignored() -> None:
    state = read_generators(CPU)
    write_generators(state | {"cuda": torch.zeros(16, dtype=torch.uint8)}, CPU)
    assert "cuda" not in state
