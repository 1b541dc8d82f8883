"""Accesses private parts of torch's DataLoader and its workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from paceline.torch_seams.installed import checked, set_existing

with checked("loader"):
    import torch.utils.data._utils.worker as torch_worker


def forget_worker() -> None:
    """Make `get_worker_info` return None in this worker, so that a data set does not divide itself."""
    set_existing(torch_worker, "_worker_info", None)


def list_workers(iterator: Any) -> list[Any]:
    """Return the worker processes of a loader's iterator; none if it reads in this process."""
    return list(getattr(iterator, "_workers", ()))


def end_iteration(loader: DataLoader[Any]) -> None:
    """End the running workers of a loader, including persistent ones."""
    iterator: Any = loader._iterator
    if iterator is not None:
        iterator._shutdown_workers()
        loader._iterator = None
