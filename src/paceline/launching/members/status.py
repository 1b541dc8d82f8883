"""Reads the state of a job from its store, from outside."""

from __future__ import annotations

import time
from typing import Any

from paceline.launching.members.pulse import read_record
from paceline.launching.members.record import JobNode
from paceline.launching.members.reports import explain_store
from paceline.launching.members.store import Store, StoreError


def describe_job(store: Store, wait_s: float) -> dict[str, Any] | None:
    """Return the state of a job with a row per node, or None if the store knows no such job.

    Args:
        wait_s: a node is there if its beat changes in this time.
    """
    try:
        text = store.read()
        if text is None:
            return None
        keys = list(read_record(text).nodes)
        before = dict(zip(keys, store.read_beats(keys), strict=True))
        time.sleep(wait_s if keys else 0.0)
        record = read_record(store.read())
        keys = list(record.nodes)
        after = dict(zip(keys, store.read_beats(keys), strict=True))
    except StoreError as error:
        raise explain_store(store.name, str(error)) from None
    here = {key for key, beat in after.items() if beat is not None and beat != before.get(key)}
    settled = record.members if record.is_complete else []
    rows: list[tuple[JobNode, int | None]] = [(node, number) for number, node in enumerate(settled)]
    rows += [(node, None) for node in record.nodes.values() if node not in settled]
    members = [
        {
            "name": node.name,
            "address": node.address,
            "number": number,
            "is_here": node.key in here,
            "is_leaving": node.key in record.leaving,
            "ranks": node.nproc,
        }
        for node, number in rows
    ]
    return {
        "state": record.state,
        "round": record.round,
        "least": record.terms.least,
        "most": record.terms.most,
        "members": members,
        "gone": [{"name": name, "why": why} for name, why in record.gone.values()],
        "refused": record.refused,
    }
