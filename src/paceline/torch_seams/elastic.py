"""Reach into torchelastic's rendezvous and agent."""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from paceline.torch_seams.check import require, set_existing

require("elastic")


def forget_store(handler: RendezvousHandler) -> None:
    """Have a rendezvous open a store of its own for the next round.

    A dynamic one keeps its first for all rounds (dynamic_rendezvous.py, next_rendezvous).
    """
    if isinstance(handler, DynamicRendezvousHandler):
        set_existing(handler, "_bootstrap_store_info", None)
        set_existing(handler, "_shared_tcp_store_server", None)
