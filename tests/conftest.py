"""Fixtures for all tests: the pool of ranks, and the GPU marker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.pool import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Warm rank processes: `ranks.run(fn, nproc=2, args=())`; see tests/dist/pool.py."""
    pool = Pool()
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` skip where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
