"""Spares: ranks beyond a run's layout, which wait until the run ends or their launcher starts them again.

Protocol, through the store in which the ranks of a round meet (the launcher's, under `paceline run`):

1. When the main rank leaves, it sets `paceline/ended` to its exit code.
2. Each spare reads this key every half second, and exits with the same code.

A spare takes part in no collective. If nodes come or go, its launcher starts it again with the others.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.exit_codes import STOPPED, stop_code
from paceline.place import RankPlace

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_ENDED = "paceline/ended"
_EVERY_S = 0.5
_STORE_S = 30.0


@contextlib.contextmanager
def announcing_end(place: RankPlace) -> Iterator[None]:
    """Report to the spares how the main rank has left the block; on the main rank only."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
        raise
    finally:
        # A lost store ends the spares too.
        with contextlib.suppress(RuntimeError):
            _reach_store(place).set(_ENDED, str(code))


def wait_as_spare(place: RankPlace) -> int:
    """Wait until the run ends; return its exit code.

    Return at once if no launcher would start this rank again.

    Raises:
        ConnectionError: if the run failed, or the store has gone.
    """
    if not place.agent_store:
        return 0
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: sys.exit(stop_code(number)))
    try:
        store = _reach_store(place)
        while not store.check([_ENDED]):
            time.sleep(_EVERY_S)
        code = int(store.get(_ENDED))
    except RuntimeError as error:
        raise ConnectionError("connection closed by peer: the store of the ranks has gone") from error
    if code not in (0, STOPPED):
        raise ConnectionError("connection closed by peer: the run has failed on other ranks")
    return code


def _reach_store(place: RankPlace) -> Store:
    assert place.master_addr is not None
    assert place.master_port is not None
    return dist.TCPStore(  # type: ignore[attr-defined]
        place.master_addr, place.master_port, is_master=False, timeout=timedelta(seconds=_STORE_S)
    )
