from __future__ import annotations

import random

import numpy as np
import torch

from paceline.train.rng import (
    derive_seed,
    preserved_generators,
    read_generators,
    seed_generators,
    write_generators,
)

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_seeds_follow_from_every_part_of_the_path() -> None:
    seeds = {derive_seed(*path) for path in [(0, 1, 0, 2), (0, 1, 2, 0), (0, 12), ("0", "1"), (1, 1)]}
    assert len(seeds) == 5
    assert derive_seed(3, "valid") == derive_seed(3, "valid")
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_same_seed_gives_the_same_numbers_from_every_generator() -> None:
    with preserved_generators(CPU):
        seed_generators(5, CPU)
        first = draw()
        seed_generators(6, CPU)
        assert all(a != b for a, b in zip(draw(), first, strict=True))
        seed_generators(5, CPU)
        assert draw() == first


def test_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    seed_generators(1, CPU)
    wanted = [draw(), draw(), draw()]
    seed_generators(1, CPU)
    found = [draw()]
    with preserved_generators(CPU):
        seed_generators(7, CPU)
        inside = [draw()]
        with preserved_generators(CPU):  # an evaluation inside of a step
            seed_generators(8, CPU)
            draw()
        inside.append(draw())
    found.append(draw())
    with preserved_generators(CPU):
        seed_generators(7, CPU)
        assert [draw(), draw()] == inside
    found.append(draw())
    assert found == wanted


def test_generators_are_restored_after_an_error() -> None:
    seed_generators(1, CPU)
    wanted = draw()
    seed_generators(1, CPU)
    try:
        with preserved_generators(CPU):
            seed_generators(2, CPU)
            raise KeyError
    except KeyError:
        pass
    assert draw() == wanted


def test_a_saved_state_gives_the_same_numbers_again() -> None:
    with preserved_generators(CPU):
        seed_generators(3, CPU)
        np.random.standard_normal()  # leaves the second half of a pair behind
        random.gauss(0, 1)
        state = read_generators(CPU)
        wanted = (draw(), np.random.standard_normal(), random.gauss(0, 1))
        seed_generators(4, CPU)
        write_generators(state, CPU)
        assert (draw(), np.random.standard_normal(), random.gauss(0, 1)) == wanted
