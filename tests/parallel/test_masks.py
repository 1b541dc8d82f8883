"""Masks: the same for a sample wherever it stands, the parts of a whole, and as random as they should be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.parallel.dropout.masks import Cut, SampleDim, draw_mask, place_samples
from paceline.parallel.split import Split

CPU = torch.device("cpu")


def draw(
    size: list[int],
    samples: range | list[int] | None = None,
    *,
    p: float = 0.3,
    key: str = "layers.0/dropout#0",
    seed: int = 1,
    cuts: tuple[Cut, ...] = (),
) -> Tensor:
    samples = range(size[0]) if samples is None else samples
    place = place_samples(size, len(samples), cuts)
    return draw_mask(seed, key, samples, size, p, CPU, place=place, cuts=cuts)


def test_a_sample_has_its_mask_in_any_company_and_place() -> None:
    whole = draw([8, 5, 6])
    assert torch.equal(draw([2, 5, 6], range(3, 5)), whole[3:5])
    assert torch.equal(draw([3, 5, 6], [7, 0, 7]), whole[[7, 0, 7]])
    assert not torch.equal(whole[0], whole[1])


def test_batch_first_sequence_first_and_flat_are_one_mask() -> None:
    whole = draw([4, 10, 6])
    assert torch.equal(draw([10, 4, 6], range(4)), whole.transpose(0, 1))
    assert torch.equal(draw([40, 6], range(4)), whole.flatten(0, 1))
    heads = draw([4, 3, 10, 10])
    assert torch.equal(draw([12, 10, 10], range(4)), heads.flatten(0, 1))
    assert torch.equal(draw([4, 10]), draw([10, 4], range(4)).T)


@pytest.mark.parametrize("size", [[4], [4, 1], [1], [4, 1, 1, 1], [4, 0, 3]])
def test_small_tensors(size: list[int]) -> None:
    assert draw(size).shape == tuple(size)


def test_one_sample_in_every_form() -> None:
    whole = draw([4, 10, 6])
    assert torch.equal(draw([1, 10, 6], range(2, 3))[0], whole[2])
    assert torch.equal(draw([10, 1, 6], range(2, 3))[:, 0], whole[2])
    assert torch.equal(draw([10, 6], range(2, 3)), whole[2])


@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize(
    ("size", "dim", "outer"),
    [
        ([4, 8, 12, 12], 1, 1),  # heads
        ([4, 8, 12, 12], 2, 1),  # a part of the queries
        ([4, 10, 24], 2, 3),  # queries, keys and values of some heads
        ([4, 12, 6], 1, 1),  # a part of the sequence
        ([16, 4, 6], 0, 1),  # and with the sequence first, a part as long as there are samples
        ([32, 12, 12], 0, 1),  # heads, flat with the samples
        ([4, 24], 1, 1),
    ],
)
def test_parts_joined_are_the_whole(size: list[int], dim: int, outer: int, num_parts: int) -> None:
    samples = range(3, 7)
    whole = draw(size, samples)
    per_sample = place_samples(size, 4).folded and dim == 0
    own = [length // num_parts if d == dim else length for d, length in enumerate(size)]
    parts = [
        draw(own, samples, cuts=(Cut(dim, outer, num_parts, part),))
        if not per_sample
        else draw_mask(
            1,
            "layers.0/dropout#0",
            samples,
            own,
            0.3,
            CPU,
            place=SampleDim(0, folded=True),
            cuts=(Cut(dim, outer, num_parts, part),),
        )
        for part in range(num_parts)
    ]
    joined = Split(dim, outer * (4 if per_sample else 1), num_parts).join(parts)
    assert torch.equal(joined, whole)


def test_two_cuts_at_once() -> None:
    whole = draw([4, 8, 12])
    part = draw([4, 4, 4], range(4), cuts=(Cut(1, 1, 2, 1), Cut(2, 2, 3, 0)))
    assert torch.equal(part, Split(2, 2, 3).take(Split(1, 1, 2).take(whole, 1), 0))


def test_without_samples_the_first_one_stands_for_all() -> None:
    assert place_samples([3, 7], 4) == SampleDim(None)
    assert place_samples([], 4) == SampleDim(None)
    assert torch.equal(draw([3, 7], range(5, 9)), draw([3, 7], range(5, 10)))
    assert not torch.equal(draw([3, 7], range(5, 9)), draw([3, 7], range(6, 10)))


def test_known_bits() -> None:
    """Another hash would change the masks of runs that go on from a checkpoint."""
    keep = draw([2, 4, 16], [5, 6], p=0.5, key="a.b/dropout#1", seed=77)
    words = [int("".join(str(int(bit)) for bit in row), 2) for row in keep.flatten(0, 1)]
    assert words == [29969, 6519, 54850, 51593, 36728, 55938, 34228, 18189]


@pytest.mark.parametrize("p", [0.0, 0.001, 0.1, 0.5, 0.9, 1.0])
def test_keep_rate(p: float) -> None:
    keep = draw([4, 512, 512], p=p)
    sigma = math.sqrt(p * (1 - p) / keep.numel())
    assert abs(1 - keep.double().mean().item() - p) <= 4 * sigma


def normalised(**options: object) -> Tensor:
    """Masks of 32 samples [128, 128] with mean 0 and variance 1."""
    keep = draw([32, 128, 128], **options)  # type: ignore[arg-type]
    return (keep.double() - 0.7) / math.sqrt(0.21)


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of what independent values have."""
    return abs((a * b).sum().item()) / math.sqrt(a.numel())


def test_draws_are_independent() -> None:
    z = normalised()
    for other in (
        normalised(key="layers.1/dropout#0"),
        normalised(key="layers.0/dropout#1"),
        normalised(seed=2),
        normalised(samples=range(32, 64)),
    ):
        assert correlation(z, other) < 4
    assert correlation(z[1:], z[:-1]) < 4
    for shift in (1, 2, 3, 64):
        assert correlation(z[:, shift:], z[:, :-shift]) < 4
        assert correlation(z[:, :, shift:], z[:, :, :-shift]) < 4
    # Rows and columns are hashed apart and then added, so rectangles would show first.
    first, second = z[:, ::2] * z[:, 1::2], z[:, 1::2] * z[:, ::2].roll(1, 1)
    assert correlation(first[:, :, ::2], first[:, :, 1::2]) < 4
    assert correlation(second[:, :, ::2], second[:, :, 1::2]) < 4


def test_no_row_or_column_stands_out() -> None:
    z = normalised()
    for sums in (z.sum((0, 1)), z.sum((0, 2)), z.sum((1, 2)), z.sum(2).flatten()):
        count = z.numel() / sums.numel()
        assert sums.abs().max().item() / math.sqrt(count) < 5.0
        assert sums.std().item() / math.sqrt(count) == pytest.approx(1, abs=5 / math.sqrt(2 * sums.numel()))
    columns = z.flatten(0, 1)
    products = columns.T @ columns / math.sqrt(len(columns))
    products.fill_diagonal_(0)
    assert products.abs().max().item() < 5.5  # of 8128 pairs
    assert products.std().item() == pytest.approx(1, abs=0.03)
