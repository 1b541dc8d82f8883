"""Controls the lifetime of a loader's worker processes.

A worker ends with its rank, and not before. It ignores the signals that ask a run to stop, is killed when the
rank no longer needs it, and kills itself when the rank has died.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import psutil
from torch.utils.data import DataLoader

from paceline.torch_seams.loader import end_iteration, list_workers

_POLL_S = 0.5


def prepare_worker(worker_id: int) -> None:
    """Make a worker ignore the signals that ask a run to stop.

    Terminals and schedulers send these to all processes, while the rank still has to finish its step and
    save. Workers end with their rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_rank, name="paceline-end-with-rank", daemon=True).start()


def _end_with_rank() -> None:
    """End this worker when its rank has died. Torch's own check never ends a worker that waits for room in
    its full pipe: the other workers hold the reading end too, so the pipe does not break.

    (Not PR_SET_PDEATHSIG: it fires when the thread ends that made the worker. Nor the parent's id: with
    multiprocessing's fork server, the default from Python 3.14 on, the parent is that server.)
    """
    maker = multiprocessing.parent_process()
    assert maker is not None
    with contextlib.suppress(psutil.NoSuchProcess):
        rank = psutil.Process(maker.pid)
        while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def let_workers_be_killed(torch_iterator: Any) -> None:
    """Make `terminate()` on workers kill them, because they ignore SIGTERM.

    Both torch and an exiting rank call it."""
    for worker in list_workers(torch_iterator):
        worker._popen.terminate = worker._popen.kill


def end_workers(torch_loader: DataLoader[Any], owner_pid: int) -> None:
    """End the workers of a loader; does nothing outside of the process that made them."""
    if os.getpid() == owner_pid:  # a forked worker must not end its siblings
        end_iteration(torch_loader)
