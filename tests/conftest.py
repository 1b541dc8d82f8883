"""Fixtures for all tests: the pool of ranks, and the GPU marker."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.dist.pool import Pool, freeze_modules

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

SLOW_LIMIT_S = 1000


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Warm rank processes: `ranks.run(fn, nproc=2, args=())`; see tests/dist/pool.py."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True, scope="session")
def _state_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


_tests = itertools.count()


@pytest.fixture(autouse=True)
def _own_state(_state_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers of one test know nothing of another's jobs, nor of this user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(_state_folder / str(next(_tests))))


def pytest_configure() -> None:
    """Take signals as in a terminal: a shell script starts what runs in the background with SIGINT and
    SIGQUIT ignored, nohup with SIGHUP, and every process that a test starts would inherit that."""
    usual = (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    )
    for number, action in usual:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, action)


_num_modules = 0


def pytest_runtest_setup() -> None:
    """Give this process's own tensors one thread, as each rank has, and keep what has been imported since
    the last test out of searches for garbage."""
    global _num_modules
    _num_modules = freeze_modules(_num_modules)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of slow.txt, each of which must exist, as slow and as siblings; slow tests get more
    time; tests marked `gpu` skip where there is no CUDA device."""
    lines = (Path(__file__).parent / "slow.txt").read_text().splitlines()
    slow = {line for line in lines if line and not line.startswith("#")}
    found: set[str] = set()
    for item in items:
        name = item.nodeid
        names = {name, name.partition("[")[0], name.partition("::")[0]}
        found |= names
        if names & slow:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.sibling)
        # The limit of other tests is shorter than what the pool of ranks gives a slow test on a busy machine.
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))
    if not any("::" in argument for argument in config.args):
        files = {name for name in found if "::" not in name}
        unknown = [line for line in sorted(slow - found) if line.partition("::")[0] in files]
        if unknown:
            raise pytest.UsageError(f"tests/slow.txt names tests that do not exist: {', '.join(unknown)}")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
