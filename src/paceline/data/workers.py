"""How a loader's worker processes live and end.

A worker ends with its rank, and not before: it ignores the signals that ask a run to stop, is killed when
the rank has no more use for it, and kills itself when the rank has gone without a word.
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

_LOOK_S = 0.5


def prepare_worker(worker_id: int) -> None:
    """Lets a worker outlive the signals that ask a run to stop: terminals and schedulers send them to all
    processes, and the rank still wants to finish its step and save. Workers end with their rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_rank, name="paceline-end-with-rank", daemon=True).start()


def _end_with_rank() -> None:
    """Ends this worker when its rank has gone. Torch's own watch never ends one that waits for room in its
    full pipe: the other workers hold the reading end too, so it doesn't break.

    (Not PR_SET_PDEATHSIG: that strikes when the thread ends that made the worker. Nor the parent's id:
    with multiprocessing's fork server, the default from Python 3.14 on, the parent is that server.)
    """
    maker = multiprocessing.parent_process()
    assert maker is not None
    with contextlib.suppress(psutil.NoSuchProcess):
        rank = psutil.Process(maker.pid)
        while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def let_workers_be_killed(torch_iterator: Any) -> None:
    """Makes `terminate()`, which torch and a rank that exits call on workers, kill them for certain, as they
    ignore SIGTERM."""
    for worker in list_workers(torch_iterator):
        worker._popen.terminate = worker._popen.kill


def end_workers(torch_loader: DataLoader[Any], owner_pid: int) -> None:
    """Ends the workers of a loader; only the process that made them does."""
    if os.getpid() == owner_pid:  # a forked worker must not end its siblings
        end_iteration(torch_loader)
